"""The board: ranks of one node see each other's digests, however they come, go and overtake each other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.agent import shm_exchange as board_module
from ddpcheck.agent.shm_exchange import (
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

# CPython warns of forks in a process with threads from 3.12 on; a fork is the quick way to another process.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ROOT = b"r" * 16
OTHER = b"o" * 16
LEAVES = [b"12345678", b"abcdefgh"]


def key(number: int) -> bytes:
    return (number + 1).to_bytes(8, "big")


def serve(path: Path, rank: int, line: Connection) -> None:
    """A rank: does on its board what it is told."""
    try:
        board = ShmExchange(path, rank)
        line.send(board._slot)
    except OSError as error:
        line.send(error)
        os._exit(1)
    while True:
        name, arguments = line.recv()
        if name == "die":
            os._exit(0)
        result = getattr(board, name)(*arguments)
        line.send(list(result) if name == "new_entries" else result)


class Rank:
    """Another process with a board. Locks belong to processes, so ranks cannot share one."""

    def __init__(self, path: Path, rank: int) -> None:
        self._line, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=serve, args=(path, rank, theirs), daemon=True)
        self.process.start()
        theirs.close()
        answer = self._line.recv()
        if isinstance(answer, OSError):
            self.process.join(10)
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
        self.process.join(10)
        assert self.process.exitcode == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_exchange(tmp_path / "board")
    return tmp_path / "board"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[[int], Rank]]:
    ranks: list[Rank] = []

    def start(number: int) -> Rank:
        ranks.append(Rank(path, number))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.die()


def test_a_board_is_the_users_alone_and_costs_next_to_nothing(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 <= 8192
    with pytest.raises(FileExistsError):
        create_exchange(path)


def test_three_ranks_see_what_the_others_say_once(start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    for number, rank in enumerate(ranks):
        assert rank.publish(key(0), ROOT if number else OTHER, LEAVES) == 0
    for number, rank in enumerate(ranks):
        seen = {entry.rank: entry.root for entry in rank.new_entries()}
        assert seen == {other: ROOT if other else OTHER for other in range(3) if other != number}
        assert rank.new_entries() == []
    ranks[2].publish(key(1), ROOT, LEAVES)
    assert [(entry.rank, entry.key) for entry in ranks[0].new_entries()] == [(2, key(1))]


def test_leaves_are_those_of_the_latest_entry(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    one.publish(key(0), ROOT, [b"0123456789abcdef", *LEAVES])
    assert two.leaves_of(one.slot, key(0)) == [b"01234567", *LEAVES]
    one.publish(key(1), ROOT, LEAVES)
    assert two.leaves_of(one.slot, key(0)) is None
    assert two.leaves_of(one.slot, key(1)) == LEAVES
    assert two.leaves_of(one.slot, key(2)) is None


def test_a_model_with_too_many_parameters_shows_its_root_only(
    start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "MOST_LEAVES", 1)
    one, two = start(0), start(1)
    one.publish(key(0), ROOT, LEAVES)
    assert [entry.root for entry in two.new_entries()] == [ROOT]
    assert two.leaves_of(one.slot, key(0)) is None


def test_who_comes_late_sees_that_values_were_kept(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    number = one.publish(key(0), ROOT, LEAVES)
    one.publish(key(1), ROOT, LEAVES)
    one.mark_captured(number, key(0), ROOT)
    assert [(entry.key, entry.captured) for entry in two.new_entries()] == [(key(0), True), (key(1), False)]


def test_an_entry_that_has_left_the_ring_is_not_marked(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    for number in range(RING + 1):
        one.publish(key(number), ROOT, LEAVES)
    one.mark_captured(0, key(0), ROOT)
    assert [entry.key for entry in two.new_entries()] == [key(number) for number in range(1, RING + 1)]


def test_a_ring_that_ran_over_has_lost_its_oldest(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    for number in range(3 * RING + 5):
        one.publish(key(number), ROOT, LEAVES)
    assert [entry.key for entry in two.new_entries()] == [
        key(number) for number in range(2 * RING + 5, 3 * RING + 5)
    ]
    one.publish(key(999), ROOT, LEAVES)
    assert [entry.key for entry in two.new_entries()] == [key(999)]


@pytest.mark.parametrize("at", [0, 8, 23, 24, 28])
def test_a_torn_entry_is_as_if_it_were_not_there(path: Path, start: Callable[[int], Rank], at: int) -> None:
    one, two = start(0), start(1)
    one.publish(key(0), ROOT, LEAVES)
    one.publish(key(1), ROOT, LEAVES)
    with path.open("r+b") as file:
        place = one.slot * board_module._SLOT + board_module._RING_AT + at
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes((byte ^ 0x40,)))
    assert [entry.key for entry in two.new_entries()] == [key(1)]


def test_the_place_of_a_dead_rank_is_taken_again(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    for number in range(10):
        two.publish(key(number), OTHER, LEAVES)
    assert len(one.new_entries()) == 10
    two.die()
    again = start(5)
    assert again.slot == two.slot
    assert one.new_entries() == []
    assert one.leaves_of(again.slot, key(9)) is None
    again.publish(key(77), ROOT, LEAVES)
    assert [(entry.rank, entry.key) for entry in one.new_entries()] == [(5, key(77))]


def test_what_a_dead_rank_said_last_can_still_be_read(start: Callable[[int], Rank]) -> None:
    one, two = start(0), start(1)
    two.publish(key(0), OTHER, LEAVES)
    two.die()
    assert [entry.root for entry in one.new_entries()] == [OTHER]
    assert one.leaves_of(two.slot, key(0)) == LEAVES


def test_when_all_places_are_taken_the_next_rank_does_without(
    path: Path, start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "SLOTS", 2)
    first, _ = start(0), start(1)
    with pytest.raises(OSError, match="all 2 places"):
        start(2)
    first.die()
    assert start(2).slot == 0


def test_a_rank_that_cannot_write_says_so(path: Path, start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    assert write_errors(path) == []
    ranks[2].report_write_error("No space left on device (/x)")
    ranks[1].report_write_error("ü" * 200)
    cut, whole = write_errors(path)
    assert whole == RankWriteError(2, ranks[2].process.pid, "No space left on device (/x)")
    assert (cut.rank, cut.pid) == (1, ranks[1].process.pid)
    assert cut.text.startswith("ü" * 50)


def test_what_a_dead_rank_could_not_write_outlives_it(
    path: Path, start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt takes another place; only when there is none left is it overwritten."""
    monkeypatch.setattr(board_module, "SLOTS", 2)
    first = start(0)
    first.report_write_error("full")
    first.die()
    second = start(0)
    assert second.slot == 1
    assert [(told.pid, told.text) for told in write_errors(path)] == [(first.process.pid, "full")]
    assert start(1).slot == 0
    assert write_errors(path) == []


def test_a_board_that_cannot_be_opened_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board_module.os, "posix_fallocate", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        ShmExchange(path, 0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_full_memory_disk_kills_nobody(tmp_path: Path) -> None:
    """An access to a mapping without space behind it would be answered with SIGBUS."""
    place = tmp_path / "full"
    place.mkdir()
    room = int(2.5 * board_module._SLOT)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room}", "none", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small memory disk")
    ranks: list[Rank] = []
    try:
        create_exchange(place / "board")
        ranks = [Rank(place / "board", 0), Rank(place / "board", 1)]
        with pytest.raises(OSError, match="No space"):
            Rank(place / "board", 2)
        for number in range(2 * RING):
            for rank in ranks:
                rank.publish(key(number), ROOT, [b"x" * 8] * board_module.MOST_LEAVES)
        for rank in ranks:
            assert len(rank.new_entries()) == RING
            rank.report_write_error("full")
        assert [(told.rank, told.text) for told in write_errors(place / "board")] == [
            (0, "full"),
            (1, "full"),
        ]
    finally:
        for rank in ranks:
            rank.die()
        subprocess.run(["umount", place], check=True)


def test_the_launcher_sees_signs_of_progress(path: Path, start: Callable[[int], Rank]) -> None:
    assert heartbeats(path) == {}
    one, two = start(0), start(1)
    one.beat(7)
    two.publish_threads([11, 12])
    for number in range(RING + 1):
        two.publish(key(number), ROOT, LEAVES)
    assert heartbeats(path) == {
        one.process.pid: Heartbeat(7),
        two.process.pid: Heartbeat(0, frozenset({11, 12})),
    }


def test_a_question_reaches_every_rank(path: Path, start: Callable[[int], Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    assert [rank.requested_stacks() for rank in ranks] == [0, 0, 0]
    request_stacks(path, 5)
    assert [rank.requested_stacks() for rank in ranks] == [5, 5, 5]
    ranks[0].publish(key(0), ROOT, LEAVES)
    assert ranks[1].requested_stacks() == 5
    assert [entry.rank for entry in ranks[1].new_entries()] == [0]


def test_a_process_has_one_place_however_often_it_is_a_rank(
    path: Path, start: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks go with the first descriptor that is closed: of a view that nobody needs any more, for example."""
    monkeypatch.setattr(board_module, "_held", {})
    slots = set()
    for rank in (0, 1, 0):
        board = own_slot(path, rank)
        slots.add(board._slot)
        board.publish(key(rank), ROOT, LEAVES)
        del board
        gc.collect()
    assert sum(each.resolve() == path for each in Path("/proc/self/fd").iterdir()) == 2
    assert slots == {0}
    other = start(1)
    assert other.slot == 1
    assert [(entry.rank, entry.key) for entry in other.new_entries()] == [(0, key(0))]


def test_what_could_not_be_written_is_told_when_the_group_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "_held", {})
    own_slot(path, 3).report_write_error("No space left on device")
    own_slot(path, 3)
    assert write_errors(path) == [RankWriteError(3, os.getpid(), "No space left on device")]


def test_a_forked_child_that_becomes_a_rank_has_a_place_of_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "_held", {})
    mine = own_slot(path, 0)
    child = os.fork()
    if not child:
        os._exit(own_slot(path, 1)._slot)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert mine._slot == 0
