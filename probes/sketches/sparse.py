"""The sketch of a sparse COO tensor: that of the dense tensor it stands for, without making one."""

from __future__ import annotations

import math

import torch

from ddpcheck.probes.sketches.sketch import Sketch, as_real, sign_table
from ddpcheck.records.sketch_signs import BLOCK, PIECE, weight


def sketch_sparse(tensor: torch.Tensor) -> Sketch:
    """Entries that occur twice count with their sum, added in float64."""
    rows, values = _summed_entries(tensor.detach())
    width = values.shape[1]
    terms, norms, nonfinite = [], [0.0], 0
    for start, stop in _slices(len(rows), width):
        piece = values[start:stop]
        value, norm = _sketch_entries(rows[start:stop], piece, width)
        terms.append(value)
        norms.append(norm)
        if not math.isfinite(value) or not math.isfinite(norm):
            nonfinite += piece.numel() - int(torch.isfinite(piece).sum().item())
    return Sketch(sum(terms), math.hypot(*norms), nonfinite, tensor.numel())


def _summed_entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the rows that hold anything, ascending, and their values in float64, one row each.

    A row is what the dense dimensions span: one element where there are none. Complex elements are pairs.
    """
    indices, values = tensor._indices(), as_real(tensor._values()).double()
    numbers = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for dim in range(indices.shape[0]):
        numbers = numbers * tensor.shape[dim] + indices[dim]
    width = math.prod(values.shape[1:])
    values = values.reshape(len(numbers), width)
    if tensor.is_coalesced():
        return numbers, values
    rows, where = torch.unique(numbers, return_inverse=True)
    summed = torch.zeros((len(rows), width), dtype=torch.float64, device=values.device)
    return rows, summed.index_add_(0, where, values)


def _sketch_entries(rows: torch.Tensor, values: torch.Tensor, width: int) -> tuple[float, float]:
    positions = rows.unsqueeze(1) * width + torch.arange(width, device=rows.device)
    blocks = (positions // BLOCK).flatten()
    signed = values * sign_table(torch.float64, values.device)[positions % BLOCK]
    used, where = torch.unique_consecutive(blocks, return_inverse=True)
    by_block = [weight(block) for block in used.tolist()]
    weights = torch.tensor(by_block, dtype=torch.float64, device=rows.device)
    value = (signed.flatten() * weights[where]).sum().item()
    return value, torch.linalg.vector_norm(signed).item()


def _slices(rows: int, width: int) -> list[tuple[int, int]]:
    step = max(1, PIECE // max(width, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
