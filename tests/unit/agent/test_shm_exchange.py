"""Ranks of one node read each other's digests, also when ranks start, exit or overtake each other."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.agent import shm_exchange
from ddpcheck.agent.shm_exchange import (
    LEAF,
    MOST_LEAVES,
    RING,
    Heartbeat,
    RankWriteError,
    ShmExchange,
    create_exchange,
    heartbeats,
    own_slot,
    request_stacks,
    write_errors,
)

# CPython 3.12 and later warn of forks in a process with threads. Forks are used because they are fast.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ROOT = b"r" * 16
OTHER = b"o" * 16
# Two leaves of LEAF bytes each.
LEAVES = b"12345678abcdefgh"


def key(number: int) -> bytes:
    return (number + 1).to_bytes(8, "big")


def serve(path: Path, rank: int, line: Connection) -> None:
    """The process of a rank: calls the methods of its exchange that it receives through the pipe."""
    try:
        exchange = ShmExchange(path, rank)
        line.send(exchange._slot)
    except OSError as error:
        line.send(error)
        os._exit(1)
    while True:
        name, arguments = line.recv()
        if name == "die":
            os._exit(0)
        result = getattr(exchange, name)(*arguments)
        line.send(list(result) if name == "new_entries" else result)


class Rank:
    """A process with its own view of the exchange: locks belong to processes, so ranks cannot share one."""

    def __init__(self, path: Path, rank: int) -> None:
        self._line, other_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=serve, args=(path, rank, other_end), daemon=True)
        self.process.start()
        other_end.close()
        answer = self._line.recv()
        if isinstance(answer, OSError):
            self.process.join(60)
            raise answer
        self.slot = answer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._line.send((name, arguments))
            return self._line.recv()

        return call

    def die(self) -> None:
        if self.process.is_alive():
            self._line.send(("die", ()))
        self.process.join(60)
        assert self.process.exitcode == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_exchange(tmp_path / "exchange")
    return tmp_path / "exchange"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[[int], Rank]]:
    ranks: list[Rank] = []

    def start(number: int) -> Rank:
        ranks.append(Rank(path, number))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.die()


def test_exchange_file_is_private_and_small(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 <= 8192
    with pytest.raises(FileExistsError):
        create_exchange(path)


def test_entries_of_other_ranks_are_returned_once(start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    for number, rank in enumerate(ranks):
        assert rank.publish(key(0), ROOT if number else OTHER, LEAVES) == 0
    for number, rank in enumerate(ranks):
        roots = {entry.rank: entry.root for entry in rank.new_entries()}
        assert roots == {other: ROOT if other else OTHER for other in range(3) if other != number}
        assert rank.new_entries() == []
    ranks[2].publish(key(1), ROOT, LEAVES)
    assert [(entry.rank, entry.key) for entry in ranks[0].new_entries()] == [(2, key(1))]


def test_leaves_belong_to_the_latest_entry(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    one.publish(key(0), ROOT, b"01234567" + LEAVES)
    assert two.leaves_of(one.slot, key(0)) == [b"01234567", b"12345678", b"abcdefgh"]
    one.publish(key(1), ROOT, LEAVES)
    assert two.leaves_of(one.slot, key(0)) is None
    assert two.leaves_of(one.slot, key(1)) == [b"12345678", b"abcdefgh"]
    assert two.leaves_of(one.slot, key(2)) is None


def test_too_many_parameters_publish_only_the_root(
    start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_exchange, "MOST_LEAVES", 1)
    one, two = start(0), start(1)
    one.publish(key(0), ROOT, LEAVES)
    assert [entry.root for entry in two.new_entries()] == [ROOT]
    assert two.leaves_of(one.slot, key(0)) is None


def test_as_many_leaves_as_there_is_room_for(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    leaves = b"".join(number.to_bytes(LEAF, "big") for number in range(MOST_LEAVES))
    one.publish(key(0), ROOT, leaves)
    assert two.leaves_of(one.slot, key(0)) == [number.to_bytes(LEAF, "big") for number in range(MOST_LEAVES)]
    # The next slot begins directly after the last leaf.
    two.publish(key(0), OTHER, LEAVES)
    assert [entry.root for entry in one.new_entries()] == [OTHER]


def test_captured_flag_is_visible_to_late_readers(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    number = one.publish(key(0), ROOT, LEAVES)
    one.publish(key(1), ROOT, LEAVES)
    one.mark_captured(number, key(0), ROOT)
    assert [(entry.key, entry.captured) for entry in two.new_entries()] == [(key(0), True), (key(1), False)]


def test_overwritten_entry_is_not_marked_as_captured(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    for number in range(RING + 1):
        one.publish(key(number), ROOT, LEAVES)
    one.mark_captured(0, key(0), ROOT)
    assert [entry.key for entry in two.new_entries()] == [key(number) for number in range(1, RING + 1)]


def test_full_ring_overwrites_the_oldest_entries(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    for number in range(3 * RING + 5):
        one.publish(key(number), ROOT, LEAVES)
    assert [entry.key for entry in two.new_entries()] == [
        key(number) for number in range(2 * RING + 5, 3 * RING + 5)
    ]
    one.publish(key(999), ROOT, LEAVES)
    assert [entry.key for entry in two.new_entries()] == [key(999)]


@pytest.mark.parametrize("byte_index", [0, 8, 23, 24, 28])
def test_entry_with_wrong_checksum_is_ignored(
    path: Path, start: Callable[[int], Rank], byte_index: int
) -> None:
    one, two = start(0), start(1)
    one.publish(key(0), ROOT, LEAVES)
    one.publish(key(1), ROOT, LEAVES)
    with path.open("r+b") as file:
        offset = one.slot * shm_exchange._SLOT + shm_exchange._RING_AT + byte_index
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes((byte ^ 0x40,)))
    assert [entry.key for entry in two.new_entries()] == [key(1)]


def test_slot_of_a_dead_rank_is_reused(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    for number in range(10):
        two.publish(key(number), OTHER, LEAVES)
    assert len(one.new_entries()) == 10
    two.die()
    successor = start(5)
    assert successor.slot == two.slot
    assert one.new_entries() == []
    assert one.leaves_of(successor.slot, key(9)) is None
    successor.publish(key(77), ROOT, LEAVES)
    assert [(entry.rank, entry.key) for entry in one.new_entries()] == [(5, key(77))]


def test_last_entry_of_a_dead_rank_stays_readable(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    two.publish(key(0), OTHER, LEAVES)
    two.die()
    assert [entry.root for entry in one.new_entries()] == [OTHER]
    assert one.leaves_of(two.slot, key(0)) == [b"12345678", b"abcdefgh"]


def test_error_when_all_slots_are_taken(
    path: Path, start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_exchange, "SLOTS", 2)
    first, _ = start(0), start(1)
    with pytest.raises(OSError, match="all 2 slots"):
        start(2)
    first.die()
    assert start(2).slot == 0


def test_write_errors_are_read_by_the_launcher(path: Path, start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    assert write_errors(path) == []
    ranks[2].report_write_error("No space left on device (/x)")
    ranks[1].report_write_error("ü" * 200)
    truncated, complete = write_errors(path)
    assert complete == RankWriteError(2, ranks[2].process.pid, "No space left on device (/x)")
    assert (truncated.rank, truncated.pid) == (1, ranks[1].process.pid)
    assert truncated.text.startswith("ü" * 50)


def test_write_error_of_a_dead_rank_is_kept(
    path: Path, start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next rank takes another slot. The error is overwritten only if no other slot is free."""
    monkeypatch.setattr(shm_exchange, "SLOTS", 2)
    first = start(0)
    first.report_write_error("full")
    first.die()
    second = start(0)
    assert second.slot == 1
    assert [(error.pid, error.text) for error in write_errors(path)] == [(first.process.pid, "full")]
    assert start(1).slot == 0
    assert write_errors(path) == []


def test_failed_open_leaks_no_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm_exchange.os, "posix_fallocate", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        ShmExchange(path, 0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_full_tmpfs_raises_oserror_instead_of_sigbus(tmp_path: Path) -> None:
    """Access to a mapping without allocated space would raise SIGBUS."""
    folder = tmp_path / "full"
    folder.mkdir()
    size = int(2.5 * shm_exchange._SLOT)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a tmpfs")
    ranks: list[Rank] = []
    try:
        create_exchange(folder / "exchange")
        ranks = [Rank(folder / "exchange", 0), Rank(folder / "exchange", 1)]
        with pytest.raises(OSError, match="No space"):
            Rank(folder / "exchange", 2)
        for number in range(2 * RING):
            for rank in ranks:
                rank.publish(key(number), ROOT, b"x" * LEAF * MOST_LEAVES)
        for rank in ranks:
            assert len(rank.new_entries()) == RING
            rank.report_write_error("full")
        assert [(error.rank, error.text) for error in write_errors(folder / "exchange")] == [
            (0, "full"),
            (1, "full"),
        ]
    finally:
        for rank in ranks:
            rank.die()
        subprocess.run(["umount", folder], check=True)


def test_heartbeats_are_read_by_the_launcher(path: Path, start: Callable[[int], Rank]) -> None:
    assert heartbeats(path) == {}
    one, two = start(0), start(1)
    one.beat(7)
    two.publish_threads([11, 12])
    for number in range(RING + 1):
        two.publish(key(number), ROOT, LEAVES)
    assert heartbeats(path) == {
        (0, one.process.pid): Heartbeat(7),
        (1, two.process.pid): Heartbeat(0, frozenset({11, 12})),
    }


def test_budget_levels_of_all_ranks_are_read(path: Path, start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    for number, rank in enumerate(ranks):
        rank.publish_budget_level(1, 2 * number)
    # The own level is among them.
    assert [rank.budget_levels(1) for rank in ranks] == [[0, 2, 4]] * 3
    assert ranks[0].budget_levels(2) == []


def test_budget_level_of_another_epoch_does_not_count(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    one.publish_budget_level(1, 3)
    assert two.budget_levels(1) == [3]
    one.publish_budget_level(2, 5)
    two.publish_budget_level(1, 4)
    assert one.budget_levels(1) == [4]
    assert one.budget_levels(2) == [5]


def test_budget_level_leaves_the_rest_of_the_slot_as_it_is(path: Path, start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    one.beat(7)
    one.publish_threads([11, 12, 13, 14])
    one.report_write_error("full")
    one.publish_budget_level(2**32 - 1, 2**32 - 1)
    for number in range(RING):
        one.publish(key(number), ROOT, LEAVES)
    assert two.budget_levels(2**32 - 1) == [2**32 - 1]
    assert heartbeats(path)[0, one.process.pid] == Heartbeat(7, frozenset({11, 12, 13, 14}))
    assert [error.text for error in write_errors(path)] == ["full"]
    assert len(two.new_entries()) == RING


def test_budget_level_is_cleared_by_the_next_rank_in_the_slot(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    two.publish_budget_level(1, 3)
    two.die()
    assert one.budget_levels(1) == [3]
    assert start(1).slot == two.slot
    assert one.budget_levels(1) == []


def test_stack_request_reaches_every_rank(path: Path, start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    assert [rank.requested_stacks() for rank in ranks] == [0, 0, 0]
    request_stacks(path, 5)
    assert [rank.requested_stacks() for rank in ranks] == [5, 5, 5]
    ranks[0].publish(key(0), ROOT, LEAVES)
    assert ranks[1].requested_stacks() == 5
    assert [entry.rank for entry in ranks[1].new_entries()] == [0]


def test_process_keeps_its_slot_over_several_process_groups(
    path: Path, start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing any descriptor of the file, for example of an unused view, would release all locks."""
    monkeypatch.setattr(shm_exchange, "_held", {})
    slots = set()
    for rank in (0, 1, 0):
        view = own_slot(path, rank)
        slots.add(view._slot)
        view.publish(key(rank), ROOT, LEAVES)
        del view
        gc.collect()
    assert sum(each.resolve() == path for each in Path("/proc/self/fd").iterdir()) == 2
    assert slots == {0}
    other = start(1)
    assert other.slot == 1
    assert [(entry.rank, entry.key) for entry in other.new_entries()] == [(0, key(0))]


def test_write_error_survives_a_new_process_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_exchange, "_held", {})
    own_slot(path, 3).report_write_error("No space left on device")
    own_slot(path, 3)
    assert write_errors(path) == [RankWriteError(3, os.getpid(), "No space left on device")]


def test_forked_child_gets_its_own_slot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_exchange, "_held", {})
    parent = own_slot(path, 0)
    child = os.fork()
    if not child:
        os._exit(own_slot(path, 1)._slot)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert parent._slot == 0


def test_the_file_of_a_killed_launcher_is_removed_by_a_rank(path: Path, start: Callable[[int], Rank]) -> None:
    ranks = [start(0), start(1)]
    with path.open("rb") as launcher:
        fcntl.flock(launcher, fcntl.LOCK_SH)
        ranks[0].remove_if_abandoned()
        assert path.exists()
    ranks[0].remove_if_abandoned()
    assert not path.exists()
    ranks[1].remove_if_abandoned()
    # Views that are open stay usable.
    ranks[0].publish(key(0), ROOT, LEAVES)
    assert [entry.root for entry in ranks[1].new_entries()] == [ROOT]
