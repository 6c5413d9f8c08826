"""DDP601: no rank, or not every rank, reported."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import RankStatus
from ddpcheck.formatting import name_ranks


def find(case: RuleContext) -> list[Finding]:
    # Where ddpcheck itself failed, DDP605 says so: that is no mistake of the user's.
    if not case.attempt.ranks:
        return [] if case.strays or case.troubles else [_nobody(case)]
    stranded = {fault.rank for fault in case.strays} | set(case.troubles)
    missing = tuple(row.rank for row in case.with_status(RankStatus.MISSING) if row.rank not in stranded)
    if not missing:
        return []
    reported = tuple(sorted(case.attempt.ranks))
    return [
        case.finding(
            "DDP601",
            f"The job has {case.attempt.world_size} ranks, but only {name_ranks(reported)} reported; nothing "
            f"is known of {name_ranks(missing)}.",
            ranks=missing,
            evidence={"reported": list(reported), "world_size": case.attempt.world_size},
            cause="these ranks started without ddpcheck, died before their process group was made, or write "
            "elsewhere",
            fix="Start every rank under ddpcheck run, with the run folder where all of them can write, or "
            "put 'import ddpcheck.auto' at the top of the script.",
        )
    ]


def _nobody(case: RuleContext) -> Finding:
    failed = case.exit_code not in (None, 0)
    told = f" The command itself failed (exit status {case.exit_code})." if failed else ""
    return case.finding(
        "DDP601",
        "No process under the command made a process group or a DDP module, so there was nothing to check."
        + told,
        evidence={"exit_code": case.exit_code},
        cause="the command failed before it came to that"
        if failed
        else "the command does not train with DDP (some launchers quietly start one process only), or its "
        "Python runs with -S, -I or -E and leaves injected code out",
        fix="Check the command by itself first."
        if failed
        else "Put the launcher behind 'ddpcheck run --'; under python -S/-I/-E put 'import ddpcheck.auto' at "
        "the top of the script.",
    )
