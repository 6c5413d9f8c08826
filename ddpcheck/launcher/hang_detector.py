"""Detects that the ranks of a job wait for each other forever, and logs the state of each rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpcheck.agent.shm_exchange import Heartbeat, heartbeats, request_stacks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.collectors.devices import DeviceCollector
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.launcher.exchange_file import exchanges_in_use
from ddpcheck.launcher.process.namespaces import RankProcessIds
from ddpcheck.launcher.process.process_table import (
    Activity,
    Process,
    all_processes,
    descendants,
    read_activity,
    read_process,
)
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.launcher.rank_activity import STUCK, ActivitySample, RankActivityState, classify_all
from ddpcheck.privacy import mask_text
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.node_log import NodeLog, node_lines
from ddpcheck.records.reasons import Awaited, NoHangWatch

# If all ranks of a job have these states, it does not hang: no rank waits for another one.
_MAY_END = frozenset({RankActivityState.STILL, RankActivityState.LEFT})
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


def local_ranks(
    attempt: Attempt, beats: Mapping[tuple[int, int], Heartbeat], ids: RankProcessIds
) -> dict[int, LocalRank]:
    """The ranks of this launcher: those in its shared-memory file. Another launcher has a file of its own."""
    return {
        number: LocalRank(rank, beats[number, rank.header.pid], _process(rank.header, ids))
        for number, rank in attempt.ranks.items()
        if (number, rank.header.pid) in beats
    }


def _process(header: RankHeader, ids: RankProcessIds) -> Process | None:
    pid = ids.pid(header)
    return None if pid is None else read_process(pid)


def sample_activity(
    ranks: LocalRanks, request: int, now: float, ids: RankProcessIds
) -> dict[int, ActivitySample]:
    """One sample of every rank, after it has answered `request` or the time for answers has passed."""
    processes = all_processes()
    return {number: _sample(rank, request, now, processes, ids) for number, rank in ranks.items()}


def _sample(
    local: LocalRank, request: int, now: float, processes: list[Process], ids: RankProcessIds
) -> ActivitySample:
    stack, header = local.rank.stack, local.rank.header
    if local.has_ended or local.process is None:
        return ActivitySample(now, stack, left=True)
    pid = local.process.pid
    # An earlier answer names the training thread; without one, assume the main thread.
    recorded = stack.thread if stack is not None and stack.thread else header.pid
    answer = stack if local.has_answered(request) else None
    threads = ids.threads(header, {recorded, *local.sign.own_threads})
    thread = threads.get(recorded, pid)
    excluded, workers = frozenset(threads.values()) - {thread}, []
    match answer.awaits if answer is not None else []:
        # In another namespace, workers are not examined: their rank then counts as busy.
        case [Awaited.LOADER.value, list(pids), list(of_loader)] if not ids.is_foreign(header):
            workers = [each for each in pids if isinstance(each, int)]
            excluded |= {each for each in of_loader if isinstance(each, int)}
    activity = read_activity(pid, thread, excluded, descendants(pid, among=processes))
    of_workers = {worker: _worker_activity(pid, worker, processes) for worker in workers}
    return ActivitySample(now, answer, activity, workers=of_workers)


def _worker_activity(rank: int, worker: int, processes: list[Process]) -> Activity | None:
    """None if the process is no longer a child of the rank."""
    if not any(
        process.pid == worker and process.parent == rank and not process.is_gone for process in processes
    ):
        return None
    return read_activity(worker, worker, (), descendants(worker, among=processes))


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
    # The stuck ranks that were last logged, and those of them that wait for others.
    stuck_logged: tuple[list[int], list[int]] | None = None
    # The states that were last logged of a job that does not hang.
    slow_logged: dict[int, RankActivityState] = field(default_factory=dict)


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
        self._config = config
        self._ids = RankProcessIds()
        # Heartbeats of ranks whose processes this launcher cannot see, until it has logged such a rank.
        self._hidden: dict[int, int] | None = {}
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
        beats: dict[tuple[int, int], Heartbeat] = {}
        for path in exchanges_in_use(self._config):
            beats.update(heartbeats(path))
        for attempt in self._run.attempts.values():
            ranks = local_ranks(attempt, beats, self._ids)
            self._log_hidden(ranks)
            if self._hangs(attempt, ranks, now):
                self._finished = True
                return StopRequest(f"no progress for {self._timeout:g} seconds or more (--hang-timeout)")
        return None

    def _log_hidden(self, ranks: LocalRanks) -> None:
        """Once: a rank whose process this launcher cannot see counts as ended, so it is part of no hang.

        Only a growing heartbeat distinguishes it from a rank that has died.
        """
        if self._hidden is None:
            return
        before = self._hidden
        self._hidden = {
            number: local.sign.beats
            for number, local in ranks.items()
            if local.process is None and self._ids.pid(local.rank.header) is None
        }
        alive = [number for number, beats in self._hidden.items() if beats > before.get(number, beats)]
        if alive:
            self._node_log.write("no_hang_watch", why=NoHangWatch.HIDDEN.value, ranks=sorted(self._hidden))
            self._hidden = None

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
        for path in exchanges_in_use(self._config):
            request_stacks(path, self._requests)
        state.request, state.requested_at = self._requests, now

    def _compare(self, attempt: Attempt, state: _ProgressState, ranks: LocalRanks, now: float) -> None:
        """Sample all ranks and classify them by the difference to the sample before."""
        before, state.samples = state.samples, sample_activity(ranks, state.request, now, self._ids)
        state.request, state.due = 0, state.requested_at + self._timeout / 2
        if not before or now - state.since < self._timeout:
            return
        devices = attempt.collector(DeviceCollector)
        backends = {number: devices.backend(local.rank) for number, local in ranks.items()}
        states = classify_all(before, state.samples, backends)
        states.update(
            {number: RankActivityState.UNKNOWN for number, local in ranks.items() if local.cannot_answer}
        )
        if STUCK.issuperset(states.values()):
            # If none of them waits, ranks of another launcher may wait for them.
            state.stuck = states
        else:
            self._withdraw(attempt, state)
        if not state.stuck or _MAY_END.issuperset(states.values()):
            self._log_slow(attempt, state, states, now)

    def _log_slow(
        self, attempt: Attempt, state: _ProgressState, ranks: Mapping[int, RankActivityState], now: float
    ) -> None:
        """Once, and again when the state of a rank has changed."""
        if state.slow_logged != dict(ranks):
            state.slow_logged = dict(ranks)
            self._node_log.write(
                "slow",
                session=attempt.session,
                seconds=round(now - state.since, 1),
                ranks={str(number): activity.value for number, activity in ranks.items()},
                details=_rank_rows(ranks, state.samples),
            )

    def _all_ranks_stuck(self, attempt: Attempt, state: _ProgressState) -> bool:
        """Whether every rank of the job is stuck and one waits, by this launcher or by others. Logs the hang."""
        stuck = set(state.stuck)
        waiting = {rank for rank, activity in state.stuck.items() if activity not in _MAY_END}
        own = (sorted(stuck), sorted(waiting))
        if state.stuck_logged != own:
            state.stuck_logged = own
            self._log_stuck(attempt, *own)
        all_ranks = set(range(attempt.world_size))
        if not all_ranks <= stuck:
            stuck_elsewhere, waiting_elsewhere = _logged_as_stuck(self._run.path, attempt.session)
            stuck, waiting = stuck | stuck_elsewhere, waiting | waiting_elsewhere
        if not all_ranks <= stuck or not waiting:
            return False
        self._node_log.write(
            "hang",
            session=attempt.session,
            seconds=round(self._clock() - state.since, 1),
            ranks=_rank_rows(state.stuck, state.samples),
        )
        return True

    def _withdraw(self, attempt: Attempt, state: _ProgressState) -> None:
        state.stuck = {}
        if state.stuck_logged is not None:
            state.stuck_logged = None
            self._log_stuck(attempt, [], [])

    def _log_stuck(self, attempt: Attempt, ranks: list[int], waiting: list[int]) -> None:
        """For other launchers, which read the same folder."""
        self._node_log.write(
            "standstill", session=attempt.session, pid=os.getpid(), ranks=ranks, waiting=waiting
        )


def _rank_rows(
    states: Mapping[int, RankActivityState], samples: Mapping[int, ActivitySample]
) -> dict[str, dict[str, object]]:
    """For the log: state and position of each rank."""
    rows: dict[str, dict[str, object]] = {}
    for number, state in states.items():
        sample = samples[number]
        row = rows[str(number)] = {
            "state": state.value,
            "sleeps_in": sample.sleeps_in,
            "answered": sample.standing is not None,
        }
        if sample.activity is not None and sample.activity.lock_holder:
            row |= {
                "lock_holder": sample.activity.lock_holder,
                "lock_file": mask_text(sample.activity.lock_file),
            }
    return rows


def _logged_as_stuck(folder: Path, session: str) -> tuple[set[int], set[int]]:
    """The ranks that all launchers, including this one, have last logged as stuck, and those of them that wait."""
    last: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for name, line in node_lines(folder):
        if b'"standstill"' not in line:
            continue
        try:
            match json.loads(line):
                case {"session": str(of), "pid": int(pid), "ranks": list(ranks)} as record if of == session:
                    last[name, pid] = ranks, record.get("waiting", ranks)
        except ValueError:
            continue
    stuck, waiting = (
        {rank for logged in last.values() for rank in logged[part] if isinstance(rank, int)}
        for part in (0, 1)
    )
    return stuck, waiting
