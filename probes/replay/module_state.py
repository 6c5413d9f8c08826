"""Puts the state of another rank into a module for one replay, and restores its own to the last object.

A replay runs the module itself, since a copy of it would need pickle or the cooperation of its classes. Its parameters
and all tensors that it could write to are replaced by copies meanwhile: no hook on a parameter fires, DDP's reducer
sees no gradient, and no buffer is written.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ddpcheck import device_api, torch_compat
from ddpcheck.probes.replay.payload import ALIGNMENT, DTYPES, NotPortableError, Packer, aligned_copy

_SCALARS = (bool, int, float, str, type(None))
_MAX_TEXT = 1000
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")


class CollectiveInReplayError(Exception):
    """The forward or the backward issues a collective: no other rank would answer it."""


def refuse_collectives() -> AbstractContextManager[Any]:
    """A dispatch mode in which collectives raise before they are issued."""
    base: Any = torch_compat.lookup(torch_compat.DISPATCH_MODE)
    if base is None:
        raise NotPortableError("this version of torch has no dispatch modes")

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise CollectiveInReplayError(str(func))
        return func(*args, **(kwargs or {}))

    mode: AbstractContextManager[Any] = type("RefuseCollectives", (base,), {"__torch_dispatch__": dispatch})()
    return mode


# Attributes.


def pack_attributes(module: torch.nn.Module, packer: Packer) -> dict[str, Any]:
    """Buffers, other tensors and plain values in the attributes of all submodules, by the submodule's name."""
    parameters = set(map(id, module.parameters()))
    packed: dict[str, Any] = {}
    for name, child in module.named_modules():
        tensors = {
            key: packer.tensor(buffer)
            for key, buffer in torch_compat.read(torch_compat.BUFFERS, child, {}).items()
            if buffer is not None
        }
        others: dict[str, int] = {}
        values: dict[str, Any] = {}
        for key, value in vars(child).items():
            if isinstance(value, torch.Tensor):
                if id(value) in parameters:
                    continue
                others[key] = packer.tensor(value)
            elif type(value) in _SCALARS and (type(value) is not str or len(value) <= _MAX_TEXT):
                values[key] = value
        packed[name] = [tensors, others, values]
    return packed


@dataclass(frozen=True)
class SavedAttributes:
    """The attributes of one submodule, and the contents of those that are containers."""

    child: torch.nn.Module
    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, child: torch.nn.Module) -> SavedAttributes:
        attributes = dict(vars(child))
        containers = [(value, value.copy()) for value in attributes.values() if type(value) in _CONTAINERS]
        return cls(child, attributes, containers)

    def restore(self) -> None:
        now = vars(self.child)
        for key in [key for key in now if key not in self.attributes]:
            del now[key]
        for key, value in self.attributes.items():
            if key not in now or now[key] is not value:
                now[key] = value
        for container, content in self.containers:
            if not _same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, (list, deque)) else container.update(
                    content
                )


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the same objects as its copy."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), content.items(), strict=True)
        return all(key == other and value is same for (key, value), (other, same) in pairs)
    if isinstance(container, set):
        return bool(container == content)
    return all(value is same for value, same in zip(container, content, strict=True))


@contextmanager
def replaced(
    module: torch.nn.Module,
    parameters: Sequence[torch.Tensor],
    alignments: Sequence[int],
    attributes: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
) -> Iterator[list[torch.Tensor]]:
    """Copies of `parameters` and the attributes of another rank take the place of the module's own.

    Yields the copies. `tensors` are those that the values of `attributes` refer to.
    """
    saved = [SavedAttributes.of(child) for child in module.modules()]
    copies: dict[int, torch.Tensor] = {}
    for parameter, alignment in zip(parameters, alignments, strict=True):
        copy = torch.nn.Parameter(aligned_copy(parameter, alignment), parameter.requires_grad)
        copies[id(parameter)] = copy
    leaves = list(copies.values())
    try:
        for name, child in module.named_modules():
            _replace(child, copies, attributes.get(name) or [{}, {}, {}], tensors)
        yield leaves
    finally:
        for each in saved:
            each.restore()


def _replace(
    child: torch.nn.Module,
    copies: dict[int, torch.Tensor],
    of_child: Sequence[Mapping[str, Any]],
    tensors: Sequence[torch.Tensor],
) -> None:
    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        """One copy for each tensor, however many names it has."""
        if id(tensor) not in copies:
            if tensor.layout is not torch.strided:
                raise NotPortableError("a sparse attribute")
            copies[id(tensor)] = aligned_copy(tensor, tensor.data_ptr() % ALIGNMENT)
        return copies[id(tensor)]

    buffers, others, values = of_child
    own = vars(child)
    parameters: dict[str, Any] = torch_compat.read(torch_compat.PARAMETERS, child, {})
    for key, parameter in parameters.items():
        if parameter is not None:
            parameters[key] = copy_of(parameter)
    own_buffers: dict[str, Any] = torch_compat.read(torch_compat.BUFFERS, child, {})
    for key, buffer in own_buffers.items():
        if key in buffers:
            # A tensor under two names is one tensor here too.
            own_buffers[key] = copies.setdefault(id(buffer), tensors[buffers[key]])
        elif buffer is not None:
            own_buffers[key] = copy_of(buffer)
    for key, value in list(own.items()):
        if value is parameters or value is own_buffers:
            continue
        if key in others or key in values:
            continue
        if isinstance(value, torch.Tensor):
            own[key] = copy_of(value)
        elif type(value) is list:
            # Such as the weights that an RNN keeps beside its parameters.
            value[:] = [copy_of(each) if isinstance(each, torch.Tensor) else each for each in value]
        elif type(value) is dict:
            value.update({k: copy_of(each) for k, each in value.items() if isinstance(each, torch.Tensor)})
    own.update({key: tensors[index] for key, index in others.items()})
    own.update(values)


# Generators.


def pack_generators(packer: Packer, devices: Sequence[torch.device]) -> dict[str, Any]:
    """The states of the generators that a forward may use. Reading a state draws no number."""
    version, internal, gauss = random.getstate()
    packed: dict[str, Any] = {
        "cpu": packer.tensor(torch.get_rng_state()),
        "devices": [packer.tensor(each.get_state()) for each in device_api.generators_of(devices)],
        "python": [version, list(internal), gauss],
    }
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        name, keys, position, has_gauss, cached = numpy_random.get_state(legacy=True)
        packed["numpy"] = [
            str(name),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(cached),
        ]
    return packed


@contextmanager
def generators_of_rank(
    packed: Mapping[str, Any], tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> Iterator[None]:
    """The generators of the program have the states of another rank meanwhile."""
    numpy_random = sys.modules.get("numpy.random")
    generators = device_api.generators_of(devices)
    before = torch.get_rng_state()
    before_devices = [each.get_state() for each in generators]
    before_python = random.getstate()
    before_numpy = None if numpy_random is None else numpy_random.get_state(legacy=True)
    try:
        torch.set_rng_state(tensors[packed["cpu"]])
        for generator, index in zip(generators, packed["devices"], strict=True):
            generator.set_state(tensors[index])
        version, internal, gauss = packed["python"]
        random.setstate((version, tuple(internal), gauss))
        if numpy_random is not None and "numpy" in packed:
            numpy_random.set_state(tuple(packed["numpy"]))
        yield
    finally:
        torch.set_rng_state(before)
        for generator, state in zip(generators, before_devices, strict=True):
            generator.set_state(state)
        random.setstate(before_python)
        if numpy_random is not None:
            numpy_random.set_state(before_numpy)


# Autocast.


def pack_autocast(devices: Sequence[torch.device]) -> dict[str, list[Any]]:
    """By device type: whether autocast is on, its dtype, and whether it keeps converted weights."""
    cache = torch.is_autocast_cache_enabled()
    packed: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(["cpu", *(device.type for device in devices)]):
        enabled, dtype = _autocast(kind)
        packed[kind] = [enabled, str(dtype), cache]
    return packed


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    api: Any = torch
    if hasattr(api, "get_autocast_dtype"):
        return bool(api.is_autocast_enabled(kind)), api.get_autocast_dtype(kind)
    # Before torch 2.4.
    if kind == "cpu":
        return bool(api.is_autocast_cpu_enabled()), api.get_autocast_cpu_dtype()
    return bool(api.is_autocast_enabled()), api.get_autocast_gpu_dtype()


@contextmanager
def autocast_of_rank(packed: Mapping[str, Sequence[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, (enabled, dtype, cache) in packed.items():
            if enabled or _autocast(kind)[0]:
                chosen = DTYPES[dtype]
                stack.enter_context(
                    torch.autocast(kind, dtype=chosen, enabled=bool(enabled), cache_enabled=bool(cache))
                )
        yield
