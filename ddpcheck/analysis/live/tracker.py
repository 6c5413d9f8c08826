"""From the records read so far to the state of a run: a little arithmetic on what the attempt keeps anyway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from ddpcheck.analysis.aggregate.launch import Attempt, first_node_mismatch
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.live.state import LiveAgreement, LiveRank, LiveState, LiveStepTime
from ddpcheck.analysis.run_reader import NodeNotes, RunReader
from ddpcheck.analysis.timing.rank_series import PARTS, StepTimeSeries
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.rules.divergence import ddp201, ddp202, ddp203, ddp205, ddp206, ddp208, ddp210
from ddpcheck.rules.registry import Rule
from ddpcheck.rules.wrapping import ddp101, ddp103, ddp104

# Those that hold however the job goes on: others count, or wait for the end.
_RULES: tuple[Rule, ...] = tuple(
    rule.find for rule in (ddp103, ddp101, ddp104, ddp202, ddp203, ddp205, ddp206, ddp208, ddp201, ddp210)
)
# When to look after the parting: at once, and again when all ranks have written what they know of it.
_LOOKS = (0.0, 2.0, 10.0)


class LiveFindings:
    """The gravest finding of each start of the job; rules are asked a few times, not at every turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Finding | None] = {}
        self._looked: dict[str, tuple[float, int]] = {}

    def latest(self, attempt: Attempt, number: int, now: float) -> Finding | None:
        """Of ranks that are known to have parted."""
        since, looks = self._looked.get(attempt.session, (now, 0))
        if looks < len(_LOOKS) and now - since >= _LOOKS[looks]:
            self._looked[attempt.session] = since, looks + 1
            self._found[attempt.session] = self._ask(attempt, number)
        return self._found.get(attempt.session)

    def _ask(self, attempt: Attempt, number: int) -> Finding | None:
        case = RuleContext(attempt, number, self._folder, NodeNotes(), (), None)
        for rule in _RULES:
            try:
                found = rule(case)
            except Exception:
                # What a rule needs may not be there yet; the report at the end tells of rules that fail.
                continue
            if found:
                return found[0]
        return None


# Steps that medians are taken over.
LATEST = 32
# A pause is worth telling from so many seconds on, and from so many steps.
QUIET_SECONDS = 10.0
QUIET_STEPS = 5


class LiveTracker:
    """Follows one run; `now` is any clock that goes on while nothing happens."""

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
        agreement, pace = _agreement(attempt), _pace(ranks, attempt.clocks)
        quiet = now - self._moved
        return LiveState(
            name=self._name,
            world_size=attempt.world_size,
            attempt=number,
            ranks=ranks,
            agreement=agreement,
            pace=pace,
            finding=self._findings.latest(attempt, number, now) if agreement.parted else None,
            seconds=now - self._began,
            quiet_seconds=quiet,
            stalled=quiet
            >= max(QUIET_SECONDS, QUIET_STEPS * (pace.step_us if pace is not None else 0) / 1e6),
        )

    def _note_progress(self, progress: object, now: float) -> None:
        if progress != self._progress:
            self._progress, self._moved = progress, now


def _rank(attempt: Attempt, number: int) -> LiveRank:
    rank = attempt.ranks[number]
    clock, memory = attempt.clocks.get(number), attempt.memory.ranks.get(number)
    status = "running" if rank.end is None else "raised" if rank.end.error else "finished"
    return LiveRank(
        rank=number,
        host=rank.header.host,
        status=status,
        steps=attempt.steps(number),
        step_us=_latest(clock, "total") if clock is not None and clock.steps else None,
        parts_us={} if clock is None else {part: _latest(clock, part) for part in PARTS if clock.steps},
        memory=memory.after.values[-1] if memory is not None and len(memory.after) else 0,
        memory_most=memory.most if memory is not None else 0,
        error=rank.end.error if rank.end is not None else "",
    )


def _latest(clock: StepTimeSeries, column: str) -> int:
    return round(median(clock.columns[column][-LATEST:]))


def _agreement(attempt: Attempt) -> LiveAgreement:
    tallies = attempt.agreement.stats
    compared = max(
        (
            tally.compared
            for (_, stage, of), tally in tallies.items()
            if (stage, of) == (Stage.PARAMS.value, TensorKind.PARAMETERS.value)
        ),
        default=0,
    )
    if not attempt.diverged():
        return LiveAgreement(compared)
    firsts = [
        (tally.first.moment.step, tally.first.moment.stage, tally.first.outlier_ranks())
        for (module, stage, of), tally in tallies.items()
        if tally.first is not None
        and stage not in (Stage.INIT_BEFORE.value, Stage.BUFFERS_END.value)
        and of != TensorKind.IGNORED.value
        and not attempt.uses_local_sgd(module)
    ]
    for module in attempt.modules():
        found = first_node_mismatch(attempt, module)
        if found is not None:
            firsts.append((found[1].step, found[1].stage, (found[0], found[1].other_rank)))
    step, stage, odd = min(firsts)
    return LiveAgreement(compared, True, None if step < 0 else step, stage, odd)


def _pace(ranks: tuple[LiveRank, ...], clocks: Mapping[int, StepTimeSeries]) -> LiveStepTime | None:
    clocked = {rank.rank: rank for rank in ranks if rank.step_us}
    if not clocked:
        return None
    step = median(rank.step_us or 0 for rank in clocked.values())
    waits = {number: rank.parts_us["wait"] for number, rank in clocked.items()}
    shortest = min(waits.values())
    return LiveStepTime(
        step_us=round(step),
        course_us=tuple(clocks[min(clocked)].columns["total"][-LATEST:]),
        exposed=shortest / step,
        late=(mean(waits.values()) - shortest) / step,
        latest_rank=min(waits, key=lambda number: waits[number]),
    )
