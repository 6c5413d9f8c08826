"""Compares a kernel with the operators of torch on a few tensors, before it is used."""

from __future__ import annotations

import math

import torch

from ddpcheck.probes.digest.multilinear_torch import lane_sums
from ddpcheck.probes.digest.protocol import finish_leaf
from ddpcheck.probes.digest.tensor_bytes import layout_of
from ddpcheck.probes.scan.device_kernels import KINDS, TableKernel
from ddpcheck.probes.scan.device_table import DeviceTable
from ddpcheck.probes.scan.table import DIGEST, NUMBERS, SKETCH
from ddpcheck.probes.sketches.batch import row_by_torch
from ddpcheck.records.sketch_signs import BLOCK

# Error of a sketch relative to the norm. The packed sketch in a record has steps of 2**-26 norms.
TOLERANCE = 2.0**-20


def samples(device: torch.device) -> list[torch.Tensor]:
    """Every kind of row: all dtypes, odd sizes and addresses, two blocks of the sketch, another order of memory."""
    base = torch.arange(BLOCK + 20_001, dtype=torch.float32, device=device).sin()
    tensors = [base, base[1:5], base[:2048].view(torch.int32).abs(), base[:600].view(20, 30).t()]
    tensors += [base[: size + 1].to(dtype)[1:] for dtype in KINDS for size in (1, 1023, 70_003)]
    tensors.append(torch.arange(37, dtype=torch.int32, device=device).to(torch.uint8)[3:])
    tensors.append((base[:99] * 1e30).to(torch.float32))
    wrong = base[:3000].clone()
    wrong[1::1000] = math.inf
    tensors.append(wrong)
    return tensors


def first_difference(kernel: TableKernel, device: torch.device) -> str:
    """Where the kernel is wrong on this device; "" if it is right. Waits for the device.

    A kernel may have a variant for tables without other orders of memory: both are compiled here, before training.
    """
    with torch.inference_mode(False), torch.no_grad():
        tensors = samples(device)
        row_major = [tensor for tensor in tensors if tensor.is_contiguous()]
        return _first_difference(kernel, device, tensors) or _first_difference(kernel, device, row_major)


def _first_difference(kernel: TableKernel, device: torch.device, tensors: list[torch.Tensor]) -> str:
    table = DeviceTable(device, kernel)
    table.update(tensors)
    work = bytes(DIGEST | (SKETCH if sketchable else 0) for sketchable in table.sketchable)
    results = table.scan(work)
    lanes = lane_sums(tensors, device).cpu().tolist()
    digests, numbers = results.digests(), memoryview(results.numbers()).cast("d")
    for row, tensor in enumerate(tensors):
        name = f"{tensor.dtype} {list(tensor.shape)}"
        if digests[16 * row : 16 * row + 16] != finish_leaf(layout_of(tensor).header, lanes[row]):
            return f"digest of {name}"
        if table.sketchable[row] and not _agree(numbers[NUMBERS * row : NUMBERS * row + NUMBERS], tensor):
            return f"sketch of {name}"
    return ""


def _agree(numbers: memoryview[float], tensor: torch.Tensor) -> bool:
    value, squares, nonfinite = row_by_torch(tensor).tolist()
    if numbers[2] != nonfinite:
        return False
    norm = math.sqrt(squares) if math.isfinite(squares) else math.inf
    if nonfinite:
        return not math.isfinite(numbers[0]) and not math.isfinite(numbers[1])
    return abs(numbers[0] - value) <= TOLERANCE * norm and abs(numbers[1] - norm) <= TOLERANCE * norm
