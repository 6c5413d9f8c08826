"""Notices that the ranks of a job wait for each other for ever, and writes down where each one stands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddpcheck.agent.board import ask, beats
from ddpcheck.analysis.attempt import Attempt, Rank
from ddpcheck.analysis.run import Run
from ddpcheck.config import Config
from ddpcheck.launcher.activity import Activity, read_activity
from ddpcheck.launcher.node_log import NodeLog
from ddpcheck.launcher.process_table import Process, all_processes, descendants, read_process
from ddpcheck.launcher.stillness import Sighting, State, state_of
from ddpcheck.launcher.supervise import StopRequest

# Time for answers beyond what a rank takes to hear the question.
_ANSWER_SECONDS = 2.0
# A launcher that has not come round for this long was stopped itself, most often with its job.
_AWAY_SECONDS = 5.0
# Probes without which a rank cannot be asked.
_SPEAKERS = ("agent", "standing")

Look = dict[int, Sighting]


@dataclass
class _Vigil:
    """What is known of one attempt since its last sign of progress."""

    signs: object = None
    since: float = 0.0
    # The question under way, and when it was put.
    asked: int = 0
    asked_at: float = 0.0
    look: Look = field(default_factory=dict)
    due: float = 0.0
    states: dict[int, State] = field(default_factory=dict)
    told_slow: bool = False
    vouched: bool = False


class HangWatch:
    """Called at every turn of the supervisor; does nothing in most of them.

    A quiet job is looked at every half of the timeout: what has not moved between two looks in a row, after
    the whole of it, hangs. Every launcher speaks for the ranks on its own board; a job that spans several
    hangs when all of its ranks are spoken for.
    """

    def __init__(
        self, run: Run, node_log: NodeLog, config: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._node_log = node_log
        self._board = Path(config.board)
        self._timeout = config.hang_timeout
        self._patience = 2 * config.listen_seconds + _ANSWER_SECONDS
        self._pause = min(1.0, config.hang_timeout / 20)
        self._clock = clock
        self._turned = clock()
        self._questions = 0
        self._vigils: dict[str, _Vigil] = {}
        self._over = False

    def tick(self) -> StopRequest | None:
        now = self._clock()
        if self._over or now - self._turned < self._pause:
            return None
        if now - self._turned > self._pause + _AWAY_SECONDS:
            self._vigils.clear()
        self._turned = now
        signs = beats(self._board)
        for attempt in self._run.attempts.values():
            if self._hangs(attempt, signs, now):
                self._over = True
                return StopRequest(f"ranks wait for each other since {self._timeout:g} seconds or more")
        return None

    def _hangs(self, attempt: Attempt, signs: dict[int, int], now: float) -> bool:
        mine = {n: rank for n, rank in attempt.ranks.items() if self._is_mine(rank, signs)}
        alive = {n: rank for n, rank in mine.items() if not _is_over(rank)}
        vigil = self._vigils.setdefault(attempt.session, _Vigil(since=now))
        progress = (sorted(attempt.ranks), sorted(alive), [signs[r.header.pid] for r in alive.values()])
        if not alive or progress != vigil.signs or any(map(_is_stopped, alive.values())):
            self._withdraw(attempt, vigil)
            self._vigils[attempt.session] = _Vigil(progress, now, due=now + self._timeout / 2)
            return False
        if vigil.asked:
            if now - vigil.asked_at > self._patience or all(_answered(r, vigil) for r in alive.values()):
                self._take_look(attempt, vigil, mine, alive, now)
        elif now >= vigil.due:
            self._ask(vigil, now)
        return bool(vigil.states) and self._told_by_all(attempt, vigil, mine)

    def _is_mine(self, rank: Rank, signs: dict[int, int]) -> bool:
        return rank.header.host == self._node_log.host and rank.header.pid in signs

    def _ask(self, vigil: _Vigil, now: float) -> None:
        self._questions += 1
        ask(self._board, self._questions)
        vigil.asked, vigil.asked_at = self._questions, now

    def _take_look(
        self, attempt: Attempt, vigil: _Vigil, mine: dict[int, Rank], alive: dict[int, Rank], now: float
    ) -> None:
        """All have answered, or had the time to: compare with the look before."""
        before, vigil.look = vigil.look, _look(mine, alive, vigil, now)
        vigil.asked, vigil.due = 0, vigil.asked_at + self._timeout / 2
        if not before or now - vigil.since < self._timeout:
            return
        states = {
            n: State.UNKNOWN if _is_mute(rank) else state_of(before[n], vigil.look[n], rank.header.backend)
            for n, rank in mine.items()
        }
        stuck = State.WAITS in states.values() and not {State.BUSY, State.UNKNOWN} & set(states.values())
        vigil.states = states if stuck else {}
        if not stuck:
            self._withdraw(attempt, vigil)
            self._tell_slow(attempt, vigil, states, now)

    def _tell_slow(self, attempt: Attempt, vigil: _Vigil, states: dict[int, State], now: float) -> None:
        if not vigil.told_slow:
            vigil.told_slow = True
            told = {str(n): state.value for n, state in states.items()}
            seconds = round(now - vigil.since, 1)
            self._node_log.write("slow", session=attempt.session, seconds=seconds, ranks=told)

    def _told_by_all(self, attempt: Attempt, vigil: _Vigil, mine: dict[int, Rank]) -> bool:
        """Whether every rank is known to be stuck, by this launcher's word or by another's."""
        if not vigil.vouched:
            vigil.vouched = True
            self._vouch(attempt, sorted(mine))
        known = set(mine)
        if known != set(range(attempt.world_size)):
            known |= _vouched_for(self._run.path, attempt.session)
        if known != set(range(attempt.world_size)):
            return False
        self._node_log.write(
            "hang",
            session=attempt.session,
            seconds=round(self._clock() - vigil.since, 1),
            ranks={
                str(n): {"state": state.value, **_seen(vigil.look[n])} for n, state in vigil.states.items()
            },
        )
        return True

    def _withdraw(self, attempt: Attempt, vigil: _Vigil) -> None:
        if vigil.vouched:
            vigil.vouched = False
            self._vouch(attempt, [])

    def _vouch(self, attempt: Attempt, ranks: list[int]) -> None:
        self._node_log.write("standstill", session=attempt.session, pid=os.getpid(), ranks=ranks)


def _look(mine: dict[int, Rank], alive: dict[int, Rank], vigil: _Vigil, now: float) -> Look:
    table = all_processes()
    return {n: _sight(rank, n in alive, vigil, now, table) for n, rank in mine.items()}


def _sight(rank: Rank, alive: bool, vigil: _Vigil, now: float, table: list[Process]) -> Sighting:
    if not alive:
        return Sighting(now, rank.standing, left=True)
    standing = rank.standing if _answered(rank, vigil) else None
    pid = rank.header.pid
    # One that could not answer now may have said earlier which of its threads are whose.
    known = rank.standing
    activity = read_activity(
        pid,
        known.thread if known is not None else pid,
        known.own if known is not None else (),
        descendants(pid, among=table),
    )
    return Sighting(now, standing, activity)


def _seen(sighting: Sighting) -> dict[str, str]:
    activity: Activity | None = sighting.activity
    return {"sleeps_in": activity.sleeps_in} if activity is not None and activity.sleeps_in else {}


def _answered(rank: Rank, vigil: _Vigil) -> bool:
    return rank.standing is not None and rank.standing.look == vigil.asked


def _is_mute(rank: Rank) -> bool:
    """Whether the part of ddpcheck that would answer has failed in there."""
    return any(fault.probe in _SPEAKERS for fault in rank.faults)


def _is_over(rank: Rank) -> bool:
    """Said goodbye, or is gone without."""
    if rank.end is not None:
        return True
    process = read_process(rank.header.pid)
    return process is None or process.is_gone or process.started != (rank.header.ticks or process.started)


def _is_stopped(rank: Rank) -> bool:
    """By Ctrl-Z or by a debugger: that time does not count."""
    process = read_process(rank.header.pid)
    return process is not None and process.state in {"T", "t"}


def _vouched_for(folder: Path, session: str) -> set[int]:
    """The ranks that launchers, this one too, last said to be stuck."""
    last: dict[tuple[str, int], list[int]] = {}
    for path in folder.glob("node-*.jsonl"):
        for line in path.read_bytes().splitlines():
            if b'"standstill"' not in line:
                continue
            try:
                match json.loads(line):
                    case {"session": str(of), "pid": int(pid), "ranks": list(ranks)} if of == session:
                        last[path.name, pid] = ranks
            except ValueError:
                continue
    return {rank for ranks in last.values() for rank in ranks if isinstance(rank, int)}
