"""Detects that the ranks of a job wait for each other forever, and logs the state of each rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ddpcheck.agent.shm_exchange import Heartbeat, heartbeats, request_stacks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.hang.collectives import ConflictKind, find_conflict, has_pending
from ddpcheck.analysis.hang.stacks import WaitKind, in_debugger, wait_of
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.launcher.process.process_table import (
    TICKS_PER_SECOND,
    Activity,
    Process,
    all_processes,
    descendants,
    read_activity,
    read_process,
)
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.records.kinds.rank import StackRecord
from ddpcheck.records.node_log import NodeLog, node_lines

# A waiting thread uses no processor time; up to this many ticks may still be charged for earlier work.
_IDLE_TICKS = 2
# Processor share of all threads of a process below which it counts as idle.
_IDLE_SHARE = 0.02
# Processor share that other threads of a waiting rank may use without counting as work, such as a progress bar.
_WORKING_SHARE = 0.25
# Context switches that do not count as progress: a thread in a collective wakes up to check its timeout.
_IDLE_SWITCHES = 2
# A collective that transfers less than this is stuck, not slow. Answering a request writes a few KB.
_IDLE_BYTES = 256 << 10
# Waiting for another thread, as opposed to a timer, a file, a socket or another process.
_FUTEX = "futex"


class RankActivityState(str, Enum):
    """What a rank does, according to two samples."""

    WAITS = "waits"  # in communication, no activity
    SPINS = "spins"  # uses the processor while a collective that it enqueued cannot complete
    STILL = "still"  # outside communication, no activity
    LEFT = "left"  # its process group is destroyed, or its process has ended
    BUSY = "busy"  # active, or may continue by itself
    UNKNOWN = "unknown"  # cannot answer requests


@dataclass(frozen=True)
class ActivitySample:
    """One sample of a rank: its stack and the counters of its process."""

    time: float
    standing: StackRecord | None = None
    activity: Activity | None = None
    left: bool = False

    @property
    def sleeps_in(self) -> str:
        """The kernel function in which the training thread sleeps; empty if unknown."""
        return self.activity.sleeps_in if self.activity is not None else ""


def classify(before: ActivitySample, now: ActivitySample, backend: str) -> RankActivityState:
    """The state of a rank between two samples."""
    if now.left:
        return RankActivityState.LEFT
    if before.standing is None or now.standing is None or before.activity is None or now.activity is None:
        return _classify_without_stack(before, now)
    if now.standing.left and before.standing.left:
        return RankActivityState.LEFT
    if now.standing.frames != before.standing.frames or in_debugger(now.standing.frames):
        return RankActivityState.BUSY
    wait = wait_of(now.standing.frames)
    if wait is None:
        return RankActivityState.STILL if _is_idle(before, now) else RankActivityState.BUSY
    idle = _spins(backend, wait.kind) or _thread_is_idle(before.activity, now.activity)
    return RankActivityState.WAITS if idle and _rest_is_idle(before, now) else RankActivityState.BUSY


def classify_all(
    before: Mapping[int, ActivitySample], now: Mapping[int, ActivitySample], backends: Mapping[int, str]
) -> dict[int, RankActivityState]:
    """The states of all ranks. A busy rank spins if a collective that it waits for cannot complete.

    A rank that waits for the device in `.item()`, or polls a collective, uses a full core. The processor does not
    distinguish it from work; its collectives do.
    """
    states = {rank: classify(before[rank], sample, backends[rank]) for rank, sample in now.items()}
    spinning = {
        rank
        for rank, state in states.items()
        if state is RankActivityState.BUSY and _polls(before[rank], now[rank])
    }
    if spinning and _cannot_complete(now, states, spinning):
        states.update(dict.fromkeys(spinning, RankActivityState.SPINS))
    return states


def _polls(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether the rank stays in one function with a pending collective, and transfers nothing."""
    old, new = before.standing, now.standing
    if old is None or new is None or before.activity is None or now.activity is None:
        return False
    return (
        has_pending(new.progress())
        and old.groups == new.groups
        and not in_debugger(new.frames)
        and [[*frame[:1], *frame[2:]] for frame in old.frames]
        == [[*frame[:1], *frame[2:]] for frame in new.frames]
        and _no_transfer(before.activity, now.activity)
    )


def _cannot_complete(
    now: Mapping[int, ActivitySample], states: Mapping[int, RankActivityState], spinning: set[int]
) -> bool:
    """Whether a pending collective of the spinning ranks needs a rank that is stuck itself.

    A rank that works may still enqueue it, so the others wait for it. A rank that waits in another process group may
    wait for work of a rank that only seems to spin.
    """
    if any(
        state in (RankActivityState.BUSY, RankActivityState.UNKNOWN) and rank not in spinning
        for rank, state in states.items()
    ):
        return False
    known = {rank: sample.standing.progress() for rank, sample in now.items() if sample.standing is not None}
    conflict = find_conflict(known)
    if conflict is None:
        return RankActivityState.LEFT in states.values()
    if conflict.kind is not ConflictKind.MISSING:
        return True
    return all(
        states[rank] in (RankActivityState.STILL, RankActivityState.LEFT) or rank in spinning
        for rank in conflict.ranks
    )


def _classify_without_stack(before: ActivitySample, now: ActivitySample) -> RankActivityState:
    """Native code holds the GIL, so there is no stack: only the process counters show whether it works."""
    if before.activity is None or now.activity is None:
        return RankActivityState.UNKNOWN
    return RankActivityState.STILL if _is_idle(before, now) else RankActivityState.BUSY


def _spins(backend: str, kind: WaitKind) -> bool:
    """With NCCL, a thread that waits for the device uses a full core. This does not apply to a backward pass."""
    return "nccl" in backend and kind is not WaitKind.BACKWARD


def _thread_is_idle(before: Activity, now: Activity) -> bool:
    return (
        now.thread_ticks - before.thread_ticks <= _IDLE_TICKS
        and now.thread_switches - before.thread_switches <= _IDLE_SWITCHES
    )


def _rest_is_idle(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether no other thread or process of the rank works, such as a slow transfer or an asynchronous save."""
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    others = (new.ticks - new.thread_ticks) - (old.ticks - old.thread_ticks)
    return others < _WORKING_SHARE * TICKS_PER_SECOND * (now.time - before.time) and _no_transfer(old, new)


def _no_transfer(before: Activity, now: Activity) -> bool:
    return now.bytes - before.bytes < _IDLE_BYTES


def _is_idle(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether the rank is idle outside communication: all threads, and all processes that it started.

    A thread that sleeps on a timer wakes up by itself. A thread that waits for a file, a socket, a terminal or
    another process may be woken from outside. Neither counts as a hang.
    """
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    return (
        _FUTEX in old.sleeps_in
        and _FUTEX in new.sleeps_in
        and not new.by_clock
        and _thread_is_idle(old, new)
        and new.switches - old.switches <= _IDLE_SWITCHES
        and new.ticks - old.ticks
        <= max(_IDLE_TICKS, _IDLE_SHARE * TICKS_PER_SECOND * (now.time - before.time))
        and _no_transfer(old, new)
    )


# A rank in which one of these probes has failed cannot answer a request for its stack.
_ANSWERING_PROBES = ("agent", "standing")
# Time for answers in addition to the time until a rank sees the request: answers are read once per second.
_ANSWER_SECONDS = 3.0
# If two ticks are further apart than this, the launcher itself was stopped, most likely together with its job.
_PAUSED_SECONDS = 5.0


@dataclass(frozen=True)
class LocalRank:
    """One rank of an attempt on this node, with its heartbeat and its process."""

    rank: RankData
    sign: Heartbeat
    process: Process | None

    @property
    def has_ended(self) -> bool:
        """The rank has written its end record, or its process no longer exists."""
        header, process = self.rank.header, self.process
        if self.rank.end is not None or process is None or process.is_gone:
            return True
        return bool(header.ticks) and process.started != header.ticks

    @property
    def is_stopped(self) -> bool:
        """Stopped by Ctrl-Z or by a debugger."""
        return self.process is not None and self.process.state in {"T", "t"}

    @property
    def cannot_answer(self) -> bool:
        """Whether the part of ddpcheck that answers requests has failed in this rank."""
        return any(fault.probe in _ANSWERING_PROBES for fault in self.rank.faults)

    def has_answered(self, request: int) -> bool:
        return self.rank.stack is not None and self.rank.stack.look == request


LocalRanks = Mapping[int, LocalRank]


def local_ranks(attempt: Attempt, host: str, beats: Mapping[int, Heartbeat]) -> dict[int, LocalRank]:
    """The ranks of this launcher. Another launcher on the same host has its own shared-memory file."""
    return {
        number: LocalRank(rank, beats[rank.header.pid], read_process(rank.header.pid))
        for number, rank in attempt.ranks.items()
        if rank.header.host == host and rank.header.pid in beats
    }


def sample_activity(ranks: LocalRanks, request: int, now: float) -> dict[int, ActivitySample]:
    """One sample of every rank, after it has answered `request` or the time for answers has passed."""
    processes = all_processes()
    return {number: _sample(rank, request, now, processes) for number, rank in ranks.items()}


def _sample(local: LocalRank, request: int, now: float, processes: list[Process]) -> ActivitySample:
    stack, pid = local.rank.stack, local.rank.header.pid
    if local.has_ended:
        return ActivitySample(now, stack, left=True)
    # An earlier answer names the training thread; without one, assume the main thread.
    thread = stack.thread if stack is not None and stack.thread else pid
    activity = read_activity(pid, thread, local.sign.own_threads, descendants(pid, among=processes))
    return ActivitySample(now, stack if local.has_answered(request) else None, activity)


@dataclass
class _ProgressState:
    """State of one attempt since its last progress."""

    progress: object = None
    since: float = 0.0
    # When the next request is due, the pending request (0: none) and when it was sent.
    due: float = 0.0
    request: int = 0
    requested_at: float = 0.0
    samples: dict[int, ActivitySample] = field(default_factory=dict)
    # States of all local ranks, once all of them are stuck.
    stuck: dict[int, RankActivityState] = field(default_factory=dict)
    stuck_logged: bool = False
    slow_logged: bool = False


class HangDetector:
    """The supervisor calls `tick` regularly; most calls do nothing.

    A job without progress is sampled every half timeout. If, after the full timeout, two consecutive samples show no
    activity, the job hangs. Every launcher logs the stuck ranks of its node; a job on several nodes hangs when all of
    its ranks are stuck.
    """

    def __init__(
        self, run: RunReader, node_log: NodeLog, config: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._node_log = node_log
        self._exchange = Path(config.exchange_file)
        self._timeout = config.hang_timeout
        self._answer_seconds = 2 * config.listen_seconds + _ANSWER_SECONDS
        self._interval = min(1.0, config.hang_timeout / 20)
        self._clock = clock
        self._last_tick = clock()
        self._requests = 0
        self._states: dict[str, _ProgressState] = {}
        self._finished = False

    def tick(self) -> StopRequest | None:
        now = self._clock()
        if self._finished or now - self._last_tick < self._interval:
            return None
        if now - self._last_tick > self._interval + _PAUSED_SECONDS:
            self._states.clear()
        self._last_tick = now
        beats = heartbeats(self._exchange)
        for attempt in self._run.attempts.values():
            ranks = local_ranks(attempt, self._node_log.host, beats)
            if self._hangs(attempt, ranks, now):
                self._finished = True
                return StopRequest(f"no progress for {self._timeout:g} seconds or more (--hang-timeout)")
        return None

    def _hangs(self, attempt: Attempt, ranks: LocalRanks, now: float) -> bool:
        alive = [rank for rank in ranks.values() if not rank.has_ended]
        state = self._states.setdefault(attempt.session, _ProgressState())
        # New and ended ranks count as progress.
        progress = (sorted(attempt.ranks), [(local.rank.header.pid, local.sign) for local in alive])
        if not alive or progress != state.progress or any(rank.is_stopped for rank in alive):
            self._withdraw(attempt, state)
            self._states[attempt.session] = _ProgressState(progress, now, due=now + self._timeout / 2)
            return False
        if state.request:
            late = now - state.requested_at > self._answer_seconds
            if late or all(rank.has_answered(state.request) for rank in alive):
                self._compare(attempt, state, ranks, now)
        elif now >= state.due:
            self._request_stacks(state, now)
        return bool(state.stuck) and self._all_ranks_stuck(attempt, state)

    def _request_stacks(self, state: _ProgressState, now: float) -> None:
        self._requests += 1
        request_stacks(self._exchange, self._requests)
        state.request, state.requested_at = self._requests, now

    def _compare(self, attempt: Attempt, state: _ProgressState, ranks: LocalRanks, now: float) -> None:
        """Sample all ranks and classify them by the difference to the sample before."""
        before, state.samples = state.samples, sample_activity(ranks, state.request, now)
        state.request, state.due = 0, state.requested_at + self._timeout / 2
        if not before or now - state.since < self._timeout:
            return
        backends = {number: local.rank.header.backend for number, local in ranks.items()}
        states = classify_all(before, state.samples, backends)
        states.update(
            {number: RankActivityState.UNKNOWN for number, local in ranks.items() if local.cannot_answer}
        )
        may_progress = {RankActivityState.BUSY, RankActivityState.UNKNOWN} & set(states.values())
        waiting = {RankActivityState.WAITS, RankActivityState.SPINS} & set(states.values())
        if waiting and not may_progress:
            state.stuck = states
        else:
            self._withdraw(attempt, state)
            self._log_slow(attempt, state, states, now)

    def _log_slow(
        self, attempt: Attempt, state: _ProgressState, ranks: Mapping[int, RankActivityState], now: float
    ) -> None:
        if not state.slow_logged:
            state.slow_logged = True
            self._node_log.write(
                "slow",
                session=attempt.session,
                seconds=round(now - state.since, 1),
                ranks={str(number): activity.value for number, activity in ranks.items()},
            )

    def _all_ranks_stuck(self, attempt: Attempt, state: _ProgressState) -> bool:
        """Whether every rank of the job is stuck, according to this launcher or to others. Logs the hang."""
        if not state.stuck_logged:
            state.stuck_logged = True
            self._log_stuck(attempt, sorted(state.stuck))
        all_ranks, stuck = set(range(attempt.world_size)), set(state.stuck)
        if not all_ranks <= stuck:
            stuck |= _logged_as_stuck(self._run.path, attempt.session)
        if not all_ranks <= stuck:
            return False
        self._node_log.write(
            "hang",
            session=attempt.session,
            seconds=round(self._clock() - state.since, 1),
            ranks={
                str(number): {
                    "state": activity.value,
                    "sleeps_in": state.samples[number].sleeps_in,
                    "answered": state.samples[number].standing is not None,
                }
                for number, activity in state.stuck.items()
            },
        )
        return True

    def _withdraw(self, attempt: Attempt, state: _ProgressState) -> None:
        state.stuck = {}
        if state.stuck_logged:
            state.stuck_logged = False
            self._log_stuck(attempt, [])

    def _log_stuck(self, attempt: Attempt, ranks: list[int]) -> None:
        """For launchers on other nodes, which read the same folder."""
        self._node_log.write("standstill", session=attempt.session, pid=os.getpid(), ranks=ranks)


def _logged_as_stuck(folder: Path, session: str) -> set[int]:
    """The ranks that all launchers, including this one, have last logged as stuck."""
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
