"""DDP602: a rank died, and its last step and stage."""

from __future__ import annotations

import re
from signal import SIGABRT

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.exit_status import crash_at_exit, lost_peer
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hang.causes import WRAP_EVERYWHERE, Mistake, not_reduced_by_some, wrapped_by_some
from ddpcheck.analysis.hang.stall import stall_that_ended_the_job
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.formatting import name_ranks
from ddpcheck.records.backend_names import is_gloo
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
# gloo raises it in a thread of its own, so it reaches stderr and not the program.
_GLOO_ABORTED = (
    "aborted (SIGABRT). With gloo most often a collective mismatch: ranks called collectives of different sizes at the "
    "same time, and the rank's stderr has 'op.preamble.length <= op.nbytes'"
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
_FIX_MISMATCH = (
    "Call every collective on all ranks of its group, in the same order and with the same sizes: do not put it under "
    "conditions that depend on the rank or on its data."
)
# The status with which a rank ended itself, without an exception.
_OWN_STATUS = re.compile(r"exit status .*")
# Messages of torch's own check of collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL), and of gloo.
_MISMATCH = re.compile(
    r"detected mismatch between collectives|mismatch between collective|op\.preamble\.length <= op\.nbytes",
    re.IGNORECASE,
)


def find(context: RuleContext) -> list[Finding]:
    rows = context.with_status(RankStatus.DIED, RankStatus.RAISED)
    # DDP603 says which rank did not reach the collective.
    if not rows or stall_that_ended_the_job(context) is not None:
        return []
    by_itself = [row for row in rows if _ended_itself(context, row)]
    if len(by_itself) == len(rows):
        return [_own_status(context, rows)]
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
    left = tuple(row.rank for row in early)
    # Why the others lost those that had ended: an early stop is only the most general explanation.
    why = _why_early(context, first, left) if early else None
    return [
        context.finding(
            RULE,
            f"{name_ranks(ranks).capitalize()} {_ending(first)}; last seen {_last_seen(first)}."
            + _followed(rows, same_end)
            + (f" {name_ranks(left).capitalize()} had ended before that, without an error." if left else "")
            + (f" A later restart (attempt {context.recovered_by}) finished." if recovered else ""),
            # Restarts exist for this, so it does not fail the run.
            severity=Severity.WARNING if recovered else Severity.ERROR,
            step=why.step if why is not None else first.last_step,
            stage=(early[0].last_stage if early else first.last_stage) or None,
            # The errors of the others are consequences.
            ranks=why.ranks if why is not None else ranks,
            evidence={
                "last_seen": {str(row.rank): _last_seen(row) for row in rows},
                "details": {str(row.rank): row.detail for row in rows if row.detail},
                "made_good_by": context.recovered_by,
            },
            cause=why.cause if why is not None else _cause(context, first),
            fix=why.fix if why is not None else _fix(context, first),
        )
    ]


def _why_early(context: RuleContext, first: RankSummary, left: tuple[int, ...]) -> Mistake:
    """Ranks ended without an error while others still waited for them."""
    attempt = context.attempt
    wrapped = wrapped_by_some(attempt)
    if wrapped and not set(wrapped) & set(left) and first.last_step == -1:
        return Mistake(
            wrapped,
            f"DDP is constructed on {name_ranks(wrapped)} only: {name_ranks(left)} did not call its constructor",
            WRAP_EVERYWHERE,
        )
    mistake = not_reduced_by_some(attempt)
    if mistake is not None and set(mistake.ranks) <= set(left):
        return mistake
    last = [attempt.ranks[rank].last for rank in left]
    return Mistake(
        left,
        f"early stop on some ranks: {name_ranks(left)} ended while others still trained, which closed the connections",
        _FIX_EARLY,
        min((record.step for record in last if record is not None), default=None),
    )


def _ended_itself(context: RuleContext, row: RankSummary) -> bool:
    """Whether the rank ended itself with a status other than 0, after it had closed its process group."""
    end = context.attempt.ranks[row.rank].end
    return (
        row.status is RankStatus.RAISED
        and end is not None
        and end.left
        and bool(_OWN_STATUS.fullmatch(end.error))
    )


def _own_status(context: RuleContext, rows: list[RankSummary]) -> Finding:
    """The job ended as it meant to: a test that failed, a metric that was not reached."""
    ranks = tuple(sorted(row.rank for row in rows))
    statuses = sorted({row.detail for row in rows})
    return context.finding(
        RULE,
        f"{name_ranks(ranks).capitalize()} ended with {', '.join(statuses)}, after the process group was closed.",
        severity=Severity.NOTE,
        ranks=ranks,
        evidence={"details": {str(row.rank): row.detail for row in rows}},
        cause="the program's own exit status: no rank died",
        fix="Nothing, if the program reports its result by its exit status.",
    )


def _fix(context: RuleContext, first: RankSummary) -> str:
    if _MISMATCH.search(first.detail) or (not first.detail and _aborted_in_gloo(context, first)):
        return _FIX_MISMATCH
    return _FIX_AT_EXIT if _at_exit(context, first) else _FIX


def _ended_before(context: RuleContext, rows: list[RankSummary]) -> list[RankSummary]:
    """Ranks that ended without an error before the others, if all that those report is the loss of a peer."""
    by_itself = [row for row in rows if _ended_itself(context, row)]
    lost = [row for row in rows if row not in by_itself]
    if not all(row.status is RankStatus.RAISED and lost_peer(row.detail) for row in lost):
        return []
    first = min(_ended(context, row) for row in lost)
    done = [*context.with_status(RankStatus.FINISHED), *by_itself]
    return sorted((row for row in done if _ended(context, row) <= first), key=lambda row: row.rank)


def _at_exit(context: RuleContext, row: RankSummary) -> str:
    return crash_at_exit(context.attempt.ranks[row.rank], context.notes)


def _cause(context: RuleContext, first: RankSummary) -> str:
    if _at_exit(context, first):
        by_gloo = (
            is_gloo(context.attempt.ranks[first.rank].header.backend)
            and _at_exit(context, first) == "SIGABRT"
        )
        return _AT_EXIT + (_GLOO_AT_EXIT if by_gloo else "")
    if _MISMATCH.search(first.detail):
        return f"collective mismatch: ranks called different collectives at the same time ({first.detail})"
    if first.status is RankStatus.RAISED:
        return first.detail
    return _GLOO_ABORTED if _aborted_in_gloo(context, first) else _KILLED


def _aborted_in_gloo(context: RuleContext, row: RankSummary) -> bool:
    return is_gloo(context.attempt.ranks[row.rank].header.backend) and (
        context.notes.signals.get((row.host, row.pid)) == SIGABRT
    )


def _ended(context: RuleContext, row: RankSummary) -> float:
    """When the rank wrote its last record, or else when its exit was noticed."""
    end = context.attempt.ranks[row.rank].end
    return end.time if end is not None else context.notes.exits.get((row.host, row.pid), float("inf"))


def _how(row: RankSummary) -> tuple[RankStatus, str]:
    """The kind of end: the exception without its location, since the same mistake may be raised on different lines."""
    return row.status, row.detail.rpartition(" (")[0] or row.detail


def _ending(row: RankSummary) -> str:
    if row.status is RankStatus.RAISED:
        return f"{'ended with' if _OWN_STATUS.fullmatch(row.detail) else 'raised'} {row.detail}"
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
