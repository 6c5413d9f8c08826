"""multilinear-128 as one Triton launch over any number of tensors; imported only if triton is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ddpcheck.probes.digest.multilinear_torch import word_keys
from ddpcheck.records.sketch_signs import BLOCK_SEEDS, BLOCK_WORDS, GAMMA, LANES, MIX_1, MIX_2

# A program hashes TILES x ROWS blocks of one tensor (128 KB) and keeps the keys of level 1 in registers.
ROWS = 4
TILES = 8
PROGRAM_BLOCKS = ROWS * TILES


@triton.jit  # type: ignore[untyped-decorator]
def _block_key(  # type: ignore[no-untyped-def]
    seed,
    index,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
):
    z = seed + (index + 1) * GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _lane_term(  # type: ignore[no-untyped-def]
    words,
    keys,
    block,
    SEED: tl.constexpr,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
):
    sums = tl.sum(words * keys[None, :], axis=1).to(tl.uint64)
    low = _block_key(SEED, 2 * block, GAMMA, MIX_1, MIX_2) * (sums & 0xFFFFFFFF)
    high = _block_key(SEED, 2 * block + 1, GAMMA, MIX_1, MIX_2) * (sums >> 32)
    return low + high


@triton.jit  # type: ignore[untyped-decorator]
def _hash_all(  # type: ignore[no-untyped-def]
    table,
    word_keys,
    lanes,
    SEED_0: tl.constexpr,
    SEED_1: tl.constexpr,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = table + tl.program_id(0) * 4
    tensor = tl.load(row)
    data = tl.load(row + 1).to(tl.pointer_type(tl.uint32))
    count = tl.load(row + 2)
    first_block = tl.load(row + 3)

    column = tl.arange(0, WORDS)
    keys_0 = tl.load(word_keys + column)
    keys_1 = tl.load(word_keys + WORDS + column)
    lane_0 = tl.zeros([ROWS], dtype=tl.uint64)
    lane_1 = tl.zeros([ROWS], dtype=tl.uint64)
    for tile in range(TILES):
        block = first_block + tile * ROWS + tl.arange(0, ROWS)
        position = block[:, None] * WORDS + column[None, :]
        # Blocks past the end read as zeros and add nothing, so the last program needs no special case.
        words = tl.load(data + position, mask=position < count, other=0).to(tl.int64)
        index = block.to(tl.uint64)
        lane_0 += _lane_term(words, keys_0, index, SEED_0, GAMMA, MIX_1, MIX_2)
        lane_1 += _lane_term(words, keys_1, index, SEED_1, GAMMA, MIX_1, MIX_2)
    # Integer addition modulo 2**64 gives the same sum in every order: atomics cost nothing in determinism.
    tl.atomic_add(lanes + tensor * 2, tl.sum(lane_0.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(lanes + tensor * 2 + 1, tl.sum(lane_1.to(tl.int64), axis=0), sem="relaxed")


def program_table(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """A row per program, from (address, words) of each tensor: tensor, address, words, first block."""
    rows = []
    for tensor, (address, words) in enumerate(spans):
        for first_block in range(0, -(-words // BLOCK_WORDS), PROGRAM_BLOCKS):
            rows.append((tensor, address, words, first_block))
    return rows


def launch(table: torch.Tensor, tensors: int) -> torch.Tensor:
    """The lanes of each tensor in `table`, computed in order on the current stream of its device."""
    lanes = torch.zeros((tensors, LANES), dtype=torch.int64, device=table.device)
    if table.shape[0]:
        _hash_all[(table.shape[0],)](
            table,
            word_keys(table.device),
            lanes,
            SEED_0=BLOCK_SEEDS[0],
            SEED_1=BLOCK_SEEDS[1],
            GAMMA=GAMMA,
            MIX_1=MIX_1,
            MIX_2=MIX_2,
            WORDS=BLOCK_WORDS,
            ROWS=ROWS,
            TILES=TILES,
            # No floating point here; without this option Triton 3.9 warns the user about its default.
            enable_fp_fusion=False,
        )
    return lanes
