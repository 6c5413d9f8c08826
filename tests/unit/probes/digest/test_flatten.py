"""Every kind of tensor gets its own leaf, or the fixed leaf of unreadable tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ddpcheck.probes.digest import UNSUPPORTED, Digester, is_supported, make_digester
from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.digest.tensor_bytes import dense, direct_span
from tests.helpers.unreadable_tensors import UNREADABLE

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.fixture(params=["xxh3-128", "multilinear-128"])
def digester(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Digester:
    monkeypatch.delenv("DDPCHECK_HASH", raising=False)
    if request.param == "multilinear-128":
        return MultilinearDigester()
    pytest.importorskip("xxhash")
    return make_digester("cpu")


def leaf(digester: Digester, tensor: torch.Tensor) -> bytes:
    (only,) = digester.submit([tensor]).result()
    return only


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + FLOAT8, ids=str)
def test_every_dtype_in_every_layout(digester: Digester, dtype: torch.dtype) -> None:
    def made(last: int) -> torch.Tensor:
        data = bytes(at % 251 for at in range(1, 24 * dtype.itemsize)) + bytes([last])
        if dtype is torch.bool:
            data = bytes(byte & 1 for byte in data)
        return torch.frombuffer(bytearray(data[: 24 * dtype.itemsize]), dtype=dtype).view(2, 3, 2, 2)

    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: tensor,
        lambda tensor: tensor.flatten()[23],
        lambda tensor: tensor.transpose(0, 3),
        lambda tensor: tensor[1:],
        lambda tensor: tensor[:, 1:, :, 1],
        lambda tensor: tensor.flatten()[20:].view(4, 1).expand(4, 5),
        lambda tensor: tensor.flatten().as_strided((5, 20), (1, 1)),
    ]
    for view in views:
        assert leaf(digester, view(made(200))) == leaf(digester, view(made(200))) != UNSUPPORTED
        assert leaf(digester, view(made(200))) != leaf(digester, view(made(201)))
        assert is_supported(view(made(200)))


def test_dense_memory_is_not_copied_and_gapped_memory_is() -> None:
    base = torch.arange(24.0).view(2, 3, 2, 2)
    for view in (base, base.transpose(0, 3), base[1:], base[0, 0, 0, 0]):
        assert dense(view).data_ptr() == view.data_ptr()
        assert direct_span(view) is not None
    channels_last = base.to(memory_format=torch.channels_last)
    assert dense(channels_last).data_ptr() == channels_last.data_ptr()
    assert dense(base[..., 0]).data_ptr() != base.data_ptr()
    assert direct_span(base[..., 0]) is None


def test_an_expanded_tensor_is_not_written_out() -> None:
    # A copy of it would need 4 TB.
    endless = torch.arange(3.0).view(3, 1).expand(3, 1 << 40)
    assert dense(endless).numel() == 3
    assert (
        MultilinearDigester().submit([endless]).result() == MultilinearDigester().submit([endless]).result()
    )


def test_conjugate_and_negative_bits_are_resolved(digester: Digester) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    lazy = numbers.conj()
    assert lazy.is_conj()
    assert leaf(digester, lazy) == leaf(digester, lazy.resolve_conj()) != leaf(digester, numbers)
    negative = lazy.imag
    assert negative.is_neg()
    assert (
        leaf(digester, negative) == leaf(digester, lazy.resolve_conj().imag) != leaf(digester, numbers.imag)
    )
    dense_negative = torch._neg_view(torch.ones(5))
    assert dense_negative.is_neg()
    assert leaf(digester, dense_negative) == leaf(digester, -torch.ones(5))


def sparse_coo(value: float, column: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1], [2, column]], [1.0, value], (3, 4), check_invariants=False)


def compressed(maker: Any, block: tuple[int, ...] = ()) -> Callable[[float, int], torch.Tensor]:
    def make(value: float, column: int) -> torch.Tensor:
        matrix = torch.zeros(4, 4)
        matrix[1, column] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that these layouts are in beta
            made: torch.Tensor = maker(matrix, block) if block else maker(matrix)
        return made

    return make


@pytest.mark.parametrize(
    "make",
    [
        sparse_coo,
        compressed(torch.Tensor.to_sparse_csr),
        compressed(torch.Tensor.to_sparse_csc),
        compressed(torch.Tensor.to_sparse_bsr, (2, 2)),
        compressed(torch.Tensor.to_sparse_bsc, (2, 2)),
    ],
)
def test_sparse_tensors_count_by_values_and_indices(
    digester: Digester, make: Callable[[float, int], torch.Tensor]
) -> None:
    leaves = {leaf(digester, make(value, column)) for value in (2.0, 3.0) for column in (0, 3)}
    assert len(leaves) == 4
    assert leaf(digester, make(2.0, 0)) in leaves
    assert UNSUPPORTED not in leaves


def test_sparse_is_not_its_dense_twin(digester: Digester) -> None:
    matrix = torch.eye(3)
    kinds = [matrix, matrix.to_sparse(), compressed(torch.Tensor.to_sparse_csr)(1.0, 1)]
    assert len(set(digester.submit(kinds).result())) == 3


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without mkldnn")
def test_mkldnn_tensors_count_by_values(digester: Digester) -> None:
    first, again, other = torch.ones(3, 4), torch.ones(3, 4), torch.zeros(3, 4)
    leaves = digester.submit([each.to_mkldnn() for each in (first, again, other)]).result()
    assert leaves[0] == leaves[1] != leaves[2]
    assert UNSUPPORTED not in leaves


def test_quantized_tensors_count_by_integers_and_scales(digester: Digester) -> None:
    numbers = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    zeros = torch.zeros(2, dtype=torch.int64)

    def by_channel(scale: float) -> torch.Tensor:
        return torch.quantize_per_channel(numbers, torch.tensor([1.0, scale]), zeros, 0, torch.qint8)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on their way out of torch, but still in people's models
        tensors = [
            torch.quantize_per_tensor(numbers, 1.0, 0, torch.qint8),
            torch.quantize_per_tensor(numbers * 2, 2.0, 0, torch.qint8),
            torch.quantize_per_tensor(numbers, 1.0, 1, torch.qint8),
            by_channel(1.0),
            by_channel(0.5),
        ]
        again = torch.quantize_per_tensor(numbers, 1.0, 0, torch.qint8)
    leaves = digester.submit(tensors).result()
    assert len(set(leaves)) == len(tensors)
    assert UNSUPPORTED not in leaves
    assert leaf(digester, again) == leaves[0]


def nested(last: float, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        made: torch.Tensor = torch.nested.nested_tensor(
            [torch.ones(2), torch.tensor([1.0, 1.0, last])], layout=layout
        )
    return made


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_count_by_values(digester: Digester, layout: torch.layout) -> None:
    assert leaf(digester, nested(1.0, layout)) == leaf(digester, nested(1.0, layout)) != UNSUPPORTED
    assert leaf(digester, nested(1.0, layout)) != leaf(digester, nested(2.0, layout))


class Named(torch.nn.Parameter):
    """A subclass that only adds an attribute."""


def test_subclasses_with_their_own_memory_are_read_directly(digester: Digester) -> None:
    assert leaf(digester, Named(torch.ones(3))) == leaf(digester, torch.ones(3))
    assert leaf(digester, Named(torch.ones(3))) != leaf(digester, Named(torch.zeros(3)))


class Guarded(torch.Tensor):
    """A subclass with its own memory whose operations run user code."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("hashing must not run the user's code")


def test_a_subclass_is_read_without_running_its_operations(digester: Digester) -> None:
    guarded = torch.Tensor._make_subclass(Guarded, torch.ones(3))
    assert leaf(digester, guarded) == leaf(digester, torch.ones(3))


def test_wrapper_subclasses_count_by_their_inner_tensors(digester: Digester) -> None:
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    wrapped = [TwoTensor(ones, ones), TwoTensor(ones, twos), TwoTensor(twos, ones)]
    leaves = digester.submit(wrapped).result()
    assert len({*leaves, UNSUPPORTED, leaf(digester, ones)}) == 5
    assert leaf(digester, TwoTensor(torch.ones(3), torch.ones(3))) == leaves[0]


@pytest.mark.parametrize("make", UNREADABLE)
def test_unreadable_tensors_get_the_fixed_leaf(digester: Digester, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert not is_supported(tensor)
    assert digester.submit([torch.ones(2), tensor, torch.ones(2)]).result()[1] == UNSUPPORTED


def test_vmapped_tensors_are_unreadable(digester: Digester) -> None:
    results = []

    def look(row: torch.Tensor) -> torch.Tensor:
        results.append((leaf(digester, row), is_supported(row)))
        return row

    torch.func.vmap(look)(torch.ones(3, 2))
    assert results == [(UNSUPPORTED, False)]


def test_dtensor_counts_by_its_local_part(digester: Digester, tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        one = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        same = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
        other = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        leaves = digester.submit([one, same, other]).result()
    finally:
        dist.destroy_process_group()
    assert leaves[0] == leaves[1] != leaves[2]
    assert UNSUPPORTED not in leaves
