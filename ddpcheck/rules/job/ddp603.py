"""DDP603: ranks hang, and where each one waits."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hang.causes import likely_mistake
from ddpcheck.analysis.hang.stacks import (
    RankStack,
    WaitKind,
    collective_conflict,
    group_by_stack,
    rank_stacks,
    stack_evidence,
)
from ddpcheck.analysis.hang.stall import stall_that_ended_the_job
from ddpcheck.analysis.node_notes import Hang
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.node_kinds import RendezvousRecord
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP603",
    severity=Severity.ERROR,
    title="Ranks hang",
    summary="ranks hang: where each rank waits, and why",
    needs=(),
)

# The stage that a waiting rank would reach next.
_STAGES = {
    WaitKind.WRAPPING: Stage.INIT_AFTER,
    WaitKind.BUFFERS: Stage.BUFFERS,
    WaitKind.BACKWARD: Stage.REDUCED,
}
_ORDER = {stage.value: index for index, stage in enumerate(_STAGES.values())}
_MOST_GROUPS = 4


def find(context: RuleContext) -> list[Finding]:
    hang = context.notes.hangs.get(context.attempt.session)
    gave_up = stall_that_ended_the_job(context) if hang is None else None
    hang = hang or gave_up
    rendezvous = context.notes.rendezvous
    if rendezvous is not None and rendezvous.missing and (rendezvous.stopped or not context.attempt.ranks):
        return [_rendezvous(context, rendezvous)]
    if hang is None or not context.attempt.ranks:
        return []
    stacks = rank_stacks(context.attempt, hang)
    groups = group_by_stack(stacks)
    mistake = likely_mistake(stacks, context.attempt)
    conflict = collective_conflict(stacks)
    first = _first_waiting(stacks)
    states = "; ".join(
        f"{name_ranks([stack.rank for stack in group])} {group[0].describe(several=len(group) > 1)}"
        for group in groups[:_MOST_GROUPS]
    )
    more = f"; and {len(groups) - _MOST_GROUPS} more groups" if len(groups) > _MOST_GROUPS else ""
    return [
        context.finding(
            RULE,
            _opening(hang, gave_up is not None)
            + f" {states}{more}."
            + (
                f" {conflict.cause[0].upper()}{conflict.cause[1:]}."
                if conflict and conflict.cause != mistake.cause
                else ""
            ),
            step=mistake.step if mistake.step is not None else first.step if first is not None else None,
            stage=_stage(first),
            ranks=mistake.ranks,
            evidence={"seconds": hang.seconds, "standings": stack_evidence(groups)}
            | ({"collective": conflict.evidence()} if conflict is not None else {}),
            cause=mistake.cause,
            fix=mistake.fix,
        )
    ]


def _rendezvous(context: RuleContext, rendezvous: RendezvousRecord) -> Finding:
    """Ranks that wait for the process group, and those that have not come."""
    missing, waiting = tuple(rendezvous.missing), tuple(rendezvous.waiting)
    if rendezvous.processes:
        pids = ", ".join(map(str, rendezvous.processes[:_MOST_GROUPS]))
        exist = f"{name_ranks(missing)} had not called it (processes that may become ranks: {pids})"
    else:
        exist = f"no process is left that could become {name_ranks(missing)}"
    return context.finding(
        RULE,
        f"{name_ranks(waiting).capitalize()} waited in init_process_group for {rendezvous.seconds:.0f} seconds: "
        f"{exist}.",
        ranks=missing,
        evidence={
            "seconds": rendezvous.seconds,
            "world_size": rendezvous.world_size,
            "waiting": list(waiting),
            "missing": list(missing),
            "init_process_group_at": rendezvous.where,
        },
        cause=f"{name_ranks(missing)} never joined the process group of {rendezvous.world_size} ranks",
        fix="Start as many processes as WORLD_SIZE says, each with a rank of its own, and look at the output of "
        "those that have ended. Nothing before init_process_group may wait for another rank.",
    )


def _opening(hang: Hang, gave_up: bool) -> str:
    if gave_up:
        return f"No rank made progress for {hang.seconds:.0f} s, and torch's own timeout ended the job. Last seen:"
    return f"No rank made progress for {hang.seconds:.0f} s, so ddpcheck stopped the job:"


def _first_waiting(stacks: Sequence[RankStack]) -> RankStack | None:
    """The waiting rank that is furthest behind; ranks that wait inside DDP come first."""
    inside_ddp = [stack for stack in stacks if _stage(stack) is not None]
    waiting = inside_ddp or [stack for stack in stacks if stack.wait is not None]
    return min(waiting, key=lambda stack: (stack.step, _ORDER.get(_stage(stack) or "", 0)), default=None)


def _stage(stack: RankStack | None) -> str | None:
    stage = _STAGES.get(stack.wait.kind) if stack is not None and stack.wait is not None else None
    return stage.value if stage is not None else None
