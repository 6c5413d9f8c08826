"""Records how the loss is computed: reduced by a mean or a sum, and multiplied by which constants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.state import LossFormRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# A form counts once this many steps in a row had it: weights by the number of tokens change from step to step.
STABLE_STEPS = 4
# The first steps, in which most faults appear, and this many from each power of two on.
FIRST_STEPS = 8
MOST_RECORDS = 32
# Limits of what is read per backward, and per step.
_MOST_NODES = 16
_MOST_TERMS = 8
_MOST_BACKWARDS = 16
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
# Operations that change neither the value nor the gradient of a scalar.
_TRANSPARENT = ("Squeeze", "View", "UnsafeView", "ToCopy", "Alias", "Reshape", "Clone", "Unsqueeze", "Expand")


class LossTerm(NamedTuple):
    function: str
    reduction: str
    # None: a factor that is not a constant.
    factor: float | None


class _Known:
    """What is known of the losses of one optimizer."""

    def __init__(self) -> None:
        self.form: tuple[LossTerm, ...] = ()
        self.since = 0
        self.repeated = 0
        self.written: tuple[LossTerm, ...] = ()
        self.records = 0


class LossFormProbe(Probe):
    """Reads the end of the graph: the last operations of the loss, from the root of each outermost backward."""

    name = "loss_form"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._depth = 0
        # As they are, and without the factor of a GradScaler.
        self._terms: list[LossTerm] = []
        self._unscaled: list[LossTerm] = []
        self._backwards = 0
        self._due = True
        self._where = ""
        self._known: dict[int, _Known] = {}

    def backward_called(self, root: Any = None) -> None:
        self._depth += 1
        if not self._due or self._depth > 1 or self._backwards >= _MOST_BACKWARDS:
            return
        self._backwards += 1
        if not self._where:
            self._where = user_callsite()
        node = getattr(root, "grad_fn", None)
        _merge(self._terms, loss_terms(node))
        _merge(self._unscaled, loss_terms(_scaled(node)))

    def backward_returned(self) -> None:
        self._depth = max(0, self._depth - 1)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._depth = 0
        if self._due and self._backwards:
            self._add(optimizer, tuple(self._unscaled if optimizer.scaled else self._terms))
        self._clear()
        self._due = _is_due(optimizer.steps + 1)

    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        self._clear()

    def _clear(self) -> None:
        self._terms, self._unscaled, self._backwards, self._where = [], [], 0, ""

    def _add(self, optimizer: TrackedOptimizer, form: tuple[LossTerm, ...]) -> None:
        known = self._known.setdefault(optimizer.index, _Known())
        if form != known.form:
            known.form, known.since, known.repeated = form, optimizer.steps, 0
        known.repeated += 1
        constant = bool(form) and all(term.factor is not None for term in form)
        stable = form if constant and known.repeated >= STABLE_STEPS else ()
        if stable == known.written or known.records >= MOST_RECORDS or (not stable and known.repeated > 1):
            return
        known.written = stable
        known.records += 1
        self.context.write(
            LossFormRecord(
                optimizer.index,
                known.since,
                [term.function for term in stable],
                [term.reduction for term in stable],
                [float(f"{term.factor or 0.0:.9g}") for term in stable],
                self._where,
                known.records == MOST_RECORDS,
            )
        )


def _is_due(step: int) -> bool:
    return step < FIRST_STEPS or step - (1 << (step.bit_length() - 1)) < STABLE_STEPS


def _merge(terms: list[LossTerm], more: list[LossTerm]) -> None:
    """Micro-batches of a step have the same terms."""
    terms += [term for term in more if term not in terms]


def _scaled(node: Any) -> Any:
    """What a GradScaler has multiplied."""
    inner = [each for each, _ in node.next_functions if each is not None] if node is not None else []
    return inner[0] if len(inner) == 1 and type(node).__name__.startswith("MulBackward") else node


def loss_terms(node: Any) -> list[LossTerm]:
    """The terms of which the root is the sum. Empty: it is not known how they are computed."""
    terms: list[LossTerm] = []
    pending: list[tuple[Any, float | None]] = [(node, 1.0)]
    nodes = 0
    while pending:
        current, factor = pending.pop()
        nodes += 1
        if current is None or nodes > _MOST_NODES or len(terms) >= _MOST_TERMS:
            return []
        name = type(current).__name__.rstrip("0123456789").removesuffix("Backward")
        inner = [each for each, _ in current.next_functions if each is not None]
        if name in ("Add", "Sub") and inner:
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
            terms.append(LossTerm(*_function(name, current), factor))
    return terms


def _function(name: str, node: Any) -> tuple[str, str]:
    if name in ("Mean", "Sum"):
        return "reduction", name.lower()
    reduction = torch_compat.read(torch_compat.LOSS_REDUCTION, node)
    return name, _REDUCTIONS.get(reduction, "") if type(reduction) is int else ""


def _factor(node: Any) -> float | None:
    """The constant by which the loss is multiplied or divided. A value on a device would have to be waited for."""
    other = torch_compat.read(torch_compat.LOSS_FACTOR, node)
    if not isinstance(other, torch.Tensor) or not other.is_cpu or other.dim() or other.requires_grad:
        return None
    value = float(other)
    return value if math.isfinite(value) else None
