"""DDP603: ranks hang, and where each one stands."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.hang.causes import mistake_of
from ddpcheck.analysis.hang.snapshot import RankStack, alike, evidence_of, stands_of
from ddpcheck.analysis.hang.stacks import WaitKind
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage

# What those that wait would come to next.
_STAGES = {
    WaitKind.WRAPPING: Stage.INIT_AFTER,
    WaitKind.BUFFERS: Stage.BUFFERS,
    WaitKind.BACKWARD: Stage.REDUCED,
}
_ORDER = {stage.value: place for place, stage in enumerate(_STAGES.values())}
_MOST_TOLD = 4


def find(case: RuleContext) -> list[Finding]:
    hang = case.notes.hangs.get(case.attempt.session)
    if hang is None or not case.attempt.ranks:
        return []
    stands = stands_of(case.attempt, hang)
    groups = alike(stands)
    mistake = mistake_of(stands, case.attempt)
    first = _first_waiting(stands)
    told = "; ".join(
        f"{name_ranks([stand.rank for stand in group])} {group[0].told(several=len(group) > 1)}"
        for group in groups[:_MOST_TOLD]
    )
    more = f"; and {len(groups) - _MOST_TOLD} more places" if len(groups) > _MOST_TOLD else ""
    return [
        case.finding(
            "DDP603",
            f"For {hang.seconds:.0f} s no rank got any further, so the job was stopped: {told}{more}.",
            step=first.step if first is not None else None,
            stage=_stage(first),
            ranks=mistake.ranks,
            evidence={"seconds": hang.seconds, "standings": evidence_of(groups)},
            cause=mistake.cause,
            fix=mistake.fix,
        )
    ]


def _first_waiting(stands: Sequence[RankStack]) -> RankStack | None:
    """Of those that wait the one that is furthest behind, those that wait inside DDP first."""
    inside = [stand for stand in stands if _stage(stand) is not None]
    waiting = inside or [stand for stand in stands if stand.wait is not None]
    return min(waiting, key=lambda stand: (stand.step, _ORDER.get(_stage(stand) or "", 0)), default=None)


def _stage(stand: RankStack | None) -> str | None:
    stage = _STAGES.get(stand.wait.kind) if stand is not None and stand.wait is not None else None
    return stage.value if stage is not None else None
