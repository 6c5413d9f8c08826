"""Notices that the ranks of a job wait for each other for ever, and writes down where each one stands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpcheck.agent.shm_exchange import Heartbeat, ask, signs
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.launcher.hang.classifier import ActivitySample, RankActivityState, state_of
from ddpcheck.launcher.process.process_table import (
    Process,
    all_processes,
    descendants,
    read_activity,
    read_process,
)
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.records.node_log import NodeLog, node_lines

# Probes without which a rank cannot be asked.
_SPEAKERS = ("agent", "standing")


@dataclass(frozen=True)
class LocalRank:
    """One rank of an attempt, and what its process shows."""

    rank: RankData
    sign: Heartbeat
    process: Process | None

    @property
    def is_over(self) -> bool:
        """Said goodbye, or is gone without."""
        header, process = self.rank.header, self.process
        if self.rank.end is not None or process is None or process.is_gone:
            return True
        return bool(header.ticks) and process.started != header.ticks

    @property
    def is_stopped(self) -> bool:
        """By Ctrl-Z or by a debugger."""
        return self.process is not None and self.process.state in {"T", "t"}

    @property
    def is_mute(self) -> bool:
        """Whether the part of ddpcheck that would answer has failed in there."""
        return any(fault.probe in _SPEAKERS for fault in self.rank.faults)

    def has_answered(self, question: int) -> bool:
        return self.rank.stack is not None and self.rank.stack.look == question


def members_of(attempt: Attempt, host: str, signs: Mapping[int, Heartbeat]) -> dict[int, LocalRank]:
    """By rank. A launcher on the same host may have others, on a board of its own."""
    return {
        number: LocalRank(rank, signs[rank.header.pid], read_process(rank.header.pid))
        for number, rank in attempt.ranks.items()
        if rank.header.host == host and rank.header.pid in signs
    }


def sight_all(members: Mapping[int, LocalRank], question: int, now: float) -> dict[int, ActivitySample]:
    """One look at every rank, after it has answered `question` or had the time to."""
    table = all_processes()
    return {number: _sight(member, question, now, table) for number, member in members.items()}


def _sight(member: LocalRank, question: int, now: float, table: list[Process]) -> ActivitySample:
    said, pid = member.rank.stack, member.rank.header.pid
    if member.is_over:
        return ActivitySample(now, said, left=True)
    # One that does not answer may have told earlier which thread trains; most often it is the first.
    thread = said.thread if said is not None and said.thread else pid
    activity = read_activity(pid, thread, member.sign.own_threads, descendants(pid, among=table))
    return ActivitySample(now, said if member.has_answered(question) else None, activity)


# Time for answers beyond what a rank takes to hear the question: they are read once a second.
_ANSWER_SECONDS = 3.0
# A launcher that has not come round for this long was stopped itself, most often with its job.
_AWAY_SECONDS = 5.0

Members = Mapping[int, LocalRank]


@dataclass
class _Vigil:
    """What is known of one attempt since its last sign of progress."""

    progress: object = None
    since: float = 0.0
    # When the next question is due, the one under way and when it was put.
    due: float = 0.0
    question: int = 0
    asked_at: float = 0.0
    look: dict[int, ActivitySample] = field(default_factory=dict)
    # Of all ranks, once every one is stuck.
    stuck: dict[int, RankActivityState] = field(default_factory=dict)
    vouched: bool = False
    told_slow: bool = False


class HangDetector:
    """Called at every turn of the supervisor; does nothing in most of them.

    A quiet job is looked at every half of the timeout: what has not moved between two looks in a row, after
    the whole of it, hangs. Every launcher speaks for the ranks on its own board; a job that spans several
    hangs when all of its ranks are spoken for.
    """

    def __init__(
        self, run: RunReader, node_log: NodeLog, config: Config, clock: Callable[[], float] = time.monotonic
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
        seen = signs(self._board)
        for attempt in self._run.attempts.values():
            members = members_of(attempt, self._node_log.host, seen)
            if self._hangs(attempt, members, now):
                self._over = True
                return StopRequest(f"ranks have waited for each other for {self._timeout:g} seconds or more")
        return None

    def _hangs(self, attempt: Attempt, members: Members, now: float) -> bool:
        alive = [member for member in members.values() if not member.is_over]
        vigil = self._vigils.setdefault(attempt.session, _Vigil())
        # Ranks that come and go are progress too.
        progress = (sorted(attempt.ranks), [(m.rank.header.pid, m.sign) for m in alive])
        if not alive or progress != vigil.progress or any(member.is_stopped for member in alive):
            self._withdraw(attempt, vigil)
            self._vigils[attempt.session] = _Vigil(progress, now, due=now + self._timeout / 2)
            return False
        if vigil.question:
            late = now - vigil.asked_at > self._patience
            if late or all(member.has_answered(vigil.question) for member in alive):
                self._compare(attempt, vigil, members, now)
        elif now >= vigil.due:
            self._ask(vigil, now)
        return bool(vigil.stuck) and self._is_told_by_all(attempt, vigil)

    def _ask(self, vigil: _Vigil, now: float) -> None:
        self._questions += 1
        ask(self._board, self._questions)
        vigil.question, vigil.asked_at = self._questions, now

    def _compare(self, attempt: Attempt, vigil: _Vigil, members: Members, now: float) -> None:
        """All have answered, or had the time to: what became of them since the look before?"""
        before, vigil.look = vigil.look, sight_all(members, vigil.question, now)
        vigil.question, vigil.due = 0, vigil.asked_at + self._timeout / 2
        if not before or now - vigil.since < self._timeout:
            return
        states = {
            number: RankActivityState.UNKNOWN
            if member.is_mute
            else state_of(before[number], vigil.look[number], member.rank.header.backend)
            for number, member in members.items()
        }
        if RankActivityState.WAITS in states.values() and not {
            RankActivityState.BUSY,
            RankActivityState.UNKNOWN,
        } & set(states.values()):
            vigil.stuck = states
        else:
            self._withdraw(attempt, vigil)
            self._tell_slow(attempt, vigil, states, now)

    def _tell_slow(
        self, attempt: Attempt, vigil: _Vigil, states: Mapping[int, RankActivityState], now: float
    ) -> None:
        if not vigil.told_slow:
            vigil.told_slow = True
            self._node_log.write(
                "slow",
                session=attempt.session,
                seconds=round(now - vigil.since, 1),
                ranks={str(number): state.value for number, state in states.items()},
            )

    def _is_told_by_all(self, attempt: Attempt, vigil: _Vigil) -> bool:
        """Whether every rank is known to be stuck, by this launcher's word or by another's."""
        if not vigil.vouched:
            vigil.vouched = True
            self._vouch(attempt, sorted(vigil.stuck))
        everyone, known = set(range(attempt.world_size)), set(vigil.stuck)
        if not everyone <= known:
            known |= _vouched_for(self._run.path, attempt.session)
        if not everyone <= known:
            return False
        self._node_log.write(
            "hang",
            session=attempt.session,
            seconds=round(self._clock() - vigil.since, 1),
            ranks={
                str(number): {
                    "state": state.value,
                    "sleeps_in": vigil.look[number].sleeps_in,
                    "answered": vigil.look[number].standing is not None,
                }
                for number, state in vigil.stuck.items()
            },
        )
        return True

    def _withdraw(self, attempt: Attempt, vigil: _Vigil) -> None:
        vigil.stuck = {}
        if vigil.vouched:
            vigil.vouched = False
            self._vouch(attempt, [])

    def _vouch(self, attempt: Attempt, ranks: list[int]) -> None:
        """For launchers on other nodes, which read the same folder."""
        self._node_log.write("standstill", session=attempt.session, pid=os.getpid(), ranks=ranks)


def _vouched_for(folder: Path, session: str) -> set[int]:
    """The ranks that launchers, this one too, last said to be stuck."""
    last: dict[tuple[str, int], list[int]] = {}
    for name, line in node_lines(folder):
        if b'"standstill"' not in line:
            continue
        try:
            match json.loads(line):
                case {"session": str(of), "pid": int(pid), "ranks": list(ranks)} if of == session:
                    last[name, pid] = ranks
        except ValueError:
            continue
    return {rank for ranks in last.values() for rank in ranks if isinstance(rank, int)}
