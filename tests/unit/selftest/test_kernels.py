"""The comparison of kernels: it must find what is wrong."""

from __future__ import annotations

import torch

from ddpcheck.probes.scan.device_kernels import KernelTable, ResultField
from ddpcheck.selftest.kernels import _like, compare, compiled_for_cpu, samples

CPU = torch.device("cpu")


class Zeros:
    """A kernel that computes nothing."""

    name = "zeros"

    def launch(self, table: KernelTable) -> torch.Tensor:
        return torch.zeros((table.rows.shape[0], len(ResultField)), dtype=torch.int64)


class Unsteady(Zeros):
    """Gives another result at each launch."""

    launches = 0

    def launch(self, table: KernelTable) -> torch.Tensor:
        self.launches += 1
        return super().launch(table) + self.launches


def test_a_wrong_kernel_is_found() -> None:
    broken = torch.tensor([1.0, float("nan")])
    differences = compare(Zeros(), CPU, [torch.arange(9.0), torch.arange(5), broken])
    assert differences == [
        "digest of float32 [9] at offset 0",
        "sketch of float32 [9] at offset 0: off by 1.0e+00 norms",
        "digest of int64 [5] at offset 0",
        "digest of float32 [2] at offset 0",
        "0 instead of 1 non-finite values in float32 [2] at offset 0",
    ]


def test_results_that_change_are_found() -> None:
    assert "two launches on the same tensors gave different results" in compare(
        Unsteady(), CPU, [torch.arange(3)]
    )


def test_samples_have_all_kinds() -> None:
    tensors = samples((1025,), ())
    assert len({tensor.dtype for tensor in tensors}) == 11
    assert {tensor.storage_offset() % 4 for tensor in tensors} >= {0, 1, 3}
    assert not all(tensor.is_contiguous() for tensor in tensors)


def test_a_copy_on_a_device_has_the_same_strides_offset_and_values() -> None:
    for tensor in samples((5,), ()):
        moved = _like(tensor, CPU)
        assert (moved.stride(), moved.storage_offset()) == (tensor.stride(), tensor.storage_offset())
        assert torch.equal(moved.nan_to_num(), tensor.nan_to_num())


def test_the_compiled_scan() -> None:
    result = compiled_for_cpu()
    assert result.differences == []
    assert result.tensors or result.missing
