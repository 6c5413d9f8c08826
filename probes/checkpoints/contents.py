"""Finds state dicts in what was saved or loaded: of models, optimizers, schedulers, scalers and generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ddpcheck.records.kinds.checkpoints import StateKind

MAX_DEPTH = 4
MAX_VISITED = 4096
MAX_TENSORS = 20_000
# Bytes of the state of torch's generator on the CPU.
_RNG_BYTES = 5056


class FoundState(NamedTuple):
    """A state dict inside of a checkpoint, and the keys that lead to it."""

    kind: StateKind
    path: str
    state: Any


def find_states(thing: Any) -> list[FoundState]:
    """All state dicts in `thing`, the outermost of each kind first. Reads dicts, lists and tuples only."""
    visited = [0]
    return list(_find(thing, "", MAX_DEPTH, visited))


def _find(thing: Any, path: str, depth: int, visited: list[int]) -> Iterator[FoundState]:
    visited[0] += 1
    if visited[0] > MAX_VISITED:
        return
    kind = _kind(thing)
    if kind is not None:
        yield FoundState(kind, path, thing)
    if kind not in (None, StateKind.MODEL) or depth == 0:
        return
    if isinstance(thing, dict):
        items = list(thing.items())
    elif isinstance(thing, (list, tuple)):
        items = list(enumerate(thing[:64]))
    else:
        return
    for key, value in items:
        if isinstance(value, (dict, list, tuple)) or (kind is None and isinstance(value, torch.Tensor)):
            yield from _find(value, f"{path}.{key}" if path else str(key), depth - 1, visited)


def _kind(thing: Any) -> StateKind | None:
    if isinstance(thing, torch.Tensor):
        is_state = thing.dtype is torch.uint8 and thing.dim() == 1 and thing.numel() == _RNG_BYTES
        return StateKind.RNG if is_state else None
    if not isinstance(thing, dict):
        return None
    if isinstance(thing.get("state"), Mapping) and isinstance(thing.get("param_groups"), list):
        return StateKind.OPTIMIZER
    if "last_epoch" in thing and ("_step_count" in thing or "base_lrs" in thing or "_schedulers" in thing):
        return StateKind.SCHEDULER
    if "scale" in thing and "_growth_tracker" in thing:
        return StateKind.SCALER
    tensors = sum(isinstance(value, torch.Tensor) for value in thing.values())
    names = all(isinstance(key, str) for key in thing)
    return StateKind.MODEL if tensors and names and 2 * tensors >= len(thing) else None


def named_tensors(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict by name, a bounded number of them."""
    named: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if len(named) >= MAX_TENSORS:
            break
        if isinstance(value, torch.Tensor):
            named[f"{prefix}{name}"] = value
    return named


class OptimizerContents:
    """An optimizer's state dict: what is compared later, without its tensors."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        groups = [group for group in state["param_groups"] if isinstance(group, Mapping)]
        states = {key: value for key, value in state["state"].items() if isinstance(value, Mapping)}
        self.settings = {name for group in groups for name in group}
        # Parameters with a state. A state that is empty, or only counts steps, is not worth restoring.
        self.entries = sum(any(map(_is_moment, each.values())) for each in states.values())
        # By position of the parameter and name, the dtype of each state that has a value per element.
        self.dtypes: dict[tuple[int, str], torch.dtype] = {}
        order = [key for group in groups for key in group.get("params", ())]
        positions = {key: position for position, key in enumerate(order)}
        for key, each in states.items():
            for name, value in each.items():
                if key in positions and _is_moment(value):
                    self.dtypes[positions[key], str(name)] = value.dtype
        self.sizes = len(order)


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0
