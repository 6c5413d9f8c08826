"""Takes a rank's memory apart: what parameters, gradients, buckets, optimizer state and buffers hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.probes.digest import plain_memory
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES
from ddpcheck.probes.process.device_memory import held_elsewhere
from ddpcheck.records.schema import MemoryPartsRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import WatchedModule
    from ddpcheck.agent.tracked_optimizer import WatchedOptimizer


def parts_of(watched: WatchedModule, optimizer: WatchedOptimizer, kept: int, base: int) -> MemoryPartsRecord:
    """Taken between backward and step, when everything but the activations is there."""
    parameters = watched.tensors(watched.parameters)
    gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
    buckets = _reduced_bytes(watched, parameters)
    views = watched.options.get("gradient_as_bucket_view") is True
    device = parameters[0].device if parameters else torch.device("cpu")
    return MemoryPartsRecord(
        module=watched.index,
        optimizer=optimizer.index,
        step=optimizer.steps,
        device=str(device),
        parameters=held(parameters),
        buffers=held(watched.tensors(watched.buffers)),
        # A view holds on to the whole bucket: what lies outside is what the reducer does not know.
        gradients=max(0, _sizes(gradients) - buckets) if views else held(gradients),
        buckets=buckets,
        views=views,
        state=held(_state(optimizer, parameters)),
        kept=0 if views else kept,
        base=base,
        elsewhere=held_elsewhere(device) if device.type == "cuda" else {},
    )


def gradient_bytes(watched: WatchedModule) -> int:
    """What the gradients hold now."""
    return held(tensor.grad for tensor in watched.tensors(watched.parameters) if tensor.grad is not None)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind `tensors`, what several of them share counted once."""
    storages: dict[int, int] = {}
    rest = 0
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            rest += _sparse(tensor)
            continue
        memory = tensor if type(tensor) in PLAIN_TYPES else plain_memory(tensor)
        if memory is None:
            rest += tensor.nbytes  # a wrapper: what lies behind it is its own affair
            continue
        storage = memory.untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return rest + sum(storages.values())


def _sparse(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return int(tensor._values().nbytes + tensor._indices().nbytes)
    return 0


def _sizes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def _reduced_bytes(watched: WatchedModule, parameters: list[torch.Tensor]) -> int:
    """DDP's buckets are flat copies of the gradients it reduces, without gaps."""
    places = watched.backward.places if watched.backward is not None else range(len(parameters))
    reduced = [parameters[place] for place in places if place < len(parameters)]
    return sum(tensor.nbytes for tensor in reduced if tensor.requires_grad)


def _state(optimizer: WatchedOptimizer, parameters: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    held_by: Any = optimizer.ref()
    # ZeRO steps an inner optimizer, which holds this rank's share of the state.
    inner = getattr(held_by, "optim", held_by)
    state = getattr(inner, "state", {})
    for parameter in parameters:
        for value in (state.get(parameter) or {}).values():
            if isinstance(value, torch.Tensor):
                yield value
