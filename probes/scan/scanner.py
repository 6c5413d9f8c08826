"""Scans a list of tensors at each step: digests, sketches and samples of all of them, whatever their kind.

Tensors in plain memory of the CPU are rows of a table that one native call reads. All others (on a device, sparse,
subclasses, dtypes without a kernel) go to the digester and the sketches of their device, together.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcheck.probes.digest import DIGEST_SIZE, Leaves
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, direct_span
from ddpcheck.probes.scan.library import scan_library
from ddpcheck.probes.scan.table import COUNT, DIGEST, LARGE, NUMBERS, SKETCH, TensorTable, make_table
from ddpcheck.probes.sketches.batch import SketchBatch, can_add
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import pack

if TYPE_CHECKING:
    from ddpcheck.probes.digest import DigestFuture

# Windows of a large tensor that are sampled, and their size in bytes.
WINDOWS = 16
WINDOW = 64


class Scan:
    """The results of one scan; those of a device may still be computed."""

    def __init__(self, digests: bytearray, numbers: array[float], absent: frozenset[int]) -> None:
        self._digests = digests
        self._numbers = numbers
        # Results that are merged when they are complete, and the rows they belong to.
        self._other_digests: tuple[list[int], DigestFuture] | None = None
        self._other_sketches: SketchBatch | None = None
        # Rows without a tensor, or with one that cannot be sketched although it should be.
        self.absent = absent
        self._leaves: Leaves | None = None

    def wait_for(self, digests: tuple[list[int], DigestFuture] | None, sketches: SketchBatch | None) -> None:
        """Merge these results when they are needed."""
        self._other_digests, self._other_sketches = digests, sketches

    def ready(self) -> bool:
        """Whether the results can be read without waiting for a device."""
        digests, sketches = self._other_digests, self._other_sketches
        return (digests is None or digests[1].ready()) and (sketches is None or sketches.ready())

    def leaves(self) -> Leaves:
        """One leaf per row: zeros where nothing was digested."""
        if self._other_digests is not None:
            rows, future = self._other_digests
            self._other_digests = None
            self.add_leaves(dict(zip(rows, future.result(), strict=True)))
        if self._leaves is None:
            self._leaves = Leaves(bytes(self._digests))
        return self._leaves

    def add_leaves(self, leaves: Mapping[int, bytes]) -> None:
        """Set leaves that are known without reading the tensors again."""
        for row, leaf in leaves.items():
            self._digests[DIGEST_SIZE * row : DIGEST_SIZE * (row + 1)] = leaf
        self._leaves = None

    def numbers(self) -> array[float]:
        """Per row: signed sum, norm, count of non-finite values; zeros where nothing was sketched."""
        if self._other_sketches is not None:
            for row, one in self._other_sketches.sketches().items():
                self._numbers[NUMBERS * row : NUMBERS * (row + 1)] = array(
                    "d", (one.value, one.norm, one.nonfinite)
                )
            self._other_sketches = None
        return self._numbers

    def nonfinite(self) -> dict[int, int]:
        """The rows with non-finite values, and how many."""
        counts = self.numbers()[2::NUMBERS]
        return {row: int(count) for row, count in enumerate(counts) if count} if any(counts) else {}

    def holds_nonfinite(self) -> bool:
        """Whether a result that is complete counts non-finite values; does not wait for a device."""
        sketches = self._other_sketches
        return any(self._numbers[2::NUMBERS]) or (sketches is not None and sketches.holds_nonfinite())

    def may_hold_nonfinite(self) -> bool:
        """True also if it is not known yet."""
        return not self.ready() or self.holds_nonfinite()


class ScanPlan(NamedTuple):
    """What one kind of scan does with each row."""

    # What is wanted of each row, and what the table can do of it.
    wanted: bytes
    work: bytes
    # Rows that the table cannot read, and rows without a tensor.
    rest: list[int]
    missing: frozenset[int]


def _make_plan(
    table: TensorTable | None,
    tensors: Sequence[torch.Tensor | None],
    digest: bytes,
    sketch: bytes,
    count: bytes,
) -> ScanPlan:
    digest, sketch, count = (mask or bytes(len(tensors)) for mask in (digest, sketch, count))
    wanted = bytes(
        (DIGEST if d else 0) | (SKETCH if s else COUNT if c else 0)
        for d, s, c in zip(digest, sketch, count, strict=True)
    )
    missing = frozenset(row for row, tensor in enumerate(tensors) if tensor is None)
    if table is None:
        return ScanPlan(wanted, b"", [], missing)
    able = zip(table.digestible, table.sketchable, strict=True)
    possible = bytes((DIGEST if d else 0) | (SKETCH | COUNT if s else 0) for d, s in able)
    work = bytes(w & p for w, p in zip(wanted, possible, strict=True))
    rest = [row for row in range(len(wanted)) if wanted[row] != work[row] and row not in missing]
    return ScanPlan(wanted, work, rest, missing)


class TensorScanner:
    """Scans the same list of tensors again and again; the list is given at each use, since its tensors may change.

    `update` comes first: the other methods expect that it was called with the same tensors.
    """

    def __init__(self) -> None:
        self._table: TensorTable | None = make_table()
        # What follows from the masks of a scan, which are the same at nearly every step.
        self._plans: dict[tuple[bytes, bytes, bytes], ScanPlan] = {}
        self._revision = -1
        # Where the library writes samples, and the sizes of these buffers.
        self._sample_sizes = (-1, -1)
        self._sample_buffers: list[ctypes.Array[ctypes.c_char]] = []

    def update(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if self._table is not None:
            self._table.update(tensors)

    def scan(
        self,
        tensors: Sequence[torch.Tensor | None],
        digest: bytes = b"",
        sketch: bytes = b"",
        count: bytes = b"",
        only_sketchable: bool = False,
    ) -> Scan:
        """Read `tensors`. The masks have one byte per tensor, 1 where it is wanted; an empty one is for none.

        `count`: only the number of non-finite values. `only_sketchable`: a tensor that cannot be sketched is not
        digested either.
        """
        plan = self._plan(tensors, digest, sketch, count)
        length = len(tensors)
        result = None if self._table is None else self._table.scan(plan.work)
        if result is None:
            scan = Scan(
                bytearray(DIGEST_SIZE * length), array("d", bytes(8 * NUMBERS * length)), plan.missing
            )
            rest, done = [row for row in range(length) if tensors[row] is not None], bytes(length)
        else:
            scan = Scan(result.digests, result.sketches, plan.missing)
            rest, done = plan.rest, plan.work
        if rest:
            _scan_rest(scan, tensors, rest, plan.wanted, done, only_sketchable)
        return scan

    def _plan(
        self, tensors: Sequence[torch.Tensor | None], digest: bytes, sketch: bytes, count: bytes
    ) -> ScanPlan:
        table = self._table
        revision = -1 if table is None else table.revision
        if table is None or revision != self._revision or len(self._plans) > 16:
            self._plans.clear()
            self._revision = revision
        key = (digest, sketch, count)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _make_plan(table, tensors, digest, sketch, count)
        return plan

    def identities(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Per tensor, a number that changes if it is replaced: its address, or the id of one without plain memory."""
        table = self._table
        if table is not None and all(table.digestible):
            return table.addresses.tolist()
        return [0 if tensor is None else _identity(tensor) for tensor in tensors]

    def samples(self, tensors: Sequence[torch.Tensor | None], first: int, middle: int) -> tuple[bytes, bytes]:
        """Bytes from the start of each tensor, each preceded by their number, and from its centre.

        The start of a tensor that is not row-major is not its first values: it has no samples.
        """
        table = self._table
        if table is None:
            pairs = [_sample(tensor, first, middle) for tensor in tensors]
            return b"".join(start for start, _ in pairs), b"".join(centre for _, centre in pairs)
        count = len(table.addresses)
        sizes = (first + 1) * count, middle * count
        if self._sample_sizes != sizes:
            self._sample_sizes = sizes
            self._sample_buffers = [ctypes.create_string_buffer(size or 1) for size in sizes]
        starts, middles = self._sample_buffers
        length = table.library.samples(
            table.addresses.buffer_info()[0],
            table.row_major_bytes.buffer_info()[0],
            count,
            first,
            middle,
            ctypes.addressof(starts),
            ctypes.addressof(middles),
        )
        return starts.raw[:length], middles.raw[: middle * count]

    def large(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """The rows with more than LARGE bytes of plain memory."""
        if self._table is not None:
            return self._table.large
        return [row for row, tensor in enumerate(tensors) if tensor is not None and _large_span(tensor)]

    def windows(self, tensors: Sequence[torch.Tensor | None]) -> bytes:
        """Evenly spaced bytes of every large tensor, its first and its last ones included."""
        table, rows = self._table, self.large(tensors)
        if not rows:
            return b""
        if table is None:
            return b"".join(_windows(tensor) for tensor in tensors if tensor is not None)
        data = bytearray(len(rows) * WINDOWS * WINDOW)
        sizes = table.row_bytes
        table.library.windows(
            table.addresses.buffer_info()[0],
            sizes.buffer_info()[0],
            len(sizes),
            LARGE,
            WINDOWS,
            WINDOW,
            _address(data),
        )
        return bytes(data)


def _scan_rest(
    scan: Scan,
    tensors: Sequence[torch.Tensor | None],
    rest: Sequence[int],
    wanted: bytes,
    done: bytes,
    only_sketchable: bool,
) -> None:
    """Read what the table could not: all tensors of a device together."""
    absent: set[int] = set()
    rows: list[int] = []
    digested: list[torch.Tensor] = []
    batch = SketchBatch()
    for row in rest:
        tensor = tensors[row]
        if tensor is None:
            continue
        if only_sketchable and not can_add(tensor):
            absent.add(row)
            continue
        work = wanted[row] & ~done[row]
        if work & (SKETCH | COUNT) and not batch.add(row, tensor):
            absent.add(row)
        if work & DIGEST:
            rows.append(row)
            digested.append(tensor)
    batch.send()
    scan.absent |= absent
    scan.wait_for((rows, submit(digested)) if rows else None, batch if batch else None)


def sketch_text(numbers: array[float], rows: Sequence[int] | None = None) -> str:
    """The packed sketches of `rows`, or of all; `numbers` are those of a scan."""
    library = scan_library()
    if library is not None:
        chosen = None if rows is None else array("I", rows)
        count = len(numbers) // NUMBERS if rows is None else len(rows)
        indices = None if chosen is None else chosen.buffer_info()[0]
        return library.sketch_text(numbers.buffer_info()[0], indices, count)
    wanted = range(len(numbers) // NUMBERS) if rows is None else rows
    triples = (numbers[NUMBERS * row : NUMBERS * (row + 1)] for row in wanted)
    return pack(Sketch(value, norm, int(nonfinite), 0) for value, norm, nonfinite in triples)


def _identity(tensor: torch.Tensor) -> int:
    # Sparse tensors have no address, and that of a wrapper must not be read.
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return tensor.data_ptr() if plain else id(tensor)


def _sample(tensor: torch.Tensor | None, first: int, middle: int) -> tuple[bytes, bytes]:
    """The samples of one tensor without the compiled library."""
    none = bytes(1), bytes(middle)
    span = direct_span(tensor) if tensor is not None and tensor.is_cpu else None
    if span is None or not span[0].by_rows or not span[0].nbytes:
        return none
    layout, address = span
    size = min(first, layout.nbytes)
    start = bytes((size,)) + ctypes.string_at(address, size)
    if layout.nbytes < 2 * first:
        return start, none[1]
    return start, ctypes.string_at(address + layout.nbytes // 2, middle)


def _large_span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address and size of a large tensor in one span of plain memory."""
    span = direct_span(tensor) if tensor.is_cpu and type(tensor) in PLAIN_TYPES else None
    return (span[1], span[0].nbytes) if span is not None and span[0].nbytes > LARGE else None


def _windows(tensor: torch.Tensor) -> bytes:
    span = _large_span(tensor)
    if span is None:
        return b""
    address, size = span
    starts = [address + (size - WINDOW) * number // (WINDOWS - 1) for number in range(WINDOWS)]
    return b"".join([ctypes.string_at(start, WINDOW) for start in starts])


def _address(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
