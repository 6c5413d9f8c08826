"""Write errors are assigned to the attempt of their process."""

from __future__ import annotations

from ddpcheck.analysis.node_notes import WriteError, write_errors_by_attempt
from ddpcheck.analysis.report import RankStatus, RankSummary


def row(rank: int, pid: int) -> RankSummary:
    return RankSummary(rank, RankStatus.FINISHED, host="a", pid=pid)


FIRST, SECOND = (row(0, 10), row(1, 11)), (row(0, 20), row(1, 21))
GONE = (row(0, 30), RankSummary(1, RankStatus.MISSING))


def test_by_process() -> None:
    assert write_errors_by_attempt([WriteError(1, "full", ("a", 11))], [FIRST, SECOND]) == [{1: "full"}, {}]
    assert write_errors_by_attempt([WriteError(1, "full", ("a", 21))], [FIRST, SECOND]) == [{}, {1: "full"}]


def test_without_a_process_every_attempt_has_the_error() -> None:
    assert write_errors_by_attempt([WriteError(1, "full")], [FIRST, SECOND]) == [{1: "full"}, {1: "full"}]


def test_the_error_of_a_rank_without_records() -> None:
    unknown = WriteError(1, "full", ("a", 31))
    assert write_errors_by_attempt([unknown], [FIRST, GONE, SECOND]) == [{}, {1: "full"}, {}]
    assert write_errors_by_attempt([unknown], [()]) == [{1: "full"}]
