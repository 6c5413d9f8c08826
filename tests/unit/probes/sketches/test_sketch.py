"""Sketches are linear, depend only on values and their order, and have no side effects."""

from __future__ import annotations

import ctypes
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcheck.probes.digest.device_copy import DirectCopy
from ddpcheck.probes.scan import library as native
from ddpcheck.probes.scan.library import BlockWeights, NativeTotals, native_kernel
from ddpcheck.probes.sketches import batch
from ddpcheck.probes.sketches import sketch as by_pieces
from ddpcheck.probes.sketches.batch import SketchBatch, row_by_torch
from ddpcheck.probes.sketches.sketch import Sketch, can_sketch, sketch
from ddpcheck.records.sketch_signs import BLOCK, LARGEST_WEIGHT, PIECE, signs, weight
from tests.helpers.paths import ROOT
from tests.helpers.unreadable_tensors import UNREADABLE, wrapper

SIZES = [0, 1, 2, 999, PIECE - 1, PIECE, PIECE + 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16, *FLOAT8]
SIGNS = torch.tensor(signs(), dtype=torch.float64)


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernel and without it."""
    if request.param == "torch":
        monkeypatch.setattr(by_pieces, "native_kernel", lambda dtype: None)


both_ways = pytest.mark.usefixtures("way")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler, and so no kernel")
def test_the_kernel_is_built_where_there_is_a_compiler() -> None:
    assert all(map(native_kernel, (torch.float32, torch.bfloat16)))
    assert native_kernel(torch.float16) is None


def test_a_kernel_that_counts_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeTotals, "value_and_squares", lambda _: (0.0, 1.0))
    assert native_kernel.__wrapped__(torch.float32) is None


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another version, left in a checkout: its functions take other arguments."""
    monkeypatch.setattr(native, "_library", lambda: SimpleNamespace(ddpcheck_sketch_float32=None))
    assert native_kernel.__wrapped__(torch.float32) is None


def levels() -> list[int]:
    """The supported levels of: any processor, AVX2, AVX-512."""
    library = native._library()
    if library is None:
        return []
    best = library.ddpcheck_sketch_level(9)
    return list(range(best + 1))


@pytest.fixture
def use_level() -> Iterator[Callable[[int], int]]:
    library = native._library()
    if library is None:
        pytest.skip("the kernel was not built")
    yield library.ddpcheck_sketch_level
    library.ddpcheck_sketch_level(9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_instruction_set_gives_the_same_bits(
    dtype: torch.dtype, use_level: Callable[[int], int]
) -> None:
    tensors = [normal(size, dtype) for size in [*range(1, 40), *SIZES, 17 * PIECE + 3]]
    tensors += [tensor * scale for tensor in tensors[-3:] for scale in (1e-38, 1e30)]
    tensors.append(torch.tensor([math.inf, -math.inf, math.nan, -0.0] * 9, dtype=dtype))
    result = []
    for level in levels():
        assert use_level(level) == level
        # As text: what is not a number equals nothing.
        result.append([str(sketch(tensor)) for tensor in tensors])
    assert all(other == result[0] for other in result)


def test_a_piece_may_begin_anywhere_in_its_block() -> None:
    kernel = native_kernel(torch.float32)
    if kernel is None:
        pytest.skip("the kernel was not built")
    for size in SIZES[1:]:
        tensor = normal(size)[:PIECE]
        totals = NativeTotals()
        kernel.add(totals, tensor.data_ptr(), PIECE, len(tensor))
        value, squares = totals.value_and_squares()
        signed = tensor.double() * SIGNS[PIECE : PIECE + len(tensor)]
        assert value == pytest.approx(signed.sum().item(), rel=1e-12, abs=1e-11)
        assert squares == pytest.approx((signed * signed).sum().item(), rel=1e-12)


def test_weights_of_blocks_are_there_for_any_tensor() -> None:
    weights = BlockWeights()
    for blocks in (1, 64, 65, 3, 1000):
        table = (ctypes.c_double * blocks).from_address(weights.address(blocks))
        assert list(table) == [weight(block) for block in range(blocks)]


def by_definition(tensor: torch.Tensor) -> tuple[float, float]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    flat = tensor.to(torch.float64).contiguous().flatten()
    terms = [
        weight(block) * (part * SIGNS[: len(part)]) for block, part in enumerate(torch.split(flat, BLOCK))
    ]
    return math.fsum(torch.cat(terms).tolist()), math.sqrt(math.fsum((flat * flat).tolist()))


def assert_is_sketch_of(result: Sketch, tensor: torch.Tensor) -> None:
    value, norm = by_definition(tensor)
    assert result.value == pytest.approx(value, rel=1e-12, abs=1e-12 * norm)
    assert result.norm == pytest.approx(norm, rel=2e-5)
    assert result.nonfinite == 0
    assert result.numel == tensor.numel()


def normal(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@both_ways
@pytest.mark.parametrize("size", SIZES)
def test_the_definition_holds_at_every_size(size: int) -> None:
    assert_is_sketch_of(sketch(normal(size)), normal(size))


@both_ways
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_dtype_is_read_exactly(dtype: torch.dtype) -> None:
    tensor = normal(40000, dtype)
    assert_is_sketch_of(sketch(tensor), tensor)
    wide = sketch(tensor.double())
    assert sketch(tensor).value == pytest.approx(wide.value, rel=1e-13)


@both_ways
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_numbers_are_pairs(dtype: torch.dtype) -> None:
    tensor = torch.view_as_complex(normal(80000, dtype.to_real()).view(-1, 2))
    assert_is_sketch_of(sketch(tensor), tensor)
    conjugate = tensor.conj()
    for view in (conjugate, conjugate.imag, torch._neg_view(tensor), conjugate.view(400, 100).t()):
        assert sketch(view) == sketch(view.clone().resolve_conj().resolve_neg().contiguous())
    assert sketch(tensor.conj()) != sketch(tensor)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t[0, 0, 0, 0],
    lambda t: t.transpose(0, 1),
    lambda t: t.permute(3, 1, 0, 2),
    lambda t: t[:, ::2],
    lambda t: t[::3, 1:, :, 2],
    lambda t: t[:, :1].expand(-1, 40, -1, -1),
    lambda t: t.flatten()[5:].unsqueeze(1),
    lambda t: t.flatten()[::7],
    lambda t: t[:0],
    lambda t: t.view(1, 1, -1).transpose(1, 2),
    torch._neg_view,
]


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    tensor = view(normal(64 * 40 * 9 * 3, dtype).view(64, 40, 9, 3))
    assert sketch(tensor) == sketch(tensor.contiguous())
    assert_is_sketch_of(sketch(tensor), tensor)


@both_ways
def test_channels_last_agrees_with_contiguous() -> None:
    tensor = normal(96 * 64 * 25).view(96, 64, 5, 5)
    last = tensor.to(memory_format=torch.channels_last)
    assert last.stride() != tensor.stride()
    assert sketch(last) == sketch(tensor)


@pytest.mark.parametrize("dense_dims", [0, 1])
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_have_the_sketch_of_the_dense_tensor(dense_dims: int, coalesced: bool) -> None:
    made = torch.Generator().manual_seed(3)
    shape = (3000, 70)
    sparse_shape = shape[: 2 - dense_dims]
    indices = torch.stack([torch.randint(0, size, (900,), generator=made) for size in sparse_shape])
    values = normal(900 * 70 if dense_dims else 900).view(900, *shape[2 - dense_dims :])
    tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    if coalesced:
        tensor = tensor.coalesce()
    assert can_sketch(tensor)
    dense = torch.zeros(shape, dtype=torch.float64)
    if dense_dims:
        dense.index_add_(0, indices[0], values.double())
    else:
        dense.index_put_(tuple(indices), values.double(), accumulate=True)
    if coalesced:
        dense = tensor.to_dense().double()
    assert_is_sketch_of(sketch(tensor), dense)
    assert sketch(tensor) == sketch(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
def test_sparse_of_other_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.sparse_coo_tensor(
        [[3, 1, 3]], torch.tensor([1, 2, 4], dtype=dtype), (9,), check_invariants=True
    )
    expected = torch.tensor([0, 2, 0, 5, 0, 0, 0, 0, 0], dtype=dtype)
    assert_is_sketch_of(sketch(tensor), expected)
    assert sketch(torch.zeros(5, 3, dtype=dtype).to_sparse()) == Sketch(0.0, 0.0, 0, 15)
    tensor = torch.sparse_coo_tensor(
        [[0, 1]], torch.tensor([math.nan, 1], dtype=dtype), (9,), check_invariants=True
    )
    assert sketch(tensor).nonfinite == 1


def test_the_sketch_of_a_mean_is_the_mean_of_the_sketches() -> None:
    parts = [normal(300000, torch.float64, seed) for seed in range(4)]
    mean = math.fsum(sketch(part).value for part in parts) / 4
    combined = sketch((parts[0] + parts[1] + parts[2] + parts[3]) / 4)
    assert mean == pytest.approx(combined.value, abs=1e-12 * combined.norm)


@both_ways
def test_order_matters_to_the_element_and_to_the_block() -> None:
    tensor = normal(3 * BLOCK)
    blocks = tensor.view(3, BLOCK)
    assert sketch(blocks[[0, 2, 1]]).value != pytest.approx(sketch(blocks).value, abs=0.1)
    assert sketch(tensor.flip(0)).value != pytest.approx(sketch(tensor).value, abs=0.1)
    assert sketch(tensor.view(4 * 3, PIECE)[torch.tensor([1, 0, *range(2, 12)])]).value != pytest.approx(
        sketch(tensor).value, abs=0.1
    )


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    tensor = normal(100000, dtype)
    tensor[[5, 50000, 99999]] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    result = sketch(tensor)
    assert result.nonfinite == 3
    assert not math.isfinite(result.value)
    assert sketch(tensor[:6]).nonfinite == 1
    assert sketch(tensor.view(400, 250).t()).nonfinite == 3


@both_ways
def test_extreme_values() -> None:
    assert sketch(torch.full((100,), 3e38)).norm == pytest.approx(3e39, rel=1e-4)
    assert sketch(torch.full((100,), 1e-44)).norm == pytest.approx(1e-43, rel=0.1)
    assert sketch(torch.full((100,), 1e-25)).norm == pytest.approx(1e-24, rel=1e-4)
    assert sketch(torch.full((10,), 1e300, dtype=torch.float64)).nonfinite == 0
    assert sketch(torch.zeros(100)) == Sketch(0.0, 0.0, 0, 100)


def test_the_generator_is_fair() -> None:
    table = signs()
    assert set(table) == {1.0, -1.0}
    assert abs(sum(table)) < 3 * math.sqrt(BLOCK)
    for shift in (1, 2, 3, 64, 128, PIECE):
        assert abs(sum(a * b for a, b in zip(table, table[shift:], strict=False))) < 4 * math.sqrt(BLOCK)
    weights = [weight(block) for block in range(1, 2000)]
    assert all(0.5 <= abs(each) < LARGEST_WEIGHT for each in weights)
    assert abs(sum(map(math.copysign, [1.0] * 1999, weights))) < 4 * math.sqrt(1999)
    assert len({round(abs(each), 9) for each in weights}) == 1999


def test_sketches_are_fixed_for_ever() -> None:
    # Records of different versions are compared with each other.
    assert sum(sign * index for index, sign in enumerate(signs())) == 23002414.0
    assert [round(weight(block), 6) for block in range(4)] == [1.0, 1.482722, -1.04839, -1.453895]


@both_ways
def test_tensors_and_generators_stay_as_they_are() -> None:
    parameter = torch.nn.Parameter(normal(50000).view(200, 250))
    tensors = [parameter, parameter.t(), parameter * 2, torch.ones(9, dtype=torch.complex64).conj()]
    before = [(each.detach().clone(), each._version, each.grad_fn, each.requires_grad) for each in tensors]
    state, python_state = torch.get_rng_state(), random.getstate()
    first = [sketch(each) for each in tensors]
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.device("meta")):
        with mode():
            assert [sketch(each) for each in tensors] == first
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [sketch(each) for each in tensors] == first
    for each, (values, version, grad_fn, requires) in zip(tensors, before, strict=True):
        assert torch.equal(each, values)
        assert (each._version, each.grad_fn, each.requires_grad) == (version, grad_fn, requires)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


def test_inside_autograd_hooks() -> None:
    parameter = torch.nn.Parameter(normal(70000))
    seen: list[Sketch] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(sketch(p.grad)))  # type: ignore[arg-type]
    for create_graph in (False, True):
        parameter.grad = None
        (gradient,) = torch.autograd.grad((parameter**2).sum(), parameter)
        with pytest.warns(UserWarning, match="create_graph") if create_graph else torch.enable_grad():
            (parameter**2).sum().backward(create_graph=create_graph)
        assert seen[-1] == sketch(gradient)
    assert len(seen) == 2
    parameter.grad = None


@both_ways
def test_each_thread_has_its_own_buffers() -> None:
    tensors = [normal(200000, seed=seed) for seed in range(4)]
    expected = [sketch(each) for each in tensors]
    result: dict[int, list[Sketch]] = {}

    def work(index: int) -> None:
        result[index] = [sketch(tensors[index]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == {index: [each] * 5 for index, each in enumerate(expected)}


def test_no_openmp_thread_is_started_and_buffers_outlive_inference_mode() -> None:
    script = """
import os, torch
from ddpcheck.probes.sketches import sketch as by_pieces
from ddpcheck.probes.sketches.sketch import sketch
tensors = [torch.ones(300000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
tensors += [torch.ones(64, 64, 5, 5).transpose(0, 1), torch.ones(100000, dtype=torch.complex64).conj()]
torch.set_num_threads(8)
before = len(os.listdir("/proc/self/task"))
for kernel in (by_pieces.native_kernel, lambda dtype: None):
    by_pieces.native_kernel = kernel
    tensors[0][7] = 1
    with torch.inference_mode():
        first = [sketch(tensor) for tensor in tensors]
    assert first == [sketch(tensor) for tensor in tensors]
    tensors[0][7] = torch.inf
    assert sketch(tensors[0]).nonfinite == 1
assert len(os.listdir("/proc/self/task")) == before
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, env=environment, check=True, timeout=300
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_device_computes_the_same(size: int) -> None:
    # The device's operations, run on the CPU: there was no other device to run them on.
    tensor = normal(size)
    value, squares, nonfinite = row_by_torch(tensor).tolist()
    assert_is_sketch_of(Sketch(value, math.sqrt(squares), int(nonfinite), size), tensor)
    if size:
        tensor[-1] = math.nan
        assert row_by_torch(tensor)[2].item() == 1


def test_a_batch_keeps_sketches_of_cpu_tensors() -> None:
    tensors = [normal(10), normal(50000), torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64)]
    sketches = SketchBatch()
    assert not sketches
    assert all(sketches.add(2 * index, tensor) for index, tensor in enumerate(tensors))
    assert not sketches.add(9, torch.ones(3, device="meta"))
    assert sketches
    sketches.send()
    assert sketches.ready()
    assert not sketches.may_hold_nonfinite()
    assert sketches.sketches() == {2 * index: sketch(tensor) for index, tensor in enumerate(tensors)}
    sketches.add(1, torch.tensor([1.0, math.inf]))
    assert sketches.may_hold_nonfinite()


def test_small_tensors_are_sketched_together_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "native_kernel", lambda dtype: None)
    one_by_one: list[torch.Tensor] = []
    monkeypatch.setattr(batch, "sketch", lambda tensor: one_by_one.append(tensor) or sketch(tensor))
    sizes = [1, 0, 300, 4096, 17, *[1000] * 80]
    tensors = [normal(size) for size in sizes]
    tensors += [normal(50).half(), normal(50).bfloat16().view(5, 10), torch.tensor(2.5)]
    sketches = SketchBatch()
    assert all(sketches.add(index, tensor) for index, tensor in enumerate(tensors))
    sketches.send()
    assert sketches.ready()
    assert one_by_one == []
    for index, tensor in enumerate(tensors):
        assert_is_sketch_of(sketches.sketches()[index], tensor)
    # Others, and those with non-finite values, which have to be counted, are read one by one.
    apart = [
        normal(4097),
        normal(40).view(8, 5).t(),
        normal(9).double(),
        torch.tensor([1.0, math.nan, math.inf]),
    ]
    for index, tensor in enumerate(apart, len(tensors)):
        assert sketches.add(index, tensor)
    sketches.send()
    assert len(one_by_one) == len(apart)
    assert sketches.holds_nonfinite()
    result = sketches.sketches()
    assert [result[index].nonfinite for index in range(len(tensors), len(result))] == [0, 0, 0, 2]


class SlowCopy(DirectCopy):
    """A copy that stays pending until the test completes it."""

    arrived = False

    def ready(self) -> bool:
        return self.arrived


def test_a_book_fetches_from_a_device_once_and_is_not_ready_before(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []

    def copy_to_host(rows: torch.Tensor) -> SlowCopy:
        copies.append(rows)
        return SlowCopy(rows)

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    monkeypatch.setattr(batch, "copy_to_host", copy_to_host)
    sketches = SketchBatch()
    for index, size in enumerate((10, 50000)):
        assert sketches.add(index, normal(size))
    # The number of its entries is on the device.
    assert not sketches.add(2, torch.eye(3).to_sparse())
    assert not sketches.ready()
    sketches.send()
    assert not sketches.ready()
    assert sketches.may_hold_nonfinite()
    monkeypatch.setattr(SlowCopy, "arrived", True)
    assert sketches.ready()
    assert [tuple(rows.shape) for rows in copies] == [(2, 3)]
    result = sketches.sketches()
    monkeypatch.undo()
    for index, size in enumerate((10, 50000)):
        assert_is_sketch_of(result[index], normal(size))


@pytest.mark.parametrize("make", [*UNREADABLE, wrapper])
def test_what_has_no_memory_is_left_alone(make: Callable[[], torch.Tensor]) -> None:
    """A kernel that reads there would crash the process."""
    sketches = SketchBatch()
    assert not can_sketch(make())
    assert not sketches.add(0, make())
    assert sketches.sketches() == {}


def test_a_subclass_is_sketched_without_running_its_operations() -> None:
    class Guarded(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    values = torch.arange(12.0).view(3, 4).t()
    with torch._C.DisableTorchFunction():
        guarded = torch.Tensor._make_subclass(Guarded, values)
        expected = sketch(values)
        assert can_sketch(guarded)
        assert sketch(guarded) == expected


def test_unreadable_tensors_are_reported() -> None:
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    assert not can_sketch(freed)
    assert not can_sketch(torch.ones(3, device="meta"))
    assert can_sketch(torch.ones(3))
    assert can_sketch(torch.ones(0))
    assert can_sketch(torch.tensor(2.0))


def test_a_tensor_that_is_longer_than_its_storage_is_reported() -> None:
    cut = torch.ones(1000)
    cut.untyped_storage().resize_(64)
    assert not can_sketch(cut)
