"""Shared memory through which ranks of one node exchange their latest digests without waiting.

A mismatch must be detected before the next optimizer step overwrites the differing values. Each rank owns one slot,
writes only to that slot, and reads the other slots without locks. An entry has a checksum; a reader ignores entries
whose checksum does not match.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddpcheck.config import Config
from ddpcheck.machine_identity import boot_id, is_on_this_machine

SLOTS = 256
RING = 64
MOST_LEAVES = 8192
LEAF = 8

# Rank + 1, pid, entries written, key of the leaves, number of leaves, write error.
_HEADER = struct.Struct("<iiQ8sI120s")
_ENTRY = struct.Struct("<8s16sII")  # key, root, flags, checksum
_KEY = struct.Struct("<8sI")  # key of the leaves, number of leaves
_RING_AT = 256
_LEAVES_AT = 4096
_SLOT = _LEAVES_AT + MOST_LEAVES * LEAF
_SLOT_WORDS = _SLOT // 8
_SIZE = SLOTS * _SLOT + mmap.PAGESIZE
_COUNT_WORD = 1
_KEY_AT = 16
_WRITE_ERROR_AT = 28
# Behind the header: the heartbeat count of this rank, and the ids of ddpcheck's threads in it.
_BEAT_AT = 152
_OWN_THREADS_AT = 160
_OWN_THREADS = struct.Struct("<4I")
# Behind them: the epoch for which this rank needs a schedule of the budget, and its level.
_BUDGET_AT = 176
_BUDGET = struct.Struct("<II")
# Behind the last slot: the number of the launcher's latest request for stacks.
_REQUEST_AT = SLOTS * _SLOT + 64
_NUMBER = struct.Struct("<Q")

CAPTURED = 1


@dataclass(frozen=True)
class Heartbeat:
    """What the launcher reads of a rank: its heartbeat count and the ids of ddpcheck's threads."""

    beats: int
    own_threads: frozenset[int] = frozenset()


class RankWriteError(NamedTuple):
    """Why a rank could not write to its record file."""

    rank: int
    pid: int
    text: str


@dataclass(frozen=True)
class Entry:
    """The digest of one rank for one snapshot."""

    rank: int
    slot: int
    key: bytes
    root: bytes
    captured: bool


def create_exchange(path: Path) -> None:
    """Create an empty exchange file. Each rank allocates its own slot, so an idle file costs one page."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def exchange_in(run_dir: str, exchange_file: str) -> Path:
    """Where ranks of this launcher create an exchange that cannot open the launcher's: in their containers, /dev/shm is
    another one."""
    return Path(run_dir) / f"exchange-{os.path.basename(exchange_file)}"


class ShmExchange:
    """One rank's view of the exchange."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._slot = self._claim()
            # Without allocated space, access to the mapping raises SIGBUS on a full disk. One page of the next slot is
            # included, since readers read up to the first free slot.
            os.posix_fallocate(self._file, self._slot * _SLOT, _SLOT + mmap.PAGESIZE)
            self._map = mmap.mmap(self._file, _SIZE)
        except BaseException:
            os.close(self._file)
            raise
        self._base = self._slot * _SLOT
        # Reading and writing one number takes a third of what struct takes.
        self._words = memoryview(self._map).cast("Q")
        # The number of entries of each slot.
        self._counts = self._words[_COUNT_WORD::_SLOT_WORDS]
        self._beat_word = (self._base + _BEAT_AT) // 8
        self.begin(rank)

    def begin(self, rank: int, write_error: bytes = b"") -> None:
        """Clear the slot and write the header of a rank that has not published an entry yet."""
        self._count = 0
        # Of the slots that ranks have, how many entries were read.
        self._read_counts: list[int] = []
        self._map[self._base : self._base + _SLOT] = bytes(_SLOT)
        _HEADER.pack_into(self._map, self._base, rank + 1, os.getpid(), 0, b"", 0, write_error)

    def restart(self, rank: int) -> None:
        """Called when the same process joins another process group. Keeps the reported write error."""
        self.begin(rank, _HEADER.unpack_from(self._map, self._base)[-1])

    def _claim(self) -> int:
        """Lock the first free slot and return its index. The kernel releases the lock of a dead rank.

        Slots with the write error of a dead rank are used last, so that the launcher can still read it.
        """
        with_error = [slot for slot in range(SLOTS) if self._has_write_error(slot)]
        for slot in [*(slot for slot in range(SLOTS) if slot not in with_error), *with_error]:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * _SLOT)
            except OSError:
                continue
            return slot
        raise OSError(f"all {SLOTS} slots of the exchange are taken")

    def _has_write_error(self, slot: int) -> bool:
        """Uses pread, since the file may be shorter than the mapping."""
        return os.pread(self._file, 1, slot * _SLOT + _WRITE_ERROR_AT) not in (b"", b"\0")

    def publish(self, key: bytes, root: bytes, leaves: bytes, flags: int = 0) -> int:
        """Publish a digest of this rank, with LEAF bytes of each leaf; returns the number of the entry."""
        if len(leaves) <= MOST_LEAVES * LEAF:
            offset = self._base + _LEAVES_AT
            # The key is cleared first, so that incomplete leaves match no key.
            self._words[(self._base + _KEY_AT) // 8] = 0
            self._map[offset : offset + len(leaves)] = leaves
            _KEY.pack_into(self._map, self._base + _KEY_AT, key, len(leaves) // LEAF)
        number = self._count
        self._write_entry(number, key, root, flags)
        self._count += 1
        self._words[self._base // 8 + _COUNT_WORD] = self._count
        return number

    def mark_captured(self, number: int, key: bytes, root: bytes) -> None:
        """Ask the other ranks to keep their values of entry `number`, as this rank did."""
        if self._count - number < RING:
            self._write_entry(number, key, root, CAPTURED)

    def report_write_error(self, text: str) -> None:
        """Publish why this rank could not write its records, truncated to 119 bytes."""
        data = text.encode(errors="replace")[:119]
        self._map[self._base + _WRITE_ERROR_AT : self._base + _WRITE_ERROR_AT + 120] = data.ljust(120, b"\0")

    def beat(self, count: int) -> None:
        """Update the heartbeat that the launcher reads; called several times per step."""
        self._words[self._beat_word] = count

    def publish_threads(self, threads: Sequence[int]) -> None:
        """Publish the ids of ddpcheck's own threads in this rank."""
        ids = [*threads, 0, 0, 0, 0][:4]
        _OWN_THREADS.pack_into(self._map, self._base + _OWN_THREADS_AT, *ids)

    def publish_budget_level(self, epoch: int, level: int) -> None:
        """Publish how sparse the schedule of an epoch has to be for this rank."""
        _BUDGET.pack_into(self._map, self._base + _BUDGET_AT, epoch, level)

    def budget_levels(self, epoch: int) -> list[int]:
        """The levels that the ranks of this node, this one included, have published for `epoch`."""
        levels: list[int] = []
        for slot in range(SLOTS):
            base = slot * _SLOT
            if _HEADER.unpack_from(self._map, base)[0] == 0:
                break
            published, level = _BUDGET.unpack_from(self._map, base + _BUDGET_AT)
            if published == epoch:
                levels.append(level)
        return levels

    def ranks(self) -> set[int]:
        """The ranks in this exchange whose processes are alive."""
        ranks: set[int] = set()
        for slot in range(SLOTS):
            rank, pid, *_ = _HEADER.unpack_from(self._map, slot * _SLOT)
            if rank == 0:
                break
            if os.path.exists(f"/proc/{pid}"):
                ranks.add(rank - 1)
        return ranks

    def requested_stacks(self) -> int:
        """The number of the launcher's latest request for stacks; 0: none yet."""
        data = os.pread(self._file, _NUMBER.size, _REQUEST_AT)
        return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else 0

    def _write_entry(self, number: int, key: bytes, root: bytes, flags: int) -> None:
        offset = self._base + _RING_AT + (number % RING) * _ENTRY.size
        _ENTRY.pack_into(self._map, offset, key, root, flags, _checksum(key, root, flags))

    def new_entries(self) -> Iterable[Entry]:
        """Entries of other ranks since the last call; entries that the ring has overwritten are skipped."""
        known = len(self._read_counts)
        # Rank and pid of the first slot that was free.
        while known < SLOTS and self._words[known * _SLOT_WORDS]:
            self._read_counts.append(0)
            known += 1
        counts = self._counts[:known].tolist()
        # Nearly every call: ranks reach the same events at about the same time.
        return () if counts == self._read_counts else self._read_new(counts)

    def _read_new(self, counts: list[int]) -> Iterator[Entry]:
        for slot, count in enumerate(counts):
            if count == self._read_counts[slot]:
                continue
            if slot == self._slot:
                self._read_counts[slot] = count
                continue
            rank = _HEADER.unpack_from(self._map, slot * _SLOT)[0]
            first = max(self._read_counts[slot] if count > self._read_counts[slot] else 0, count - RING)
            self._read_counts[slot] = count
            for number in range(first, count):
                entry = self._read(slot, rank - 1, number)
                if entry is not None:
                    yield entry

    def _read(self, slot: int, rank: int, number: int) -> Entry | None:
        offset = slot * _SLOT + _RING_AT + (number % RING) * _ENTRY.size
        key, root, flags, check = _ENTRY.unpack_from(self._map, offset)
        if check != _checksum(key, root, flags):
            return None
        return Entry(rank, slot, key, root, bool(flags & CAPTURED))

    def leaves_of(self, slot: int, key: bytes) -> list[bytes] | None:
        """The leaves of the latest entry in `slot`; None if that entry has another key."""
        base = slot * _SLOT
        current, count = _KEY.unpack_from(self._map, base + _KEY_AT)
        if current != key:
            return None
        offset = base + _LEAVES_AT
        data = self._map[offset : offset + count * LEAF]
        current = self._map[base + _KEY_AT : base + _KEY_AT + 8]
        if current != key:
            return None
        return [data[i : i + LEAF] for i in range(0, len(data), LEAF)]

    def remove_if_abandoned(self) -> None:
        """Remove the file if its launcher was killed: it holds a lock while it exists. Open views stay usable."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self.path.unlink(missing_ok=True)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._counts.release()
        self._words.release()
        self._map.close()
        os.close(self._file)


_held: dict[tuple[int, Path], ShmExchange] = {}


def own_slot(path: Path, rank: int) -> ShmExchange:
    """The slot of this process, held until the process ends, for all process groups that it creates.

    There is only one view per process: closing any descriptor of the file releases all locks of the process.
    """
    # A forked child inherits the views of its parent, but not the locks.
    key = (os.getpid(), path)
    if key in _held:
        _held[key].restart(rank)
    else:
        _held[key] = ShmExchange(path, rank)
    return _held[key]


def join_exchange(config: Config, rank: int) -> ShmExchange:
    """The slot of this rank in the exchange of its launcher, or in one in the run folder where that cannot be used:
    a container may have a /dev/shm of its own, or one that is too small."""
    try:
        return own_slot(Path(config.exchange_file), rank)
    except OSError:
        same_machine = bool(config.launcher_boot) and boot_id() == config.launcher_boot
        if not same_machine or not is_on_this_machine(Path(config.run_dir)):
            raise
    path = exchange_in(config.run_dir, config.exchange_file)
    # Complete as soon as it has its name: other ranks may open it at the same time.
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:12]}")
    create_exchange(temporary)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return own_slot(path, rank)


def write_errors(path: Path) -> list[RankWriteError]:
    """Write errors of the ranks, read by the launcher."""
    errors: list[RankWriteError] = []
    with path.open("rb") as file:
        for slot in range(SLOTS):
            file.seek(slot * _SLOT)
            rank, pid, _, _, _, error = _HEADER.unpack(file.read(_HEADER.size))
            text = error.rstrip(b"\0").decode(errors="replace")
            if rank and text:
                errors.append(RankWriteError(rank - 1, pid, text))
    return errors


def heartbeats(path: Path) -> dict[tuple[int, int], Heartbeat]:
    """Heartbeats by rank and process id, read by the launcher. In two containers, process ids may be equal."""
    beats: dict[tuple[int, int], Heartbeat] = {}
    with path.open("rb") as file:
        for slot in range(SLOTS):
            file.seek(slot * _SLOT)
            data = file.read(_RING_AT)
            rank, pid, *_ = _HEADER.unpack_from(data)
            if not rank:
                break
            threads = frozenset(_OWN_THREADS.unpack_from(data, _OWN_THREADS_AT))
            beats[rank - 1, pid] = Heartbeat(_NUMBER.unpack_from(data, _BEAT_AT)[0], threads - {0})
    return beats


def request_stacks(path: Path, number: int) -> None:
    """Request a stack dump from all ranks of this node."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, _NUMBER.pack(number), _REQUEST_AT)
    finally:
        os.close(descriptor)


def _checksum(key: bytes, root: bytes, flags: int) -> int:
    return zlib.crc32(key + root) ^ flags
