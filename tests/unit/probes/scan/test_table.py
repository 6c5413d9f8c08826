"""Rows of a table follow their tensors: replaced, moved, freed, or of another kind than before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.probes.digest import Leaves
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.scan.library import MAX_DIMS
from ddpcheck.probes.scan.table import COUNT, DIGEST, LARGE, NUMBERS, SKETCH, TensorTable, make_table
from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.sketch_signs import PIECE
from tests.helpers.unreadable_tensors import UNREADABLE, freed, wrapper

pytestmark = pytest.mark.needs("library")

BOTH = DIGEST | SKETCH


@pytest.fixture
def table() -> TensorTable:
    table = make_table()
    assert table is not None
    return table


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_reads(table: TensorTable, *tensors: torch.Tensor) -> None:
    """The table gives the digests and sketches of `tensors`, with which it was updated."""
    result = table.scan(bytes([BOTH]) * len(tensors))
    assert result is not None
    assert list(Leaves(bytes(result.digests))) == submit(tensors).result()
    assert [tuple(result.sketches[at : at + 2]) for at in range(0, NUMBERS * len(tensors), NUMBERS)] == [
        sketch(tensor)[:2] for tensor in tensors
    ]


def test_rows_are_made_once(table: TensorTable) -> None:
    tensors = [normal(20), nn.Parameter(normal(3, 4)), None, normal(0)]
    assert table.update(tensors)
    assert (table.present, table.digestible, table.sketchable) == (b"\1\1\0\1", b"\1\1\0\1", b"\1\1\0\1")
    assert list(table.row_bytes) == list(table.row_major_bytes) == [80, 48, 0, 0]
    assert table.revision == 1
    assert not table.update(tensors)
    assert table.revision == 1


def test_only_what_is_asked_for_is_read(table: TensorTable) -> None:
    tensors = [normal(20), normal(20), normal(20)]
    tensors[2][3] = torch.nan
    table.update(tensors)
    result = table.scan(bytes([DIGEST, SKETCH, COUNT]))
    assert result is not None
    first, *others = submit(tensors).result()
    assert list(Leaves(bytes(result.digests))) == [first, *[bytes(16)] * len(others)]
    assert list(result.sketches[:3]) == [0, 0, 0]
    assert tuple(result.sketches[3:6]) == sketch(tensors[1])[:3]
    assert list(result.sketches[6:]) == [0, 0, 1]


def test_a_value_that_changes_needs_no_new_row(table: TensorTable) -> None:
    tensor = normal(100)
    table.update([tensor])
    tensor.mul_(2)
    assert not table.update([tensor])
    assert_reads(table, tensor)


def test_addresses_that_move_need_no_new_row(table: TensorTable) -> None:
    before = [normal(100), normal(7, 9).t()]
    table.update(before)
    after = [normal(100, seed=1), normal(7, 9, seed=1).t()]
    assert not table.update(after)
    assert table.addresses.tolist() == [tensor.data_ptr() for tensor in after]
    assert_reads(table, *after)


def test_views_that_move_need_no_new_row(table: TensorTable) -> None:
    """As the gradients in DDP's buckets, when it makes new ones."""
    before, after = normal(300), normal(300, seed=1)
    table.update([before[:100], before[100:]])
    assert not table.update([after[:100], after[100:]])
    assert_reads(table, after[:100], after[100:])


def replaced(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that now has the memory of `tensor`."""
    parameter = nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.data = tensor
    return parameter


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "smaller": lambda t: t[:5],
    "fewer dimensions": lambda t: t.view(-1),
    "transposed": lambda t: t.t(),
    "float32 to int32": lambda t: t.view(torch.int32),
    "float32 to float16": lambda t: t.view(torch.float16)[:, ::2],
    "strided": lambda t: t[:, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_at_the_same_address(table: TensorTable, change: str) -> None:
    memory = normal(8, 8)
    parameter = replaced(memory)
    table.update([parameter])
    parameter.data = CHANGES[change](memory)
    assert parameter.data_ptr() == memory.data_ptr()
    assert table.update([parameter])
    result = table.scan(bytes(w & DIGEST for w in table.digestible))
    if table.digestible[0]:
        assert result is not None
        assert [bytes(result.digests)] == submit([parameter]).result()


@pytest.mark.parametrize(
    ("before", "after"), [(torch.bfloat16, torch.float16), (torch.float32, torch.int32)], ids=str
)
def test_another_dtype_of_the_same_size_at_the_same_address(
    table: TensorTable, before: torch.dtype, after: torch.dtype
) -> None:
    """As after `model.float().half()` of a model in bfloat16, when the allocator reuses the memory."""
    memory = normal(100).to(before)
    parameter = replaced(memory)
    table.update([parameter])
    assert table.sketchable == b"\1"
    parameter.data = memory.view(after)
    assert table.update([parameter])
    assert (table.digestible, table.sketchable) == (b"\1", b"\0")
    result = table.scan(bytes([DIGEST]))
    assert result is not None
    assert [bytes(result.digests)] == submit([parameter]).result()


def test_another_dtype_at_another_address(table: TensorTable) -> None:
    table.update([normal(100).bfloat16()])
    assert table.update([normal(100).half()])
    assert table.sketchable == b"\0"


def test_a_tensor_that_moves_to_another_device(table: TensorTable) -> None:
    table.update([normal(4, 4), normal(3)])
    assert table.update([torch.empty(4, 4, device="meta"), normal(3)])
    assert (table.digestible, table.sketchable) == (b"\0\1", b"\0\1")


def test_a_gradient_that_comes_and_goes(table: TensorTable) -> None:
    one, two = normal(10), normal(20)
    for tensors in ([one, two], [None, two], [None, None], [one, None]):
        assert table.update(tensors)
        assert not table.update(tensors)
        assert table.present == table.digestible == bytes(each is not None for each in tensors)


def test_a_list_that_grows_or_is_empty(table: TensorTable) -> None:
    assert not table.update([])
    result = table.scan(b"")
    assert result is not None
    assert (bytes(result.digests), list(result.sketches)) == (b"", [])
    tensors = [normal(10)]
    assert table.update(tensors)
    tensors.append(normal(11))
    assert table.update(tensors)
    assert_reads(table, *tensors)
    assert table.update([])
    assert len(table.addresses) == 0


@pytest.mark.parametrize("make", [*UNREADABLE, wrapper, lambda: torch.eye(3).to_sparse()])
def test_what_has_no_plain_memory_is_left_to_torch(
    table: TensorTable, make: Callable[[], torch.Tensor]
) -> None:
    plain = normal(10)
    for tensors in ([plain, plain], [plain, make()], [plain, make()], [plain, plain]):
        table.update(tensors)
        other = tensors[1] is plain
        assert (table.digestible, table.sketchable) == (bytes([1, other]), bytes([1, other]))
        result = table.scan(bytes([BOTH, BOTH * other]))
        assert result is not None
        assert Leaves(bytes(result.digests))[0] == submit([plain]).result()[0]


def test_subclasses_are_not_read_and_their_code_does_not_run(table: TensorTable) -> None:
    class Guarded(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    with torch._C.DisableTorchFunction():
        guarded = torch.Tensor._make_subclass(Guarded, normal(10))
    for _ in range(2):
        assert table.update([guarded, normal(10)])
        assert table.digestible == b"\0\1"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.quint8], ids=str)
def test_numbers_with_more_than_their_memory(table: TensorTable, dtype: torch.dtype) -> None:
    """A complex tensor may have a conjugate bit, a quantized one has a scale."""
    tensor = torch.quantize_per_tensor(normal(8), 0.1, 0, dtype) if dtype is torch.quint8 else normal(8) + 0j
    table.update([tensor])
    assert table.digestible == b"\0"


def test_a_negative_view_is_not_read_in_place(table: TensorTable) -> None:
    table.update([torch._neg_view(normal(8))])
    assert table.digestible == b"\0"


def test_more_dimensions_than_the_library_knows(table: TensorTable) -> None:
    shape = [2] * (MAX_DIMS + 1)
    most = normal(*shape[1:]).permute(*reversed(range(MAX_DIMS)))
    more = normal(*shape).permute(*reversed(range(MAX_DIMS + 1)))
    table.update([most, more])
    assert (table.digestible, table.sketchable) == (b"\1\1", b"\1\0")
    # Dimensions that follow each other in memory count once.
    joined = more.permute(*reversed(range(2, MAX_DIMS + 1)), 0, 1)
    table.update([joined])
    assert table.sketchable == b"\1"
    assert_reads(table, joined)


def test_large_rows(table: TensorTable) -> None:
    table.update([normal(LARGE // 4), normal(LARGE // 4 + 1), None, normal(2, LARGE // 4).t()])
    assert table.large == [1, 3]
    assert list(table.row_major_bytes) == [LARGE, LARGE + 4, 0, 0]


def test_memory_that_is_freed(table: TensorTable) -> None:
    tensor, other = normal(100), normal(9)
    table.update([tensor, other])
    tensor.untyped_storage().resize_(0)
    for tensors in ([tensor, other], [freed(), other]):
        # Not inside the assertion: pytest would print the tensors, which crashes.
        renewed = table.update(tensors)
        assert renewed
        assert table.digestible == b"\0\1"


@pytest.mark.parametrize("address", [0, 400, 65535])
def test_nothing_is_read_at_an_address_without_memory(table: TensorTable, address: int) -> None:
    """The address of a tensor in a freed storage is its offset."""
    table.update([normal(100), normal(9)])
    table.addresses[0] = address
    assert all(table.scan(bytes([work, BOTH])) is None for work in (DIGEST, SKETCH, COUNT))
    assert table.scan(bytes([0, BOTH])) is not None


CRASHES = """
import torch
from ddpcheck.probes.scan.table import make_table
from ddpcheck.probes.scan.scanner import TensorScanner

def read(tensors):
    scanner.update(tensors)
    everything = b"\\1" * len(tensors)
    # Of a storage that was cut, only digests and samples are taken.
    scan = scanner.scan(tensors, everything, everything if {left} == 0 else b"\\0\\1")
    scan.leaves(), scan.numbers()
    if {left} == 0:
        scanner.scan(tensors, count=everything).nonfinite()
    scanner.samples(tensors, 32, 16), scanner.windows(tensors), scanner.identities(tensors)
    return scan

size = 1 << 22
for make in {makes}:
    full = torch.ones(2 * size)
    tensors = [make(full), torch.ones(5)]
    scanner = TensorScanner()
    assert make_table() is not None
    assert 0 not in read(tensors).absent
    full.untyped_storage().resize_({left})
    for _ in range(2):
        scan = read(tensors)
        assert (0 in scan.absent) == ({left} == 0)
        assert scan.leaves()[0] == b"\\xff" * 16
        assert scan.numbers()[3:5].tolist() != [0.0, 0.0]
    full.untyped_storage().resize_(8 * size)
    full.fill_(2)
    assert 0 not in read(tensors).absent
"""


@pytest.mark.parametrize("left", [0, 64])
def test_freed_and_cut_storages_are_not_read(table: TensorTable, left: int) -> None:
    """In a process of its own: reading there would crash it."""
    makes = "(lambda t: t, lambda t: t[:size], lambda t: t[size:], lambda t: t.view(2, -1).t()[1:])"
    program = CRASHES.format(makes=makes, left=left)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_tensors_keep_their_state(table: TensorTable) -> None:
    parameter = nn.Parameter(normal(200, 250))
    tensors = [parameter, parameter.t(), (parameter * 2)]
    before = [(each.detach().clone(), each._version, each.grad_fn) for each in tensors]
    for mode in modes():
        with mode:
            table.update(tensors)
            assert_reads(table, *tensors)
    for each, (values, version, function) in zip(tensors, before, strict=True):
        assert torch.equal(each, values)
        assert (each._version, each.grad_fn) == (version, function)


def modes() -> Iterator[Any]:
    yield torch.enable_grad()
    yield torch.inference_mode()
    yield torch.autocast("cpu", dtype=torch.bfloat16)
    yield torch.device("meta")


def test_gathered_pieces_begin_anywhere_in_a_row(table: TensorTable) -> None:
    """A piece of a transposed tensor ends in the middle of a row."""
    tensors = [normal(7, PIECE // 5).t(), normal(3, 1001, 37).permute(2, 0, 1)]
    table.update(tensors)
    assert_reads(table, *tensors)
