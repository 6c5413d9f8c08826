"""The live state of a run, computed from the records read so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from ddpcheck.analysis.aggregate.launch import Attempt, first_node_mismatch
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.analysis.step_coverage.build import missing_now
from ddpcheck.analysis.timing.collector import PARTS, StepTimeSeries
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.rules.rule import in_report_order


@dataclass(frozen=True)
class LiveRank:
    """One rank. Times are medians of its latest steps, in microseconds."""

    rank: int
    host: str
    # "running", "finished" or "raised"; "vanished": the job is over and the rank wrote no last record.
    status: str
    steps: int
    step_us: int | None = None
    # data, forward, backward, optimizer, other, wait
    parts_us: Mapping[str, int] = field(default_factory=dict)
    # Current and peak memory, in bytes.
    memory: int = 0
    peak_memory: int = 0
    # Its exception, where it raised.
    error: str = ""


@dataclass(frozen=True)
class LiveAgreement:
    """Whether replicas have equal parameters, as far as they were compared."""

    # Compared steps, of the module with the most.
    compared: int = 0
    diverged: bool = False
    # Where they diverged first, and the outlier ranks.
    step: int | None = None
    stage: str = ""
    outliers: tuple[int, ...] = ()
    # Trained parameters that are not compared, on the rank with the most.
    not_compared: int = 0


@dataclass(frozen=True)
class LiveStepTime:
    """Step times of the job, from the latest steps."""

    step_us: int
    # Step times of one rank, the latest last.
    recent_us: tuple[int, ...]
    # Shares of the step: communication that does not overlap, and waiting for stragglers.
    exposed: float
    late: float
    # The rank with the shortest wait, which the others wait for.
    latest_rank: int


@dataclass(frozen=True)
class LiveState:
    """The latest attempt of a run."""

    name: str
    world_size: int = 0
    # Number of the attempt, from 0.
    attempt: int = 0
    ranks: tuple[LiveRank, ...] = ()
    agreement: LiveAgreement = field(default_factory=LiveAgreement)
    step_time: LiveStepTime | None = None
    # ddpcheck's share of a step in its latest measurement, on the rank where it is highest.
    cost_share: float | None = None
    finding: Finding | None = None
    # Since the job began, and since the last progress of any rank.
    seconds: float = 0.0
    quiet_seconds: float = 0.0
    # No progress for longer than steps of this job take.
    stalled: bool = False
    # The command has ended; or its launcher is gone without having recorded an end.
    ended: bool = False
    abandoned: bool = False

    @property
    def steps(self) -> int:
        """Steps of the rank with the most."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def fewest_steps(self) -> int:
        return min((rank.steps for rank in self.ranks), default=0)


# Seconds after the divergence at which rules run: at once, and again when all ranks have written their details.
_EVALUATIONS = (0.0, 2.0, 10.0)


class LiveFindings:
    """The most important finding of each attempt. Rules run a few times, not at every update."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._findings: dict[str, Finding | None] = {}
        self._runs: dict[str, tuple[float, int]] = {}

    def latest(self, attempt: Attempt, number: int, now: float) -> Finding | None:
        """The finding of an attempt whose ranks have diverged."""
        since, runs = self._runs.get(attempt.session, (now, 0))
        if runs < len(_EVALUATIONS) and now - since >= _EVALUATIONS[runs]:
            self._runs[attempt.session] = since, runs + 1
            self._findings[attempt.session] = self._run_rules(attempt, number)
        return self._findings.get(attempt.session)

    def _run_rules(self, attempt: Attempt, number: int) -> Finding | None:
        context = RuleContext(attempt, number, self._folder, NodeNotes(), (), None)
        for rule in in_report_order():
            if not rule.live:
                continue
            try:
                findings = rule.find(context)
            except Exception:
                # Records that a rule needs may be missing yet. The final report lists rules that fail.
                continue
            if findings:
                return findings[0]
        return None


# Steps that medians are taken over.
LATEST = 32
# A job is stalled after this many seconds, and this many step times, without progress.
QUIET_SECONDS = 10.0
QUIET_STEPS = 5


class LiveTracker:
    """Follows one run. `now` is the time of a monotonic clock."""

    def __init__(self, run: RunReader, name: str, began: float) -> None:
        self._run = run
        self._name = name
        self._began = began
        self._findings = LiveFindings(run.path)
        self._progress: object = None
        self._moved = began

    def state(self, now: float) -> LiveState:
        attempts = self._run.ordered()
        if not attempts:
            return LiveState(self._name, seconds=now - self._began, quiet_seconds=now - self._began)
        number, attempt = len(attempts) - 1, attempts[-1]
        ranks = tuple(_rank(attempt, rank) for rank in sorted(attempt.ranks))
        self._note_progress((number, [(rank.steps, rank.status) for rank in ranks]), now)
        agreement, step_time = _agreement(attempt), _step_time(ranks, attempt.step_times)
        quiet = now - self._moved
        return LiveState(
            name=self._name,
            world_size=attempt.world_size,
            attempt=number,
            ranks=ranks,
            agreement=agreement,
            step_time=step_time,
            cost_share=attempt.collector(CostCollector).latest_share(),
            finding=self._findings.latest(attempt, number, now) if agreement.diverged else None,
            seconds=now - self._began,
            quiet_seconds=quiet,
            stalled=quiet
            >= max(QUIET_SECONDS, QUIET_STEPS * (step_time.step_us if step_time is not None else 0) / 1e6),
        )

    def _note_progress(self, progress: object, now: float) -> None:
        if progress != self._progress:
            self._progress, self._moved = progress, now


def _rank(attempt: Attempt, number: int) -> LiveRank:
    rank = attempt.ranks[number]
    clock, memory = attempt.step_times.get(number), attempt.memory.ranks.get(number)
    status = "running" if rank.end is None else "raised" if rank.end.error else "finished"
    return LiveRank(
        rank=number,
        host=rank.header.host,
        status=status,
        steps=attempt.steps(number),
        step_us=_latest(clock, "total") if clock is not None and clock.steps else None,
        parts_us={} if clock is None else {part: _latest(clock, part) for part in PARTS if clock.steps},
        memory=memory.after.values[-1] if memory is not None and len(memory.after) else 0,
        peak_memory=memory.most if memory is not None else 0,
        error=rank.end.error if rank.end is not None else "",
    )


def _latest(clock: StepTimeSeries, column: str) -> int:
    return round(median(clock.columns[column][-LATEST:]))


def _agreement(attempt: Attempt) -> LiveAgreement:
    comparisons = attempt.agreement.stats
    compared = max(
        (
            stats.compared
            for (_, stage, of), stats in comparisons.items()
            if (stage, of) == (Stage.PARAMS.value, TensorKind.PARAMETERS.value)
        ),
        default=0,
    )
    missing = missing_now(attempt)
    if not attempt.diverged():
        return LiveAgreement(compared, not_compared=missing)
    firsts = [
        (stats.first.key.step, stats.first.key.stage, stats.first.outlier_ranks())
        for (module, stage, of), stats in comparisons.items()
        if stats.first is not None
        and stage not in (Stage.INIT_BEFORE.value, Stage.BUFFERS_END.value)
        and of != TensorKind.IGNORED.value
        and not attempt.uses_local_sgd(module)
        and attempt.is_replica(module)
    ]
    for module in attempt.modules():
        mismatch = first_node_mismatch(attempt, module)
        if mismatch is not None:
            rank, record = mismatch
            firsts.append((record.step, record.stage, (rank, record.other_rank)))
    step, stage, outliers = min(firsts)
    return LiveAgreement(compared, True, None if step < 0 else step, stage, outliers, missing)


def _step_time(ranks: tuple[LiveRank, ...], clocks: Mapping[int, StepTimeSeries]) -> LiveStepTime | None:
    clocked = {rank.rank: rank for rank in ranks if rank.step_us}
    if not clocked:
        return None
    step = median(rank.step_us or 0 for rank in clocked.values())
    waits = {number: rank.parts_us["wait"] for number, rank in clocked.items()}
    shortest = min(waits.values())
    return LiveStepTime(
        step_us=round(step),
        recent_us=tuple(clocks[min(clocked)].columns["total"][-LATEST:]),
        exposed=shortest / step,
        late=(mean(waits.values()) - shortest) / step,
        latest_rank=min(waits, key=lambda number: waits[number]),
    )
