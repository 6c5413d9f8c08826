"""Tensors hashed during a sketch have the same leaves and sketches as in separate passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ddpcheck.probes.digest import submit
from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.sketches.batch import SketchBatch
from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.sketch_signs import BLOCK, PIECE

SIZES = [0, 1, 1000, PIECE + 1, BLOCK, 2 * BLOCK + 77]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_same_leaf_and_the_same_sketch(dtype: torch.dtype, threads: int) -> None:
    for size in SIZES:
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        hasher = submit.incremental_hash(tensor)
        assert hasher is not None
        batch = SketchBatch()
        assert batch.add(3, tensor, hasher)
        assert [hasher.leaf()] == submit.submit([tensor]).result()
        assert batch.sketches() == {3: sketch(tensor)}


def test_matrices_and_views() -> None:
    tensor = torch.randn(300, 700)[10:]
    hasher = submit.incremental_hash(tensor)
    assert hasher is not None
    sketch(tensor, hasher.update)
    assert [hasher.leaf()] == submit.submit([tensor]).result()


def test_values_that_are_not_finite_are_hashed_once() -> None:
    tensor = torch.full((BLOCK + 5,), float("nan"))
    hasher = submit.incremental_hash(tensor)
    assert hasher is not None
    assert sketch(tensor, hasher.update).nonfinite == BLOCK + 5
    assert [hasher.leaf()] == submit.submit([tensor]).result()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8)[::2],
        torch.randn(4, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "channels_last", "strided", "complex", "sparse"],
)
def test_tensors_in_another_order_must_be_submitted(tensor: torch.Tensor) -> None:
    assert submit.incremental_hash(tensor) is None


def test_the_devices_hash_reads_for_itself() -> None:
    MultilinearDigester().incremental_hash(torch.randn(4))
    tensors = [torch.randn(4), torch.randn(5)]
    assert submit.submit_rest(tensors, {}).result() == submit.submit(tensors).result()


def test_known_leaves_are_merged_in_order() -> None:
    tensors = [torch.randn(size) for size in (3, 4, 5, 6)]
    leaves = submit.submit(tensors).result()
    ticket = submit.submit_rest(tensors, {1: leaves[1], 3: leaves[3]})
    assert ticket.ready()
    assert ticket.result() == leaves
