"""Computes a local gradient again, from what another rank has handed over."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcheck import device_api, torch_compat
from ddpcheck.probes.replay.capture import digest_outputs, tensors_in
from ddpcheck.probes.replay.module_state import (
    autocast_of_rank,
    generators_of_rank,
    refuse_collectives,
    replaced,
)
from ddpcheck.probes.replay.payload import read_payload, unpack
from ddpcheck.probes.scan.scanner import Scan, TensorScanner

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.probes.digest import DigestFuture


class Replayed(NamedTuple):
    """The results of one replay; those of a device may still be computed."""

    outputs: DigestFuture
    gradients: Scan


class DamagedPayloadError(Exception):
    """The file of the other rank cannot be read, or belongs to something else."""


class ParametersDifferError(Exception):
    """The other rank had other parameters in its forward: its gradient cannot be computed again here."""


def scan_gradients(gradients: Sequence[torch.Tensor | None]) -> Scan:
    """Digests and sketches of values alone: a gradient in a bucket has other strides than one of its own."""
    tensors = [
        None if each is None or each.layout is not torch.strided else each.detach().contiguous()
        for each in gradients
    ]
    ones = b"\1" * len(tensors)
    scanner = TensorScanner()
    scanner.update(tensors)
    return scanner.scan(tensors, digest=ones, sketch=ones)


def replay(
    tracked: TrackedModule,
    module: torch.nn.Module,
    path: Path,
    identity: dict[str, Any],
    own_parameters: str,
    devices: Sequence[torch.device],
    default_device: torch.device | None = None,
) -> Replayed:
    """Raises what the module raises; FileNotFoundError if nothing was handed over."""
    device = devices[0] if devices else torch.device("cpu")
    try:
        content, tensors = read_payload(path, device)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedPayloadError(str(error)) from error
    if any(content.get(key) != value for key, value in identity.items()):
        raise DamagedPayloadError("the file is of another module or step")
    if content.get("parameters") != own_parameters:
        raise ParametersDifferError
    args, kwargs = unpack(content["arguments"], tensors)
    parameters = tracked.parameter_tensors()
    with (
        generators_of_rank(content["generators"], tensors, devices),
        replaced(module, parameters, content["alignments"], content["attributes"], tensors) as leaves,
        refuse_collectives(),
        torch.enable_grad(),
    ):
        for leaf, had_zeros in zip(leaves, content["zeros"], strict=True):
            if had_zeros:
                leaf.grad = torch.zeros_like(leaf)
        with autocast_of_rank(content["autocast"]), torch_compat.with_default_device(default_device):
            outputs = list(tensors_in(module(*args, **kwargs)))
        digests = digest_outputs(outputs)
        chosen = [(outputs[int(index)], tensors[row]) for index, row in content["gradients"].items()]
        for output, gradient in chosen:
            # The whole gradient of an output, also of one from which another output was computed.
            register: Any = output.register_hook
            register(_replacing(gradient))
        trained = tuple(leaf for leaf in leaves if leaf.requires_grad)
        # Not torch.autograd.backward, which ddpcheck observes. The gradients of these leaves only: whatever else the
        # graph reaches belongs to the program.
        torch_compat.lookup(torch_compat.ENGINE).run_backward(
            tuple(output for output, _ in chosen),
            tuple(gradient for _, gradient in chosen),
            False,
            False,
            trained,
            allow_unreachable=True,
            accumulate_grad=True,
        )
        return Replayed(digests, scan_gradients([leaf.grad for leaf in leaves]))


def _replacing(gradient: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda computed: gradient


def environment(devices: Sequence[torch.device]) -> str:
    """A digest of what the bits of a gradient depend on, besides the operands."""
    names = []
    for device in devices:
        api = device_api.api_of(device)
        names.append(str(device.type) if api is None else api.identity(device).name)
    backends: Any = torch.backends
    facts = [
        torch.__version__,
        _processor(),
        names,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        bool(backends.mkldnn.is_available()) and bool(getattr(backends.mkldnn, "enabled", True)),
        device_api.math_settings() if names else [],
    ]
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def is_deterministic(devices: Sequence[torch.device]) -> bool:
    """Whether the same operands give the same bits for certain: in one thread of a CPU, or on request."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return not devices and torch.get_num_threads() == 1


@cache
def _processor() -> str:
    """Kernels differ between processors, even with the same instruction sets."""
    capability: Any = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", str)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{capability()} {line.partition(':')[2].strip()}"
    except OSError:
        pass
    return f"{capability()} {platform.processor()}"
