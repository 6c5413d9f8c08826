"""DDP602: a rank died, and its last step and stage."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.exit_status import crash_at_exit, lost_peer
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP602",
    severity=Severity.ERROR,
    title="A rank died",
    summary="a rank died: which one, and where",
    needs=(),
)

_KILLED = "killed (out of memory, the scheduler, a signal) or crashed in native code"
_AT_EXIT = "a crash while Python shut down, after this rank had finished its work"
# pytorch#179291
_GLOO_AT_EXIT = (
    "; with gloo most often because a DDP object outlives destroy_process_group: torch keeps it in a reference cycle, "
    "and a gloo thread then needs an interpreter that is shutting down"
)
_FIX = (
    "Read that rank's own output first: the errors of the other ranks are consequences. If it was killed without a "
    "message, look for the out-of-memory killer in the kernel log."
)
_FIX_AT_EXIT = (
    "Delete the model and the optimizer and call gc.collect() before destroy_process_group(), so that none of them "
    "exists when Python shuts down. The rank had finished its work."
)
_FIX_EARLY = (
    "Let all ranks decide together when to stop, and give every rank the same number of batches, or train "
    "inside DDP's join()."
)


def find(context: RuleContext) -> list[Finding]:
    rows = context.with_status(RankStatus.DIED, RankStatus.RAISED)
    if not rows:
        return []
    # A rank that died comes first: its end may have been noticed after the others' exceptions. A rank that had
    # finished its work may have crashed because another one failed, so it comes after that one.
    failed = any(row.status is RankStatus.RAISED and not lost_peer(row.detail) for row in rows)
    rows.sort(
        key=lambda row: (
            failed and bool(_at_exit(context, row)),
            row.status is RankStatus.RAISED,
            _ended(context, row),
        )
    )
    first = rows[0]
    # Ranks that ended in another way lost their peer: their errors are consequences.
    same_end = [row for row in rows if _how(row) == _how(first)]
    ranks = tuple(sorted(row.rank for row in same_end))
    recovered = context.recovered_by is not None
    early = _ended_before(context, rows)
    return [
        context.finding(
            RULE,
            f"{name_ranks(ranks).capitalize()} {_ending(first)}; last seen {_last_seen(first)}."
            + _followed(rows, same_end)
            + (f" {name_ranks(early).capitalize()} had finished normally before that." if early else "")
            + (f" A later restart (attempt {context.recovered_by}) finished." if recovered else ""),
            # Restarts exist for this, so it does not fail the run.
            severity=Severity.WARNING if recovered else Severity.ERROR,
            step=first.last_step,
            stage=first.last_stage or None,
            ranks=ranks,
            evidence={
                "last_seen": {str(row.rank): _last_seen(row) for row in rows},
                "details": {str(row.rank): row.detail for row in rows if row.detail},
                "made_good_by": context.recovered_by,
            },
            cause=_cause(context, first, early),
            fix=_FIX_EARLY if early else _FIX_AT_EXIT if _at_exit(context, first) else _FIX,
        )
    ]


def _ended_before(context: RuleContext, rows: list[RankSummary]) -> tuple[int, ...]:
    """Ranks that finished normally, if all that the others report is the loss of a peer."""
    if not all(row.status is RankStatus.RAISED and lost_peer(row.detail) for row in rows):
        return ()
    first = min(_ended(context, row) for row in rows)
    done = context.with_status(RankStatus.FINISHED)
    return tuple(row.rank for row in done if _ended(context, row) <= first)


def _at_exit(context: RuleContext, row: RankSummary) -> str:
    return crash_at_exit(context.attempt.ranks[row.rank], context.notes)


def _cause(context: RuleContext, first: RankSummary, early: tuple[int, ...]) -> str:
    if early:
        return (
            f"early stop on some ranks: {name_ranks(early)} ended while others still trained, which closed the "
            "connections"
        )
    if _at_exit(context, first):
        by_gloo = (
            context.attempt.ranks[first.rank].header.backend == "gloo"
            and _at_exit(context, first) == "SIGABRT"
        )
        return _AT_EXIT + (_GLOO_AT_EXIT if by_gloo else "")
    return first.detail if first.status is RankStatus.RAISED else _KILLED


def _ended(context: RuleContext, row: RankSummary) -> float:
    """When the rank wrote its last record, or else when its exit was noticed."""
    end = context.attempt.ranks[row.rank].end
    return end.time if end is not None else context.notes.exits.get((row.host, row.pid), float("inf"))


def _how(row: RankSummary) -> tuple[RankStatus, str]:
    """The kind of end: the exception without its location, since the same mistake may be raised on different lines."""
    return row.status, row.detail.rpartition(" (")[0] or row.detail


def _ending(row: RankSummary) -> str:
    if row.status is RankStatus.RAISED:
        return f"raised {row.detail}"
    if row.detail:
        return f"was ended by {row.detail}"
    return "ended without a message, as after SIGKILL or a crash"


def _followed(rows: list[RankSummary], same_end: list[RankSummary]) -> str:
    others = tuple(row.rank for row in rows if row not in same_end)
    return f" {name_ranks(others).capitalize()} failed as a consequence." if others else ""


def _last_seen(row: RankSummary) -> str:
    if row.last_step is None:
        return "before its first record"
    when = "while wrapping" if row.last_step < 0 else f"at step {row.last_step}"
    return f"{when} (stage {row.last_stage})"
