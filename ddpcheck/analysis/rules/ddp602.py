"""DDP602: a rank died, and its last step and stage."""

from __future__ import annotations

from ddpcheck.analysis.case import Case, name_ranks
from ddpcheck.analysis.findings import Finding
from ddpcheck.analysis.result import RankStatus, RankSummary


def find(case: Case) -> list[Finding]:
    rows = case.with_status(RankStatus.DIED, RankStatus.RAISED)
    if not rows:
        return []
    first = rows[0]
    ranks = tuple(row.rank for row in rows)
    last = {str(row.rank): _where(row) for row in rows}
    raised = first.status is RankStatus.RAISED
    how = f"left by {first.detail}" if raised else "vanished without a word, as after SIGKILL or a crash"
    return [
        case.finding(
            "DDP602",
            f"{name_ranks(ranks)[0].upper()}{name_ranks(ranks)[1:]} {how}; last seen {_where(first)}.",
            step=first.last_step,
            stage=first.last_stage or None,
            ranks=ranks,
            evidence={"last_seen": last, "details": {str(row.rank): row.detail for row in rows if row.detail}},
            cause=first.detail if raised else "killed (out of memory, the scheduler, a signal) or crashed in native code",
            fix="Read that rank's own output first: the errors of the other ranks follow from its death. For a kill "
            "without a message look at the kernel log for the out-of-memory killer.",
        )
    ]


def _where(row: RankSummary) -> str:
    if row.last_step is None:
        return "before its first record"
    at = "while wrapping" if row.last_step < 0 else f"at step {row.last_step}"
    return f"{at} (stage {row.last_stage})"
