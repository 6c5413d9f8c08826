"""Reads the end of a loss's graph: its terms, how they are reduced, their constant factors, settings and targets."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.samples.fingerprint import read_sampled

# A form counts once this many steps in a row had it: weights by the number of tokens change from step to step.
STABLE_STEPS = 4
# Graphs are read at the first steps, in which most faults appear, and at this many from each power of two on.
FIRST_STEPS = 8
# Limits of what is read per backward.
_MOST_NODES = 16
MOST_TERMS = 8
# Operations between a reduction and the loss of each sample.
_MOST_BELOW = 6
# Bytes of class weights that are read.
_MOST_BYTES = 4096
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
# Operations that change neither the value nor the gradient of a scalar.
_TRANSPARENT = ("Squeeze", "View", "UnsafeView", "ToCopy", "Alias", "Reshape", "Clone", "Unsqueeze", "Expand")
_CROSS_ENTROPY = ("NllLoss", "NllLoss2D")
# Arguments of loss functions that a node keeps, and tensors with one value per class.
_SETTINGS = {
    "NllLoss": ("ignore_index",),
    "NllLoss2D": ("ignore_index",),
    "SmoothL1Loss": ("beta",),
    "HuberLoss": ("delta",),
    "MultiMarginLoss": ("margin", "p"),
    "CtcLoss": ("blank", "zero_infinity"),
}
_WEIGHTS = {
    "NllLoss": "weight",
    "NllLoss2D": "weight",
    "MultiMarginLoss": "weight",
    "BinaryCrossEntropyWithLogits": "pos_weight",
}
_LABEL_SMOOTHING = "label_smoothing"


class LossTerm(NamedTuple):
    function: str
    reduction: str
    # None: a factor that is not a constant.
    factor: float | None
    # The node of the loss function, if it is known, and the smoothing of its labels.
    node: Any = None
    smoothing: float = 0.0

    @property
    def form(self) -> LossTerm:
        """Without what belongs to one backward."""
        return self._replace(node=None, smoothing=0.0)


def is_due(step: int) -> bool:
    return step < FIRST_STEPS or step - (1 << (step.bit_length() - 1)) < STABLE_STEPS


def loss_terms(node: Any) -> list[LossTerm]:
    """The terms of which the root is the sum. Empty: it is not known how they are computed."""
    terms: list[LossTerm] = []
    pending: list[tuple[Any, float | None]] = [(node, 1.0)]
    nodes = 0
    while pending:
        current, factor = pending.pop()
        nodes += 1
        if current is None or nodes > _MOST_NODES or len(terms) >= MOST_TERMS:
            return []
        name, inner = _name(current), _inner(current)
        if name in ("Add", "Sub") and inner:
            smoothed = _smoothed(name, inner)
            if smoothed is not None:
                loss, smoothing = smoothed
                terms.append(LossTerm(*_function(_name(loss), loss), factor, loss, smoothing))
                continue
            # A minus sign makes no difference to how much a term counts.
            pending += [(each, factor) for each in reversed(inner)]
        elif name in ("Mul", "Div") and len(inner) == 1:
            own = _factor(current)
            if own is None or factor is None or (name == "Div" and not own):
                pending.append((inner[0], None))
            else:
                pending.append((inner[0], factor / own if name == "Div" else factor * own))
        elif name in (*_TRANSPARENT, "Neg") and len(inner) == 1:
            pending.append((inner[0], factor))
        else:
            loss, smoothing = _below(current) if name in ("Mean", "Sum") else (current, 0.0)
            terms.append(LossTerm(*_function(name, current), factor, loss, smoothing))
    return terms


def settings_of(term: LossTerm) -> dict[str, Any]:
    """Arguments of the loss function by name; empty for a function that has none, or is not known."""
    if term.node is None:
        return {}
    function = _name(term.node)
    settings: dict[str, Any] = {}
    for name in _SETTINGS.get(function, ()):
        value = torch_compat.read(torch_compat.LOSS_SETTINGS[name], term.node)
        if isinstance(value, (bool, int, float)):
            # A negative index is read as an unsigned number.
            settings[name] = value - (1 << 64) if type(value) is int and value >> 63 else value
    if function in _CROSS_ENTROPY:
        settings[_LABEL_SMOOTHING] = term.smoothing
    if function in _WEIGHTS:
        name = _WEIGHTS[function]
        known, weights = torch_compat.saved_tensor(name, term.node)
        if known and weights is None:
            settings[name] = ""
        elif weights is not None and weights.is_cpu and weights.dim() <= 1:
            settings[name] = hashlib.blake2b(read_sampled(weights, _MOST_BYTES), digest_size=4).hexdigest()
    return settings


def targets_of(term: LossTerm) -> torch.Tensor | None:
    """The numbers of classes that a cross entropy was given."""
    if term.node is None or _name(term.node) not in _CROSS_ENTROPY:
        return None
    return torch_compat.saved_tensor("target", term.node)[1]


def function_of(term: LossTerm) -> str:
    """The loss function; below a mean or sum over the batch, that of the samples."""
    return term.function if term.node is None else _name(term.node)


def scaled(node: Any) -> Any:
    """What a GradScaler has multiplied."""
    inner = _inner(node) if node is not None else []
    return inner[0] if len(inner) == 1 and type(node).__name__.startswith("MulBackward") else node


def _name(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _inner(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _function(name: str, node: Any) -> tuple[str, str]:
    if name in ("Mean", "Sum"):
        return "reduction", name.lower()
    reduction = torch_compat.read(torch_compat.LOSS_REDUCTION, node)
    return name, _REDUCTIONS.get(reduction, "") if type(reduction) is int else ""


def _factor(node: Any) -> float | None:
    """The constant by which the loss is multiplied or divided. A value on a device would have to be waited for."""
    other = torch_compat.read(torch_compat.LOSS_FACTOR, node)
    if type(other) not in (int, float) and (
        not isinstance(other, torch.Tensor) or not other.is_cpu or other.dim() or other.requires_grad
    ):
        return None
    value = float(other)
    return value if math.isfinite(value) else None


def _below(node: Any) -> tuple[Any, float]:
    """The loss of each sample that a mean or sum reduces, and the smoothing of its labels; None if it is not known."""
    for _ in range(_MOST_BELOW):
        inner = _inner(node)
        if _name(node) in _SETTINGS or _name(node) in _WEIGHTS:
            return node, 0.0
        smoothed = _smoothed(_name(node), inner)
        if smoothed is not None:
            return smoothed
        if len(inner) != 1:
            break
        node = inner[0]
    return None, 0.0


def _smoothed(name: str, inner: list[Any]) -> tuple[Any, float] | None:
    """The cross entropy in `(1 - smoothing) * loss + smoothing / classes * sum over classes`, as torch computes it."""
    if name != "Add" or len(inner) != 2 or {_name(each) for each in inner} != {"Mul"}:
        return None
    loss, spread = (_inner(each) for each in inner)
    kept, share = map(_factor, inner)
    if len(loss) != 1 or len(spread) != 1 or _name(loss[0]) not in _CROSS_ENTROPY:
        return None
    classes = _classes(spread[0])
    if (
        not classes
        or kept is None
        or share is None
        or not math.isclose(share * classes, 1 - kept, abs_tol=1e-6)
    ):
        return None
    return loss[0], round(1 - kept, 6)


def _classes(node: Any) -> int:
    """How many classes a sum over all of them adds up; 0 if there is no such sum close below."""
    for _ in range(_MOST_BELOW):
        sizes = torch_compat.read(torch_compat.SUMMED_SIZES, node)
        dimensions = torch_compat.read(torch_compat.SUMMED_DIMENSIONS, node)
        if _name(node) == "Sum" and isinstance(sizes, tuple) and isinstance(dimensions, tuple):
            # An unsigned number if it counts from the end.
            at = dimensions[0] if len(dimensions) == 1 else len(sizes)
            return int(sizes[at]) if 0 <= at < len(sizes) else 0
        inner = _inner(node)
        if len(inner) != 1:
            break
        node = inner[0]
    return 0
