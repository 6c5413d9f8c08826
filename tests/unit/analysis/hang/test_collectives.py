"""Which collective stops a job, and which rank is at fault."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.hang.collectives import ConflictKind, find_conflict, has_pending, pending_operation
from ddpcheck.records.kinds.rank import GroupProgress, StackRecord


def group(enqueued: int, completed: int | None, *calls: tuple[str, list[Any]]) -> dict[str, GroupProgress]:
    """`calls`: the last ones, up to `enqueued`."""
    first = enqueued - len(calls) + 1
    recent = [[first + n, name, sizes, "scheduled"] for n, (name, sizes) in enumerate(calls)]
    return {"0": GroupProgress(enqueued, completed, recent)}


REDUCE = ("all_reduce", [[4, 5]])
SMALL = ("all_reduce", [[4]])
BARRIER: tuple[str, list[Any]] = ("barrier", [])


def test_the_rank_that_did_not_enqueue_a_collective() -> None:
    conflict = find_conflict(
        {0: group(7, 6, BARRIER, REDUCE), 1: group(6, 6, BARRIER), 2: group(7, 6, BARRIER, REDUCE)}
    )
    assert conflict is not None
    assert (conflict.kind, conflict.number, conflict.ranks) == (ConflictKind.MISSING, 7, (1,))
    assert (conflict.calls[0], conflict.last[1]) == ("all_reduce of 4x5", "barrier")
    assert conflict.cause.startswith(
        "rank 1 did not enqueue collective 7 of process group 0 (all_reduce of 4x5)"
    )


def test_numbers_alone_name_the_rank() -> None:
    conflict = find_conflict({0: group(7, None), 1: group(7, None), 2: group(5, None)})
    assert conflict is not None
    assert (conflict.number, conflict.ranks) == (6, (2,))


def test_different_sizes_under_one_number() -> None:
    conflict = find_conflict({0: group(7, 6, REDUCE), 1: group(7, 6, SMALL), 2: group(7, 6, REDUCE)})
    assert conflict is not None
    assert (conflict.kind, conflict.ranks) == (ConflictKind.MISMATCH, (1,))
    assert conflict.evidence()["calls"]["1"] == "all_reduce of 4"


def test_different_operations_under_one_number() -> None:
    """The first one counts: all later ones are shifted."""
    conflict = find_conflict(
        {
            rank: group(7, 5, BARRIER if rank == 2 else REDUCE, REDUCE if rank == 2 else SMALL)
            for rank in range(3)
        }
    )
    assert conflict is not None
    assert (conflict.kind, conflict.number, conflict.ranks) == (ConflictKind.MISMATCH, 6, (2,))


def test_a_root_may_pass_other_sizes() -> None:
    assert find_conflict({0: group(3, 3, ("gather", [[8], [8]])), 1: group(3, 3, ("gather", [[8]]))}) is None


def test_a_collective_that_all_ranks_wait_in() -> None:
    conflict = find_conflict({0: group(7, 6, REDUCE), 1: group(7, 6, REDUCE)})
    assert conflict is not None
    assert (conflict.kind, conflict.ranks) == (ConflictKind.INCOMPLETE, (0, 1))


def test_equal_and_complete_groups_have_no_conflict() -> None:
    assert find_conflict({0: group(7, 7, REDUCE), 1: group(7, 7, REDUCE)}) is None
    assert find_conflict({0: group(7, None), 1: group(7, None)}) is None


def test_pending() -> None:
    assert has_pending(group(7, 6))
    assert not has_pending(group(7, 7))
    assert not has_pending(group(7, None))
    assert pending_operation(group(7, 6, REDUCE)) == "all_reduce of 4x5 (number 7 of group 0)"


def test_rows_of_another_form_are_left_out() -> None:
    record = StackRecord(1, 0.0, [], groups={"0": [7, 6, [], [0, 1]], "1": ["x"]})
    assert record.progress() == {"0": GroupProgress(7, 6, [], [0, 1])}
