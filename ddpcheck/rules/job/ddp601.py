"""DDP601: no rank, or not every rank, reported."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import RankStatus
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP601",
    severity=Severity.ERROR,
    title="Some or all ranks did not report",
    summary="no rank, or not every rank, reported",
    needs=(),
    incomplete=True,
    # A rank that died or hangs explains why others did not report.
    order=603.5,
)


def find(context: RuleContext) -> list[Finding]:
    # If ddpcheck itself failed, DDP605 reports it.
    if not context.attempt.ranks:
        return [] if context.unattributed_faults or context.write_errors else [_no_rank(context)]
    failed = {fault.rank for fault in context.unattributed_faults} | set(context.write_errors)
    missing = tuple(row.rank for row in context.with_status(RankStatus.MISSING) if row.rank not in failed)
    if not missing:
        return []
    reported = tuple(sorted(context.attempt.ranks))
    return [
        context.finding(
            RULE,
            f"The job has {context.attempt.world_size} ranks, but only {name_ranks(reported)} reported. There are "
            f"no records of {name_ranks(missing)}.",
            ranks=missing,
            evidence={"reported": list(reported), "world_size": context.attempt.world_size},
            cause="these ranks started without ddpcheck, died before they created their process group, or write "
            "to another folder",
            fix="Start every rank under ddpcheck run, with a run folder that all of them can write to, or "
            "add 'import ddpcheck.auto' at the top of the script.",
        )
    ]


def _no_rank(context: RuleContext) -> Finding:
    failed = context.exit_code not in (None, 0)
    ending = f" The command itself failed (exit status {context.exit_code})." if failed else ""
    return context.finding(
        RULE,
        "No process of the command created a process group or a DDP module, so there was nothing to check."
        + ending,
        evidence={"exit_code": context.exit_code},
        cause="the command failed before it created one"
        if failed
        else "the command does not train with DDP (some launchers silently start only one process), or its "
        "Python runs with -S, -I or -E and ignores injected code",
        fix="Run the command without ddpcheck first."
        if failed
        else "Put the launcher behind 'ddpcheck run --'. With python -S/-I/-E, add 'import ddpcheck.auto' at "
        "the top of the script.",
    )
