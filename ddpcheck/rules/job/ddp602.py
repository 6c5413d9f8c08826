"""DDP602: a rank died, and its last step and stage."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.exit_status import crash_at_exit, lost_peer
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.formatting import name_ranks

KILLED = "killed (out of memory, the scheduler, a signal) or crashed in native code"


AT_EXIT = "a crash while Python shut down, after this rank had done its work"
# pytorch#179291
GLOO_AT_EXIT = (
    "; with gloo most often because a DDP object outlives destroy_process_group: torch holds it in a cycle of "
    "references, and a thread of gloo then needs an interpreter that is ending"
)
FIX = (
    "Read that rank's own output first: the errors of the other ranks follow from its death. For a kill without "
    "a message look at the kernel log for the out-of-memory killer."
)
FIX_AT_EXIT = (
    "Delete the model and the optimizer and call gc.collect() before destroy_process_group(), so that nothing of them "
    "is left when Python ends. What the rank had to do was done."
)
FIX_EARLY = (
    "Let all ranks decide together when to stop, and give every rank the same number of batches, or train "
    "inside DDP's join()."
)


def find(case: RuleContext) -> list[Finding]:
    rows = case.with_status(RankStatus.DIED, RankStatus.RAISED)
    if not rows:
        return []
    # Who died first of all is told by its status; its end may have been seen after the others' complaints.
    # One that had done its work may have crashed because another one failed, and is not to blame before that.
    failed = any(row.status is RankStatus.RAISED and not lost_peer(row.detail) for row in rows)
    rows.sort(
        key=lambda row: (
            failed and bool(_at_exit(case, row)),
            row.status is RankStatus.RAISED,
            _ended(case, row),
        )
    )
    first = rows[0]
    # Ranks that left in another way lost their partner: their errors are consequences.
    alike = [row for row in rows if _how(row) == _how(first)]
    ranks = tuple(sorted(row.rank for row in alike))
    recovered = case.made_good_by is not None
    early = _ended_before(case, rows)
    return [
        case.finding(
            "DDP602",
            f"{name_ranks(ranks).capitalize()} {_told(first)}; last seen {_where(first)}."
            + _followed(rows, alike)
            + (f" {name_ranks(early).capitalize()} had ended in good order before that." if early else "")
            + (f" The restart that followed (attempt {case.made_good_by}) finished." if recovered else ""),
            # Restarts are there for this, so it fails nobody's run; but a death should be seen.
            severity=Severity.WARNING if recovered else Severity.ERROR,
            step=first.last_step,
            stage=first.last_stage or None,
            ranks=ranks,
            evidence={
                "last_seen": {str(row.rank): _where(row) for row in rows},
                "details": {str(row.rank): row.detail for row in rows if row.detail},
                "made_good_by": case.made_good_by,
            },
            cause=_cause(case, first, early),
            fix=FIX_EARLY if early else FIX_AT_EXIT if _at_exit(case, first) else FIX,
        )
    ]


def _ended_before(case: RuleContext, rows: list[RankSummary]) -> tuple[int, ...]:
    """Ranks that left in good order, where all that the others say is that their partner has gone."""
    if not all(row.status is RankStatus.RAISED and lost_peer(row.detail) for row in rows):
        return ()
    first = min(_ended(case, row) for row in rows)
    done = case.with_status(RankStatus.FINISHED)
    return tuple(row.rank for row in done if _ended(case, row) <= first)


def _at_exit(case: RuleContext, row: RankSummary) -> str:
    return crash_at_exit(case.attempt.ranks[row.rank], case.notes)


def _cause(case: RuleContext, first: RankSummary, early: tuple[int, ...]) -> str:
    if early:
        return (
            f"early stop on some ranks: {name_ranks(early)} ended while others still trained, and took the "
            "connections along"
        )
    if _at_exit(case, first):
        by_gloo = (
            case.attempt.ranks[first.rank].header.backend == "gloo" and _at_exit(case, first) == "SIGABRT"
        )
        return AT_EXIT + (GLOO_AT_EXIT if by_gloo else "")
    return first.detail if first.status is RankStatus.RAISED else KILLED


def _ended(case: RuleContext, row: RankSummary) -> float:
    """When the rank said goodbye, or else when it was seen to be gone."""
    end = case.attempt.ranks[row.rank].end
    return end.time if end is not None else case.notes.exits.get((row.host, row.pid), float("inf"))


def _how(row: RankSummary) -> tuple[RankStatus, str]:
    """Kind of end, with the exception but not its place: the same mistake may be met on different lines."""
    return row.status, row.detail.rpartition(" (")[0] or row.detail


def _told(row: RankSummary) -> str:
    if row.status is RankStatus.RAISED:
        return f"left by {row.detail}"
    if row.detail:
        return f"was ended by {row.detail}"
    return "vanished without a word, as after SIGKILL or a crash"


def _followed(rows: list[RankSummary], alike: list[RankSummary]) -> str:
    others = tuple(row.rank for row in rows if row not in alike)
    return f" Then {name_ranks(others)} failed too, which is a consequence." if others else ""


def _where(row: RankSummary) -> str:
    if row.last_step is None:
        return "before its first record"
    at = "while wrapping" if row.last_step < 0 else f"at step {row.last_step}"
    return f"{at} (stage {row.last_stage})"
