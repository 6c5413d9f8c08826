"""Compares what reads tensors fast with operators of torch on the CPU. Run as a child: it imports torch.

On a device, that is the kernel of `probes/scan`; on a machine without one, the same kernel in Triton's interpreter, and
the compiled part for the CPU. Digests must be equal bit for bit, counts of non-finite values exactly, sketches within
`kernel_check.TOLERANCE` of the norm.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpcheck import device_api
from ddpcheck.probes.digest.multilinear_torch import lane_sums
from ddpcheck.probes.digest.protocol import finish_leaf
from ddpcheck.probes.digest.tensor_bytes import layout_of
from ddpcheck.probes.scan import device_kernels
from ddpcheck.probes.scan.device_kernels import TableKernel, kernel_of
from ddpcheck.probes.scan.device_table import DeviceTable
from ddpcheck.probes.scan.kernel_check import TOLERANCE
from ddpcheck.probes.scan.library import scan_library
from ddpcheck.probes.scan.scanner import TensorScanner
from ddpcheck.probes.scan.table import DIGEST, NUMBERS, SKETCH
from ddpcheck.probes.sketches.batch import row_by_torch

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OTHERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)
_SMALL = (1, 1023, 2049)
# More than one program of the kernel, more than one block of a sketch, and many programs.
_LARGE = (70_003, 300_001, (1 << 24) + 5)
_MOST_DIFFERENCES = 8
_REPEATS = 20
_INTERPRETED = "TRITON_INTERPRET"


@dataclass
class KernelResult:
    """One implementation against the reference."""

    name: str
    device: str
    tensors: int = 0
    seconds: float = 0.0
    # What differs, as text; empty if all agree.
    differences: list[str] = field(default_factory=list)
    # Why it was not compared; empty if it was.
    missing: str = ""
    gigabytes_per_second: float | None = None


def samples(
    small: Iterable[int] = _SMALL, large: Iterable[int] = _LARGE, alignments: Iterable[int] = (0, 1, 3)
) -> list[torch.Tensor]:
    """On the CPU: all dtypes, sizes around blocks, three alignments, other orders of memory, values at the limits."""
    generator = torch.Generator().manual_seed(5)
    tensors = []
    small, alignments = tuple(small), tuple(alignments)
    for dtype in (*_FLOATS, *_OTHERS):
        for size in (*small, *large):
            # Cheaper than one generator call per tensor of this size, and no less sensitive to errors of position.
            base = torch.randn(min(size, 1 << 16) + 3, generator=generator) * 3
            base = base.repeat(size // len(base) + 1)[: size + 3]
            for skipped in alignments if size in small else (1,):
                values = (
                    base.to(dtype)
                    if dtype.is_floating_point or dtype.is_complex
                    else (base * 20).long().to(dtype)
                )
                tensors.append(values[skipped : skipped + size])
    wide = torch.randn(300, 47, generator=generator)
    tensors += [wide.t(), wide.to(torch.bfloat16).t(), wide[:5].reshape(5, 47, 1).permute(2, 1, 0)]
    broken = torch.randn(3000, generator=generator)
    broken[5::1000] = torch.tensor([math.nan, math.inf, -math.inf])
    return [*tensors, broken, broken.to(torch.float16), wide * 1e30, wide * 1e-40]


def compare(
    kernel: TableKernel, device: torch.device, tensors: list[torch.Tensor], repeat: bool = True
) -> list[str]:
    """The differences of a kernel on `device` from operators of torch on the CPU."""
    moved = [_like(tensor, device) for tensor in tensors]
    table = DeviceTable(device, kernel)
    table.update(moved)
    work = bytes(DIGEST | (SKETCH if sketchable else 0) for sketchable in table.sketchable)
    first = table.scan(work)
    second = table.scan(work) if repeat else first
    digests, numbers = first.digests(), memoryview(first.numbers()).cast("d")
    differences = []
    if second.digests() != digests or second.numbers() != first.numbers():
        differences.append("two launches on the same tensors gave different results")
    lanes = lane_sums(tensors, torch.device("cpu")).tolist()
    for row, tensor in enumerate(tensors):
        expected = finish_leaf(layout_of(tensor).header, lanes[row])
        # What the kernel does not take, such as complex numbers, is read by operators of torch anyway.
        if table.digestible[row] and digests[16 * row : 16 * row + 16] != expected:
            differences.append(f"digest of {_name(tensor)}")
        if table.sketchable[row]:
            differences += _sketch_difference(numbers[NUMBERS * row : NUMBERS * (row + 1)].tolist(), tensor)
    return differences


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`, with the same strides and the same offset from an aligned address."""
    offset = tensor.storage_offset()
    storage = torch.as_strided(tensor, (offset + _span(tensor),), (1,), 0).to(device)
    return torch.as_strided(storage, tensor.shape, tensor.stride(), offset)


def _span(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _sketch_difference(numbers: Sequence[float], tensor: torch.Tensor) -> list[str]:
    value, squares, nonfinite = row_by_torch(tensor).tolist()
    if numbers[2] != nonfinite:
        return [f"{numbers[2]:.0f} instead of {nonfinite:.0f} non-finite values in {_name(tensor)}"]
    if nonfinite:
        return []
    norm = math.sqrt(squares)
    error = max(abs(numbers[0] - value), abs(numbers[1] - norm))
    return [f"sketch of {_name(tensor)}: off by {error / norm:.1e} norms"] if error > TOLERANCE * norm else []


def _name(tensor: torch.Tensor) -> str:
    return (
        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} at offset {tensor.storage_offset()}"
    )


def on_device(device: torch.device) -> KernelResult:
    """The kernel of a device, as a job would use it, and its speed."""
    result = KernelResult("kernel", str(device))
    choice = kernel_of(device)
    if choice.kernel is None:
        loss = choice.loss.value if choice.loss is not None else "unknown"
        result.missing = f"{loss}: {choice.detail}"
        return result
    result.name = f"{choice.kernel.name} kernel"
    _run(result, choice.kernel, device, samples())
    result.gigabytes_per_second = _speed(choice.kernel, device)
    return result


def _speed(kernel: TableKernel, device: torch.device) -> float | None:
    """Of digest and sketch of 256 MiB of float32 in 64 tensors, from the first launch to the last."""
    api = device_api.api_of(device)
    if api is None:
        return None
    tensors = [torch.randn(1 << 20, device=device) for _ in range(64)]
    table = DeviceTable(device, kernel)
    table.update(tensors)
    work = bytes(DIGEST | SKETCH for _ in tensors)
    table.scan(work).digests()
    api.synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        table.scan(work)
    api.synchronize(device)
    nbytes = _REPEATS * sum(tensor.nbytes for tensor in tensors)
    return round(nbytes / (time.perf_counter() - began) / 1e9, 1)


def in_interpreter() -> KernelResult:
    """The kernel on the CPU, in Triton's interpreter, which runs the same code without compiling it."""
    result = KernelResult("triton kernel in the interpreter", "cpu")
    # Triton reads it when it is imported.
    os.environ[_INTERPRETED] = "1"
    try:
        import numpy

        from ddpcheck.probes.scan.triton_table import TritonKernel
    except ImportError as error:
        result.missing = str(error)
        return result
    numpy.seterr(all="ignore")  # the interpreter's own arithmetic
    device = torch.device("cpu")
    # Far slower than compiled: one size, and one tensor with two programs.
    tensors = [*samples((1025,), (), (0, 1)), torch.randn(33_001)[1:]]
    _run(result, TritonKernel(device), device, tensors, repeat=False)
    return result


def compiled_for_cpu() -> KernelResult:
    """The compiled part of ddpcheck for tensors on the CPU against operators of torch."""
    result = KernelResult("compiled scan", "cpu")
    if scan_library() is None:
        result.missing = "ddpcheck was installed without a C compiler"
        return result
    tensors = samples(large=_LARGE[:2])
    began = time.perf_counter()
    result.tensors = len(tensors)
    scans: list[TensorScanner] = [TensorScanner(), TensorScanner()]
    scans[0].update(tensors)
    # Without a table, every tensor is read by the fallback.
    scans[1]._tables = []
    floating = bytes(tensor.dtype in _FLOATS for tensor in tensors)
    every = b"\1" * len(tensors)
    fast, slow = (scan.scan(tensors, digest=every, sketch=floating) for scan in scans)
    for row, tensor in enumerate(tensors):
        if fast.leaves()[row] != slow.leaves()[row]:
            result.differences.append(f"digest of {_name(tensor)}")
        if floating[row]:
            available = fast.numbers()[NUMBERS * row : NUMBERS * (row + 1)].tolist()
            result.differences += _sketch_difference(available, tensor)
    result.seconds = round(time.perf_counter() - began, 3)
    return result


def _run(
    result: KernelResult,
    kernel: TableKernel,
    device: torch.device,
    tensors: list[torch.Tensor],
    repeat: bool = True,
) -> None:
    began = time.perf_counter()
    result.tensors = len(tensors)
    result.differences = compare(kernel, device, tensors, repeat)[:_MOST_DIFFERENCES]
    result.seconds = round(time.perf_counter() - began, 3)


def devices() -> list[torch.device]:
    """All devices of this machine that torch can use."""
    api = device_api.available_api()
    return [] if api is None else [torch.device(api.type, index) for index in range(api.count())]


def environment() -> dict[str, Any]:
    """Versions and devices, for the page."""
    available = devices()
    names = []
    for device in available:
        torch.empty(1, device=device)  # torch reports properties of a device that is initialised
        api = device_api.api_of(device)
        names.append(api.identity(device).name if api is not None else str(device))
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "rocm": torch.version.hip or "",
        "nccl": device_api.nccl_version(),
        "triton": _triton_version(),
        "device_type": available[0].type if available else "cpu",
        "devices": names,
        "threads": torch.get_num_threads(),
    }


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def main() -> int:
    available = devices()
    if available:
        results = [on_device(device) for device in available]
        results.append(compiled_for_cpu())
    else:
        results = [compiled_for_cpu(), in_interpreter()]
    lost = [choice.detail for choice in device_kernels.losses().values()]
    document = {"environment": environment(), "kernels": [vars(result) for result in results], "lost": lost}
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
