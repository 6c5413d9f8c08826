"""Scans a list of tensors at each step: digests, sketches and samples of all of them, whatever their kind.

Tensors in plain memory are rows of a table: one native call reads those of the CPU, one launch those of a device. All
others (sparse, subclasses, dtypes without a kernel) go to the digester and the sketches of their device, together.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcheck import device_api, torch_compat
from ddpcheck.probes.digest import DIGEST_SIZE, UNSUPPORTED, Leaves
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, direct_span
from ddpcheck.probes.scan.device_kernels import kernel_of, lose
from ddpcheck.probes.scan.device_table import DeviceResults, DeviceTable
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
        self._launched: list[DeviceResults] = []
        # Rows without a tensor, or with one that cannot be sketched although it should be.
        self.absent = absent
        self._leaves: Leaves | None = None

    def wait_for(self, digests: tuple[list[int], DigestFuture] | None, sketches: SketchBatch | None) -> None:
        """Merge these results when they are needed."""
        self._other_digests, self._other_sketches = digests, sketches

    def add_launch(self, results: DeviceResults) -> None:
        """Merge the results of a launch when they are needed; they are zeros where the others are not."""
        self._launched.append(results)

    def _merge(self) -> None:
        for results in self._launched:
            self._digests = bytearray(_either(self._digests, results.digests()))
            self._numbers = array("d", _either(self._numbers.tobytes(), results.numbers()))
        self._launched = []

    def ready(self) -> bool:
        """Whether the results can be read without waiting for a device."""
        digests, sketches = self._other_digests, self._other_sketches
        if self._launched and not all(results.ready() for results in self._launched):
            return False
        return (digests is None or digests[1].ready()) and (sketches is None or sketches.ready())

    def leaves(self) -> Leaves:
        """One leaf per row: zeros where nothing was digested."""
        self._merge()
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
        self._merge()
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
        if all(results.ready() for results in self._launched):
            self._merge()
        return any(self._numbers[2::NUMBERS]) or (sketches is not None and sketches.holds_nonfinite())

    def may_hold_nonfinite(self) -> bool:
        """True also if it is not known yet."""
        return not self.ready() or self.holds_nonfinite()


def _either(one: bytes | bytearray, other: bytes) -> bytes:
    """Two results of the same rows, of which at most one is not zero."""
    if not any(one):
        return other
    return (int.from_bytes(one, "little") | int.from_bytes(other, "little")).to_bytes(len(one), "little")


class ScanPlan(NamedTuple):
    """What one kind of scan does with each row."""

    # What is wanted of each row, what each table does of it, and what all tables do.
    wanted: bytes
    work: list[bytes]
    done: bytes
    # Rows that no table can read, and rows without a tensor.
    rest: list[int]
    missing: frozenset[int]


def _make_plan(
    tables: Sequence[TensorTable | DeviceTable],
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
    work = []
    done = bytearray(len(tensors))
    for table in tables:
        able = zip(table.digestible, table.sketchable, strict=True)
        possible = bytes((DIGEST if d else 0) | (SKETCH | COUNT if s else 0) for d, s in able)
        work.append(bytes(w & p for w, p in zip(wanted, possible, strict=True)))
        done = bytearray(d | w for d, w in zip(done, work[-1], strict=True))
    rest = [row for row in range(len(wanted)) if wanted[row] != done[row] and row not in missing]
    return ScanPlan(wanted, work, bytes(done), rest, missing)


class TensorScanner:
    """Scans the same list of tensors again and again; the list is given at each use, since its tensors may change.

    `update` comes first: the other methods expect that it was called with the same tensors.
    """

    def __init__(self) -> None:
        # Of tensors on the CPU; None without the compiled library.
        self._table: TensorTable | None = make_table()
        self._device_tables: dict[torch.device, DeviceTable] = {}
        # The tables that have tensors of the list. Lists on one device are the rule.
        self._tables: list[TensorTable | DeviceTable] = [] if self._table is None else [self._table]
        # Whether a tensor of the list is in host memory, where it can be sampled.
        self._on_host = True
        # What follows from the masks of a scan, which are the same at nearly every step.
        self._plans: dict[tuple[bytes, bytes, bytes], ScanPlan] = {}
        # Where the library writes samples, and the sizes of these buffers.
        self._sample_sizes = (-1, -1)
        self._sample_buffers: list[ctypes.Array[ctypes.c_char]] = []

    def update(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if len(self._tables) == 1 and not self._tables[0].update(tensors):
            return
        with torch_compat.no_torch_function():
            devices = {tensor.device for tensor in tensors if tensor is not None}
            before, self._tables = self._tables, []
            self._on_host = not devices or any(device.type == "cpu" for device in devices)
            for device in devices or {torch.device("cpu")}:
                table = self._table if device.type == "cpu" else self._device_table(device)
                if table is None:
                    continue
                self._tables.append(table)
                if len(devices) > 1:
                    table.update([_if_on(device, tensor) for tensor in tensors])
                elif before != [table]:
                    table.update(tensors)
        # Rows were made anew, or belong to other tables now.
        self._plans.clear()

    def _device_table(self, device: torch.device) -> DeviceTable | None:
        """None on a device without a kernel, and for tensors without memory."""
        table = self._device_tables.get(device)
        if table is None and device.type != "meta":
            kernel = kernel_of(device).kernel
            if kernel is not None:
                table = self._device_tables[device] = DeviceTable(device, kernel)
        return table

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
        digests: bytearray | None = None
        numbers: array[float] = array("d")
        rest, done = plan.rest, plan.done
        launches: list[DeviceResults] = []
        captured: list[bytes] = []
        for table, work in zip(self._tables, plan.work, strict=True):
            if isinstance(table, DeviceTable):
                if device_api.capturing():
                    # Kernels are recorded now, not run: there are no values to read yet.
                    captured.append(work)
                elif any(work):
                    launched = self._launch(table, work)
                    if launched is not None:
                        launches.append(launched)
                    else:
                        done, rest = _read_otherwise(done, rest, work)
            elif (result := table.scan(work)) is not None:
                digests, numbers = result.digests, result.sketches
            else:
                # The memory of one of them is gone: read them one by one.
                done, rest = _read_otherwise(done, rest, work)
        if digests is None:
            # Only devices, or what torch reads: their results are merged into zeros.
            digests, numbers = bytearray(DIGEST_SIZE * length), array("d", bytes(8 * NUMBERS * length))
        scan = Scan(digests, numbers, plan.missing)
        for results in launches:
            scan.add_launch(results)
        for work in captured:
            scan.add_leaves({row: UNSUPPORTED for row in range(length) if work[row] & DIGEST})
            scan.absent |= {row for row in range(length) if work[row] & (SKETCH | COUNT)}
        if rest:
            _scan_rest(scan, tensors, rest, plan.wanted, done, only_sketchable)
        return scan

    def _launch(self, table: DeviceTable, work: bytes) -> DeviceResults | None:
        """None if the kernel fails although it was right when the module was wrapped: torch reads the tensors then."""
        if kernel_of(table.device).kernel is None:
            return None
        try:
            return table.scan(work)
        except Exception as error:
            # Compilers and drivers raise types of their own. What cannot be read otherwise either reaches the guard.
            lose(table.device, error)
            return None

    def _plan(
        self, tensors: Sequence[torch.Tensor | None], digest: bytes, sketch: bytes, count: bytes
    ) -> ScanPlan:
        if not self._tables or len(self._plans) > 16:
            self._plans.clear()
        key = (digest, sketch, count)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _make_plan(self._tables, tensors, digest, sketch, count)
        return plan

    def identities(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Per tensor, a number that changes if it is replaced: its address, or the id of one without plain memory."""
        table = self._tables[0] if len(self._tables) == 1 else None
        if table is not None and all(table.digestible):
            return table.addresses.tolist()
        return [0 if tensor is None else _identity(tensor) for tensor in tensors]

    def _cpu_table(self) -> TensorTable | None:
        """Only memory of the CPU is sampled; None: each tensor is asked where it is."""
        return self._table if self._table is not None and self._table in self._tables else None

    def samples(self, tensors: Sequence[torch.Tensor | None], first: int, middle: int) -> tuple[bytes, bytes]:
        """Bytes from the start of each tensor, each preceded by their number, and from its centre.

        The start of a tensor that is not row-major is not its first values: it has no samples.
        """
        if not self._on_host:
            return bytes(len(tensors)), bytes(middle * len(tensors))
        table = self._cpu_table()
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
        if not self._on_host:
            return []
        table = self._cpu_table()
        if table is not None:
            return table.large
        return [row for row, tensor in enumerate(tensors) if tensor is not None and _large_span(tensor)]

    def windows(self, tensors: Sequence[torch.Tensor | None]) -> bytes:
        """Evenly spaced bytes of every large tensor, its first and its last ones included."""
        table, rows = self._cpu_table(), self.large(tensors)
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


def _read_otherwise(done: bytes, rest: list[int], work: bytes) -> tuple[bytes, list[int]]:
    """Move the rows of `work` from those that a table reads to the others."""
    done = bytes(d & ~w for d, w in zip(done, work, strict=True))
    return done, sorted({*rest, *(row for row, wanted in enumerate(work) if wanted)})


def _if_on(device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is not None and tensor.device == device else None


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
