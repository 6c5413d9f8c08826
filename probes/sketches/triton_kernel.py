"""The sketch of one tensor as a Triton kernel; imported only if triton is used."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddpcheck.records.sketch_signs import BLOCK

# A program reads TILES x TILE elements of one tensor: 64 KB of float32.
TILE = 1024
TILES = 16
# Value, sum of squares, count of non-finite elements.
COLUMNS = 3


@triton.jit  # type: ignore[untyped-decorator]
def _sketch(  # type: ignore[no-untyped-def]
    data,
    count,
    signs,
    weights,
    partials,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    value = tl.zeros([TILE], dtype=tl.float64)
    squares = tl.zeros([TILE], dtype=tl.float64)
    nonfinite = tl.zeros([TILE], dtype=tl.float64)
    for tile in range(TILES):
        position = (program * TILES + tile) * TILE + tl.arange(0, TILE)
        inside = position < count
        x = tl.load(data + position, mask=inside, other=0).to(tl.float64)
        sign = tl.load(signs + position % BLOCK, mask=inside, other=0).to(tl.float64)
        weight = tl.load(weights + position // BLOCK, mask=inside, other=0)
        value += x * sign * weight
        squares += x * x
        # Infinity minus infinity, and NaN minus NaN, is NaN.
        nonfinite += tl.where(x - x == 0, 0.0, 1.0)
    row = partials + program * COLUMNS
    tl.store(row, tl.sum(value, axis=0))
    tl.store(row + 1, tl.sum(squares, axis=0))
    tl.store(row + 2, tl.sum(nonfinite, axis=0))


def launch(flat: torch.Tensor, signs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The three numbers of a flat tensor, computed in order on the current stream of its device.

    Each program writes its own row, and the rows are added in a fixed order: atomics would give different bits in
    every run.
    """
    programs = triton.cdiv(flat.numel(), TILE * TILES)
    partials = torch.empty((programs, COLUMNS), dtype=torch.float64, device=flat.device)
    _sketch[(programs,)](
        flat,
        flat.numel(),
        signs,
        weights,
        partials,
        BLOCK=BLOCK,
        TILE=TILE,
        TILES=TILES,
        COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )
    return partials.sum(0)
