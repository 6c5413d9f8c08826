"""A scan gives the bits of the digester and of the sketches, whatever the tensors are, with and without the library."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ddpcheck import torch_compat
from ddpcheck.probes.digest import DIGEST_SIZE, UNSUPPORTED, Leaves, combine
from ddpcheck.probes.digest.device_copy import DirectCopy
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.scan import scanner as scanner_module
from ddpcheck.probes.scan.scanner import WINDOW, WINDOWS, Scan, TensorScanner, sketch_text
from ddpcheck.probes.scan.table import LARGE, NUMBERS
from ddpcheck.probes.sketches import batch
from ddpcheck.probes.sketches.batch import can_add
from ddpcheck.probes.sketches.sketch import Sketch, sketch
from ddpcheck.records.codecs import SCALES, STEPS, pack, unpack
from ddpcheck.records.sketch_signs import BLOCK, PIECE
from tests.helpers.unreadable_tensors import UNREADABLE, freed, wrapper

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, *FLOAT8]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
COMPLEX = [torch.complex64, torch.complex128]
SIZES = [0, 1, 15, 16, 17, 100_000, PIECE, PIECE + 1, BLOCK, 2 * BLOCK + 17]

Tensors = Sequence[torch.Tensor | None]


@pytest.fixture(params=[pytest.param("compiled", marks=pytest.mark.needs("library")), "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled library and without it."""
    way: str = request.param
    if way == "python":
        monkeypatch.setattr(scanner_module, "make_table", lambda: None)
        monkeypatch.setattr(scanner_module, "scan_library", lambda: None)
    return way


@pytest.fixture
def scanner(way: str) -> TensorScanner:
    return TensorScanner()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    if dtype.is_floating_point:
        return values.to(dtype)
    return (values * 50).to(torch.int64).remainder(100).to(dtype)


def ones(tensors: Tensors) -> bytes:
    return b"\1" * len(tensors)


def scan_all(scanner: TensorScanner, tensors: Tensors) -> Scan:
    scanner.update(tensors)
    return scanner.scan(tensors, ones(tensors), ones(tensors))


def rows_of(numbers: array[float]) -> list[tuple[float, ...]]:
    return [tuple(numbers[at : at + NUMBERS]) for at in range(0, len(numbers), NUMBERS)]


def assert_scans(scanner: TensorScanner, tensors: Sequence[torch.Tensor]) -> None:
    """One pass over `tensors` gives the bits of one call for each."""
    scan = scan_all(scanner, tensors)
    assert list(scan.leaves()) == submit(tensors).result()
    # As text: what is not a number equals nothing.
    assert str(rows_of(scan.numbers())) == str(
        [(*sketch(t)[:2], float(sketch(t).nonfinite)) for t in tensors]
    )
    assert scan.absent == frozenset()
    assert scan.ready()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_every_dtype(scanner: TensorScanner, dtype: torch.dtype) -> None:
    assert_scans(scanner, [normal(size, dtype=dtype) for size in (0, 1, 17, PIECE + 5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(scanner: TensorScanner, size: int, dtype: torch.dtype) -> None:
    assert_scans(scanner, [normal(size, dtype=dtype)])


def at_offset(size: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory begins `offset` bytes after an aligned address."""
    memory = bytearray(size * dtype.itemsize + 128)
    aligned = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 64
    tensor = torch.frombuffer(memory, dtype=dtype, count=size, offset=aligned + offset)
    assert tensor.data_ptr() % 64 == offset
    return tensor.copy_(normal(size, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8, 20, 33, 63])
def test_every_alignment(scanner: TensorScanner, offset: int, dtype: torch.dtype) -> None:
    sizes = [1, 17, 1000, PIECE + 3]
    tensors = [at_offset(size, offset, dtype) for size in sizes]
    assert_scans(scanner, tensors)
    scanner.update(tensors)
    assert scanner.scan(tensors, count=ones(tensors)).nonfinite() == {}
    for tensor in tensors:
        tensor[-1] = math.nan
    assert scanner.scan(tensors, count=ones(tensors)).nonfinite() == dict.fromkeys(range(len(sizes)), 1)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, 1),
    "permuted": lambda t: t.permute(3, 1, 0, 2),
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "expanded": lambda t: t[:, :1].expand(-1, 40, -1, -1),
    "sliced": lambda t: t[::3, 1:, :, 2],
    "every seventh": lambda t: t.flatten()[::7],
    "from an odd index": lambda t: t.flatten()[5:],
    "column": lambda t: t.view(-1, 1),
    "row": lambda t: t.view(-1, 1).t(),
    "one": lambda t: t[3, 2, 1, 0],
    "empty": lambda t: t[:, :0],
    "negative": torch._neg_view,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_every_stride(scanner: TensorScanner, view: str, dtype: torch.dtype) -> None:
    tensor = VIEWS[view](normal(64, 40, 9, 3, dtype=dtype))
    assert_scans(scanner, [tensor, normal(9), tensor])
    (row, *_) = rows_of(scan_all(scanner, [tensor]).numbers())
    assert row[:2] == sketch(tensor.contiguous())[:2]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_dimensions(scanner: TensorScanner, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    tensors = []
    for _ in range(20):
        shape = torch.randint(1, 6, (int(torch.randint(1, 9, (), generator=made)),), generator=made).tolist()
        order = torch.randperm(len(shape), generator=made).tolist()
        tensors.append(normal(*shape, seed=seed).permute(order))
    assert_scans(scanner, tensors)


def test_tensors_of_all_kinds_together(scanner: TensorScanner) -> None:
    tensors: list[torch.Tensor | None] = [
        normal(20),
        None,
        torch.eye(3).to_sparse(),
        normal(30, dtype=torch.float16),
        nn.Parameter(normal(5, 6)),
        torch.empty(3, device="meta"),
        TwoTensor(normal(4), normal(4)),
        normal(8, dtype=torch.complex64).conj(),
        None,
        normal(PIECE + 1, dtype=torch.bfloat16),
    ]
    for _ in range(2):
        scan = scan_all(scanner, tensors)
        # A tensor of two has no sketch.
        assert scan.absent == {1, 5, 6, 8}
        present = [row for row, tensor in enumerate(tensors) if tensor is not None]
        leaves = submit([tensor for tensor in tensors if tensor is not None]).result()
        assert {row: scan.leaves()[row] for row in present} == dict(zip(present, leaves, strict=True))
        assert scan.leaves()[1] == scan.leaves()[8] == bytes(DIGEST_SIZE)
        assert scan.leaves()[5] == UNSUPPORTED
        for row, tensor in enumerate(tensors):
            expected = (0.0, 0.0, 0.0) if row in scan.absent or tensor is None else sketch(tensor)[:3]
            assert rows_of(scan.numbers())[row] == expected


def test_only_what_is_asked_for_is_read(scanner: TensorScanner) -> None:
    tensors = [normal(20, dtype=dtype) for dtype in (torch.float32, torch.float64) for _ in range(3)]
    scanner.update(tensors)
    scan = scanner.scan(tensors, b"\1\0\0\1\0\0", b"\0\1\0\0\1\0")
    leaves = submit(tensors).result()
    assert list(scan.leaves()) == [leaf if row % 3 == 0 else bytes(16) for row, leaf in enumerate(leaves)]
    assert rows_of(scan.numbers()) == [
        sketch(tensor)[:3] if row % 3 == 1 else (0.0, 0.0, 0.0) for row, tensor in enumerate(tensors)
    ]


@pytest.mark.parametrize("only_sketchable", [False, True])
def test_what_cannot_be_sketched_is_digested_unless_the_caller_says_otherwise(
    scanner: TensorScanner, only_sketchable: bool
) -> None:
    tensors = [normal(5), wrapper(), normal(5, dtype=torch.int32), torch.ones(3, device="meta")]
    assert [can_add(tensor) for tensor in tensors] == [True, False, True, False]
    scanner.update(tensors)
    scan = scanner.scan(tensors, ones(tensors), only_sketchable=only_sketchable)
    expected = submit(tensors).result()
    if only_sketchable:
        expected[1] = expected[3] = bytes(DIGEST_SIZE)
    assert list(scan.leaves()) == expected
    assert scan.absent == ({1, 3} if only_sketchable else set())


@pytest.mark.parametrize("make", [*UNREADABLE, wrapper])
def test_unreadable_tensors(scanner: TensorScanner, make: Callable[[], torch.Tensor]) -> None:
    tensors = [normal(5), make(), normal(6)]
    scan = scan_all(scanner, tensors)
    assert scan.absent == {1}
    assert list(scan.leaves()) == submit(tensors).result()
    assert rows_of(scan.numbers())[::2] == [sketch(tensor)[:3] for tensor in tensors[::2]]
    assert scanner.scan(tensors, count=ones(tensors)).nonfinite() == {}
    assert len(scanner.identities(tensors)) == 3


def test_memory_that_is_freed_between_two_scans(scanner: TensorScanner) -> None:
    tensors = [normal(100), normal(200)[100:], normal(5), normal(1 << 18)[1 << 17 :]]
    before = scan_all(scanner, tensors)
    for row in (0, 1, 3):
        tensors[row].untyped_storage().resize_(0)
    scan = scan_all(scanner, tensors)
    assert scan.absent == {0, 1, 3}
    assert list(scan.leaves()) == [UNSUPPORTED, UNSUPPORTED, before.leaves()[2], UNSUPPORTED]
    assert rows_of(scan.numbers())[2] == sketch(tensors[2])[:3]
    assert scanner.samples(tensors, 32, 16)[0] == b"\0\0\x14" + bytes(tensors[2].numpy().data) + b"\0"
    assert scanner.windows(tensors) == b""


def test_memory_that_is_freed_after_the_update(way: str, scanner: TensorScanner) -> None:
    """The table has its address still: all tensors are read without it."""
    if way == "python":
        pytest.skip("there is no table")
    tensors = [normal(100), normal(5)]
    scanner.update(tensors)
    tensors[0].untyped_storage().resize_(0)
    assert scanner._table is not None
    scanner._table.addresses[0] = tensors[0].data_ptr()
    scan = scanner.scan(tensors, ones(tensors), ones(tensors))
    assert scan.absent == {0}
    assert list(scan.leaves()) == submit(tensors).result()
    assert rows_of(scan.numbers())[1] == sketch(tensors[1])[:3]


def test_tensors_that_change_between_two_scans(scanner: TensorScanner) -> None:
    """As in a model whose layers are replaced, converted and moved."""
    memory = normal(64, dtype=torch.float32)
    lists: list[list[torch.Tensor]] = [
        [memory, normal(3)],
        [memory, normal(3, seed=1)],
        [memory[:32], normal(3)],
        [memory.view(torch.int32), normal(3)],
        [memory.view(torch.bfloat16)[:64], normal(3)],
        [memory.view(torch.float16)[:64], normal(3)],
        [memory.view(8, 8), normal(3)],
        [memory.view(8, 8).t(), normal(3)],
        [memory.view(8, 8)[:, ::2], normal(3)],
        [memory, normal(3, 3)],
        [memory],
        [normal(64, seed=2)],
    ]
    for tensors in [*lists, *reversed(lists)]:
        assert_scans(scanner, tensors)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_values_that_are_not_finite_are_counted(scanner: TensorScanner, dtype: torch.dtype) -> None:
    wrong = [math.inf, -math.inf, math.nan]
    if dtype in FLOAT8:
        wrong = [math.nan] * 3
    tensors = [normal(100_000, dtype=dtype) for _ in range(3)]
    for row, value in enumerate(wrong):
        for index in (5, 50_000, 99_999)[: row + 1]:
            tensors[row][index] = value
    tensors += [tensors[2].view(400, 250).t(), normal(9, dtype=dtype)]
    scanner.update(tensors)
    expected = {0: 1, 1: 2, 2: 3, 3: 3}
    for masks in ({"sketch": ones(tensors)}, {"count": ones(tensors)}):
        scan = scanner.scan(tensors, **masks)
        assert scan.nonfinite() == expected
        assert scan.holds_nonfinite()
        assert scan.may_hold_nonfinite()
    # Where both are wanted, the sketch counts.
    scan = scanner.scan(tensors, sketch=b"\1\0\0\0\1", count=ones(tensors))
    assert scan.nonfinite() == expected
    assert rows_of(scan.numbers())[4] == sketch(tensors[4])[:3]
    scan = scanner.scan(tensors, ones(tensors), count=b"\0\1\0\0\1")
    assert scan.nonfinite() == {1: 2}
    assert list(scan.leaves()) == submit(tensors).result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_and_smallest_finite_values_are_not_counted(
    scanner: TensorScanner, dtype: torch.dtype
) -> None:
    limits = torch.finfo(dtype)
    values = (limits.max, limits.min, limits.smallest_normal, limits.smallest_normal / 64, -0.0)
    tensors = [torch.full((99,), value, dtype=dtype) for value in values]
    scan = scan_all(scanner, tensors)
    assert scan.nonfinite() == {}
    assert not scan.holds_nonfinite()
    assert not scan.may_hold_nonfinite()
    assert scanner.scan(tensors, count=ones(tensors)).nonfinite() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", [[math.inf], [-math.inf], [math.inf, -math.inf], [math.nan]], ids=str)
def test_sketches_of_values_that_are_not_finite(
    scanner: TensorScanner, values: list[float], dtype: torch.dtype
) -> None:
    tensors = [normal(size, dtype=dtype) for size in (9, PIECE + 9, 2 * BLOCK)]
    for tensor in tensors:
        tensor[5 : 5 + len(values)] = torch.tensor(values, dtype=dtype)
    assert_scans(scanner, tensors)


def test_plans_are_kept_until_a_row_changes(way: str, scanner: TensorScanner) -> None:
    tensors = [normal(10), normal(10, dtype=torch.float64)]
    scanner.update(tensors)
    first = scanner._plan(tensors, b"\1\1", b"", b"")
    assert (first.wanted, first.missing) == (b"\1\1", frozenset())
    if way == "python":
        return
    assert (first.work, first.rest) == ([b"\1\1"], [])
    assert scanner._plan(tensors, b"\1\1", b"", b"") is first
    sketched = scanner._plan(tensors, b"\1\1", b"\1\1", b"")
    assert (sketched.wanted, sketched.work, sketched.rest) == (b"\3\3", [b"\3\1"], [1])
    assert scanner._plan(tensors, b"\1\1", b"", b"") is first
    moved = [normal(10), normal(10, dtype=torch.float64)]
    scanner.update(moved)
    assert scanner._plan(moved, b"\1\1", b"", b"") is first
    scanner.update([None, moved[1]])
    renewed = scanner._plan([None, moved[1]], b"\1\1", b"", b"")
    assert (renewed.work, renewed.rest, renewed.missing) == ([b"\0\1"], [], {0})


def test_plans_of_changing_masks_do_not_add_up(scanner: TensorScanner) -> None:
    tensors = [normal(3) for _ in range(8)]
    scanner.update(tensors)
    for number in range(200):
        mask = bytes(number >> bit & 1 for bit in range(8))
        leaves = scanner.scan(tensors, mask).leaves()
        assert [any(leaf) for leaf in leaves] == [bool(each) for each in mask]
        assert len(scanner._plans) <= 17


def test_a_mask_of_another_length_is_an_error(scanner: TensorScanner) -> None:
    tensors = [normal(3)]
    scanner.update(tensors)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        scanner.scan(tensors, b"\1\1")


def test_an_empty_list(scanner: TensorScanner) -> None:
    scan = scan_all(scanner, [])
    assert list(scan.leaves()) == []
    assert scan.leaves().root() == combine([])
    assert sketch_text(scan.numbers()) == ""
    assert scanner.samples([], 32, 16) == (b"", b"")
    assert (scanner.windows([]), scanner.large([]), scanner.identities([])) == (b"", [], [])


def test_identities_change_with_the_tensor(scanner: TensorScanner) -> None:
    sparse = torch.eye(3).to_sparse()
    for tensors in ([normal(3), normal(4)], [normal(3), None], [normal(3), sparse], [normal(3), wrapper()]):
        scanner.update(tensors)
        before = scanner.identities(tensors)
        assert before[0] == tensors[0].data_ptr()  # type: ignore[union-attr]
        assert (before[1] == 0) == (tensors[1] is None)
        assert scanner.identities(tensors) == before
        changed: list[torch.Tensor | None] = [tensors[0], normal(4)]
        scanner.update(changed)
        assert scanner.identities(changed) != before


def test_samples_are_the_same_with_and_without_the_library(
    way: str, scanner: TensorScanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: list[torch.Tensor | None] = [
        *(normal(size) for size in (0, 1, 7, 8, 15, 16, 17, 1000)),
        None,
        *(normal(100, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.complex64)),
        normal(10, 10).t(),
        normal(100)[3:],
        normal(100)[::2],
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        wrapper(),
        freed(),
        torch.tensor(3.0),
    ]
    scanner.update(tensors)
    monkeypatch.setattr(scanner_module, "make_table", lambda: None)
    for first, middle in ((32, 16), (32, 0), (8, 4)):
        sampled = scanner.samples(tensors, first, middle)
        assert sampled == TensorScanner().samples(tensors, first, middle)
        assert len(sampled[1]) == middle * len(tensors)


def test_windows_are_evenly_spaced_in_every_large_tensor(scanner: TensorScanner) -> None:
    large = normal(LARGE // 4 + 333)
    tensors: list[torch.Tensor | None] = [
        normal(LARGE // 4),
        large,
        None,
        normal(4, LARGE // 8).t(),
        normal(LARGE)[::2],
        torch.empty(LARGE, device="meta"),
        normal(LARGE, dtype=torch.int8).expand(LARGE),
        normal(LARGE + 8)[7:],
    ]
    scanner.update(tensors)
    assert scanner.large(tensors) == [1, 3, 7]
    windows = scanner.windows(tensors)
    assert len(windows) == 3 * WINDOWS * WINDOW
    data = bytes(large.numpy().data)
    starts = [(len(data) - WINDOW) * number // (WINDOWS - 1) for number in range(WINDOWS)]
    assert windows[: WINDOWS * WINDOW] == b"".join(data[start : start + WINDOW] for start in starts)
    last = bytes(tensors[7].numpy().data)[-WINDOW:]  # type: ignore[union-attr]
    assert windows.endswith(last)


def test_windows_are_the_same_with_and_without_the_library(
    scanner: TensorScanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [normal(LARGE // 4 + size, seed=size) for size in (1, 2, 17, 100, 12_345)]
    tensors += [normal(3, LARGE // 4).t(), normal(LARGE // 2, dtype=torch.bfloat16), normal(2 * LARGE)[3:]]
    scanner.update(tensors)
    windows = scanner.windows(tensors)
    monkeypatch.setattr(scanner_module, "make_table", lambda: None)
    assert windows == TensorScanner().windows(tensors)


def test_the_text_of_sketches_is_that_of_pack(scanner: TensorScanner) -> None:
    tensors = [normal(size, seed=size) * 10.0 ** (size % 70 - 35) for size in range(1, 60)]
    tensors[7][0], tensors[8][:] = math.inf, 0
    scan = scan_all(scanner, tensors)
    for rows in (None, [], [0], [3, 1], [58, 8, 7], list(range(0, 59, 2)), list(range(59))):
        chosen = tensors if rows is None else [tensors[row] for row in rows]
        text = sketch_text(scan.numbers(), rows)
        assert text == pack(map(sketch, chosen))
        assert len(unpack(text)) == len(chosen)


def extreme_sketches() -> list[Sketch]:
    numbers = [0.0, -0.0, 5e-324, 1e-200, 1e-150, 3e-39, 1e-9, 0.1, 1.0, math.pi, 1e17, 1e38, 1e300, 1.7e308]
    # A signed sum is at most a few norms, unless the norm underflows.
    pairs = [(value, norm) for value in numbers for norm in numbers if norm < 1e-150 or value <= 1e99 * norm]
    sketches = [Sketch(sign * value, norm, 0, 0) for value, norm in pairs for sign in (1, -1)]
    # At and next to the limits of scales and steps, and at ties, which are rounded to even.
    for scale in SCALES:
        for norm in (math.nextafter(scale, 0), scale, math.nextafter(scale, math.inf)):
            sketches.append(Sketch(scale / 3, norm, 0, 0))
    for steps in (0.5, 1.5, 2.5, -0.5, -1.5, 2**31 - 1.5, 2**31 - 0.5, 2**31, -(2**31) + 1, -(2**31)):
        sketches.append(Sketch(steps / STEPS, 0.99, 0, 0))
    for nonfinite in (0, 1, 255, 256, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**40):
        for value in (math.nan, math.inf, -math.inf, 1.0):
            sketches.append(Sketch(value, math.nan, nonfinite, 0))
    sketches += [Sketch(1.0, math.inf, 0, 0), Sketch(1.0, math.nan, 0, 0), Sketch(1e308, 1e-300, 0, 0)]
    return sketches


def test_the_text_of_extreme_sketches_is_that_of_pack() -> None:
    sketches = extreme_sketches()
    numbers = array("d", [number for each in sketches for number in each[:3]])
    assert sketch_text(numbers) == pack(sketches)
    for count in range(9):
        assert sketch_text(numbers[: NUMBERS * count]) == pack(sketches[:count])
    for row, each in enumerate(sketches):
        assert sketch_text(numbers, [row]) == pack([each]), each


def test_leaves_are_those_of_the_digester(scanner: TensorScanner) -> None:
    tensors = [normal(10), normal(20), normal(30, dtype=torch.int64)]
    leaves = scan_all(scanner, tensors).leaves()
    expected = submit(tensors).result()
    assert leaves.root() == combine(expected)
    assert (len(leaves), leaves[1], leaves) == (3, expected[1], Leaves.of(expected))
    for width in (1, 2, 4, 8):
        assert leaves.narrow(width) == b"".join(leaf[:width] for leaf in expected)


def test_leaves_with_some_of_them_replaced(scanner: TensorScanner) -> None:
    scan = scan_all(scanner, [normal(10), normal(20), normal(30)])
    leaves = scan.leaves()
    other = bytes(range(16))
    updated = leaves.updated({1: other})
    assert list(updated) == [leaves[0], other, leaves[2]]
    assert updated != leaves
    assert updated.root() == combine([leaves[0], other, leaves[2]])
    assert leaves.updated({}) == leaves
    scan.add_leaves({1: other})
    assert scan.leaves() == updated
    assert updated != list(updated)


def test_the_root_depends_on_order_and_number() -> None:
    one, two = bytes(16), b"\1" * 16
    roots = [Leaves.of(leaves).root() for leaves in ([], [one], [one, one], [one, two], [two, one])]
    assert len(set(roots)) == len(roots)


class SlowCopy(DirectCopy):
    """A copy that stays pending until the test completes it."""

    arrived = False

    def ready(self) -> bool:
        return self.arrived


def test_results_of_a_device_are_not_waited_for(
    scanner: TensorScanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [normal(10), normal(20)]
    tensors[1][3] = math.nan
    with monkeypatch.context() as patch:
        # The device's operations, run on the CPU.
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        patch.setattr(batch, "copy_to_host", SlowCopy)
        scanner.update(tensors)
        scan = scanner.scan(tensors, sketch=ones(tensors))
        assert not scan.ready()
        assert not scan.holds_nonfinite()
        assert scan.may_hold_nonfinite()
        patch.setattr(SlowCopy, "arrived", True)
        assert scan.ready()
        assert scan.nonfinite() == {1: 1}
    assert scan.numbers()[0] == pytest.approx(sketch(tensors[0]).value, rel=1e-12)


def test_each_scanner_has_its_own_rows_and_threads_do_not_disturb_each_other() -> None:
    """There is one state for hashing large tensors in pieces."""
    lists = [[normal(3 * PIECE + seed, seed=seed), normal(40 * PIECE, seed=seed)] for seed in range(3)]
    expected = [submit(tensors).result() for tensors in lists]
    results: dict[int, list[list[bytes]]] = {}

    def work(index: int) -> None:
        scanner = TensorScanner()
        results[index] = [list(scan_all(scanner, lists[index]).leaves()) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [leaves] * 4 for index, leaves in enumerate(expected)}


def test_a_subclass_is_read_without_running_its_operations(scanner: TensorScanner) -> None:
    class Guarded(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    values = normal(LARGE).view(4, -1).t()
    with torch._C.DisableTorchFunction():
        guarded = torch.Tensor._make_subclass(Guarded, values)
    # As at every event of the agent.
    with torch_compat.suspend_user_modes():
        scan = scan_all(scanner, [guarded])
        assert list(scan.leaves()) == submit([values]).result()
        assert rows_of(scan.numbers()) == [sketch(values)[:3]]
        assert scanner.samples([guarded], 32, 16) == (b"\0", bytes(16))
        assert (scanner.windows([guarded]), scanner.large([guarded])) == (b"", [])
        assert scanner.identities([guarded]) == [id(guarded)]


def test_tensors_on_a_device_are_not_asked_one_by_one_for_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner_module, "_sample", None)
    monkeypatch.setattr(scanner_module, "_large_span", None)
    tensors = [torch.empty(40, device="meta"), torch.empty(9, device="meta")]
    scanner = TensorScanner()
    scanner.update(tensors)
    assert scanner.samples(tensors, 32, 16) == (bytes(2), bytes(32))
    assert scanner.windows(tensors) == b""
