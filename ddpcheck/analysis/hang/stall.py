"""Jobs without progress that ddpcheck did not stop, because a rank might have gone on, and torch's timeout ended."""

from __future__ import annotations

import re

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.exit_status import lost_peer
from ddpcheck.analysis.hang.stacks import BUSY
from ddpcheck.analysis.node_notes import Hang
from ddpcheck.analysis.report import RankStatus

# Messages of gloo, NCCL and the stores after the timeout of a collective.
_TIMED_OUT = re.compile(r"tim(?:ed[ -]?|e)out|ncclTimeout|DEADLINE_EXCEEDED", re.IGNORECASE)
# The launcher notices progress up to this much later than it happened.
_MARGIN_SECONDS = 2.0


def timed_out(error: str) -> bool:
    """Whether an error says that a collective did not complete in time."""
    return bool(_TIMED_OUT.search(error))


def stall_that_ended_the_job(context: RuleContext) -> Hang | None:
    """The last time without progress of this attempt, if the job ended by the timeout of a collective in it."""
    stall = context.notes.stalls.get(context.attempt.session)
    if stall is None or BUSY not in stall.states.values():
        return None
    raised = [row.detail for row in context.with_status(RankStatus.RAISED)]
    if not any(map(timed_out, raised)) or not all(timed_out(text) or lost_peer(text) for text in raised):
        return None
    began = stall.time - stall.seconds
    for rank in context.attempt.ranks.values():
        if rank.last is not None and rank.last.time > began + _MARGIN_SECONDS:
            return None
    return stall
