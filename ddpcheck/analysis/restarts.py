"""Which starts of an elastic job were made good by a later one."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.records.session_name import of_one_job

_JOB = "TORCHELASTIC_RUN_ID"


def made_good_by(attempts: Sequence[Attempt], rows: Sequence[Sequence[RankSummary]]) -> list[int | None]:
    """For each attempt the number of the restart in which all ranks finished; None where there was none."""
    return [_made_good_by(number, attempts, rows) for number in range(len(attempts))]


def _made_good_by(
    number: int, attempts: Sequence[Attempt], rows: Sequence[Sequence[RankSummary]]
) -> int | None:
    for later in range(number + 1, len(attempts)):
        if not _restarts(attempts[later - 1], attempts[later]):
            return None
        if all(row.status is RankStatus.FINISHED for row in rows[later]):
            return later
    return None


def _restarts(earlier: Attempt, later: Attempt) -> bool:
    """Whether one torchrun started both; another job in the same run, however alike, makes nothing good."""
    if of_one_job(earlier.session, later.session):
        return True
    # Older torchruns make a new store for every attempt.
    same_job = _jobs(earlier) == _jobs(later) != {""}
    return same_job and _restart(later) > _restart(earlier)


def _jobs(attempt: Attempt) -> set[str]:
    return {rank.header.environment.get(_JOB, "") for rank in attempt.ranks.values()}


def _restart(attempt: Attempt) -> int:
    return max((rank.header.restart for rank in attempt.ranks.values()), default=0)
