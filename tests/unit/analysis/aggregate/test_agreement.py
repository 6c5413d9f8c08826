"""Digests of ranks wait until all have reported, and are compared then."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.aggregate.agreement import Agreement, PendingValues, groups_of, outlier_ranks
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind

FOUR = ((0, 1, 2, 3), 0)
TWO = ((0, 1), 0)


def digest_record(root: str, step: int = 0, stage: Stage = Stage.PARAMS, **more: object) -> DigestRecord:
    fields = {"optimizer": 0, "forward": step + 1, **more}
    return DigestRecord(0, stage.value, step, root, "", 2, **fields)  # type: ignore[arg-type]


def first(agreement: Agreement, module: object = FOUR, stage: Stage = Stage.PARAMS) -> object:
    return agreement.stats_of(module, stage, TensorKind.PARAMETERS).first  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("roots", "outliers"),
    [
        ("aaab", (3,)),
        ("baaa", (0,)),
        ("aabb", (0, 1, 2, 3)),
        ("abcd", (0, 1, 2, 3)),
        ("aabc", (0, 1, 2, 3)),
        ("ab", (0, 1)),
        ("aab", (2,)),
        ("aaabb", (3, 4)),
    ],
)
def test_the_minority_are_outliers_and_without_a_majority_all_ranks(
    roots: str, outliers: tuple[int, ...]
) -> None:
    groups = groups_of(dict(enumerate(roots)))
    assert outlier_ranks([ranks for _, ranks in groups]) == outliers


def test_the_largest_group_comes_first_and_ties_go_to_the_lowest_rank() -> None:
    assert groups_of({3: "a", 0: "b", 1: "a", 2: "b", 4: "a"}) == [("a", (1, 3, 4)), ("b", (0, 2))]
    assert groups_of({1: "x", 0: "y"}) == [("y", (0,)), ("x", (1,))]


def test_the_first_disagreement_is_kept_and_all_are_counted() -> None:
    agreement = Agreement()
    for step in range(5):
        for rank in range(4):
            agreement.add(rank, FOUR, digest_record("other" if rank == 2 and step >= 3 else "same", step))
    agreement.end_all()
    stats = agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS)
    assert (stats.compared, stats.differing) == (5, 2)
    assert stats.first is not None
    assert stats.first.key.step == 3
    assert stats.first.outlier_ranks() == (2,)


def test_nothing_is_compared_before_all_ranks_reported() -> None:
    agreement = Agreement()
    for rank in range(3):
        agreement.add(rank, FOUR, digest_record(str(rank)))
    assert agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS).compared == 0
    agreement.add(3, FOUR, digest_record("3"))
    stats = agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS)
    # Whether they still differ when they are used is not known yet.
    assert (stats.compared, stats.differing) == (1, 0)
    for rank in range(4):
        agreement.add(rank, FOUR, digest_record(f"then {rank}", 1))
    assert (stats.compared, stats.differing) == (2, 1)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    agreement = Agreement()
    for rank in range(3):
        agreement.add(rank, FOUR, digest_record("other" if rank == 1 else "same", 7))
    agreement.end_rank(3)
    for rank in range(3):
        agreement.add(rank, FOUR, digest_record("same", 8))
    disagreement = first(agreement)
    assert disagreement.outlier_ranks() == (1,)  # type: ignore[attr-defined]
    assert agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS).compared == 2


def test_at_the_end_all_reported_ranks_are_compared() -> None:
    agreement = Agreement()
    agreement.add(0, FOUR, digest_record("a"))
    agreement.add(2, FOUR, digest_record("b"))
    agreement.add(1, FOUR, digest_record("alone", 1))
    agreement.end_all()
    stats = agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS)
    assert (stats.compared, stats.differing) == (1, 1)


def test_other_groups_and_optimizers_are_ignored() -> None:
    agreement = Agreement()
    agreement.add(0, TWO, digest_record("a"))
    agreement.add(1, TWO, digest_record("a"))
    agreement.add(2, ((2, 3), 0), digest_record("b"))
    agreement.add(3, ((2, 3), 0), digest_record("b"))
    agreement.add(0, TWO, digest_record("c", optimizer=1))
    agreement.add(1, TWO, digest_record("c", optimizer=1))
    assert [stats.differing for stats in agreement.stats.values()] == [0, 0]


def test_parts_of_a_sharded_state_are_not_compared() -> None:
    agreement = Agreement()
    for rank, part in ((0, "x"), (1, "y")):
        agreement.add(rank, TWO, digest_record(str(rank), stage=Stage.STATE, of="state", hyper=part))
    agreement.end_all()
    assert agreement.stats_of(TWO, Stage.STATE, TensorKind.STATE).compared == 0
    for rank in (0, 1):
        agreement.add(rank, TWO, digest_record(str(rank), 1, stage=Stage.STATE, of="state", hyper="x"))
    assert agreement.stats_of(TWO, Stage.STATE, TensorKind.STATE).differing == 1


def test_hyperparameters_and_forwards_are_compared_as_well() -> None:
    agreement = Agreement()
    for step in range(3):
        agreement.add(0, TWO, digest_record("a", step, hyper="x", forward=step))
        agreement.add(1, TWO, digest_record("a", step, hyper="y" if step else "x", forward=step + (step > 1)))
    assert agreement.hyper[TWO].key.step == 1
    assert agreement.forwards[TWO].key.step == 2
    assert first(agreement, TWO) is None


def wrapped(agreement: Agreement, step: int) -> None:
    """Both ranks have the same parameters up to `step`."""
    for rank in (0, 1):
        agreement.add(rank, TWO, digest_record("w", -1, Stage.INIT_AFTER, optimizer=None))
    for each in range(step):
        for rank in (0, 1):
            agreement.add(rank, TWO, digest_record(f"s{each}", each))


def step(agreement: Agreement, number: int, *roots: str) -> None:
    for rank, root in enumerate(roots):
        agreement.add(rank, TWO, digest_record(root, number))


@pytest.mark.parametrize("number", [0, 3])
def test_a_rank_that_rewrote_its_parameters_is_compared_with_the_last_values(number: int) -> None:
    agreement = Agreement()
    wrapped(agreement, number)
    agreement.add(1, TWO, digest_record("mine", number, Stage.REWRITTEN))
    step(agreement, number, "a", "b")
    root = agreement.rewritten[TWO]
    assert root.key.step == number
    assert [(rank, record.stage) for rank, record in sorted(root.digests.items())][1] == (1, "rewritten")


def test_ranks_that_rewrote_alike_agree() -> None:
    agreement = Agreement()
    wrapped(agreement, 2)
    for rank in (0, 1):
        agreement.add(rank, TWO, digest_record("loaded", 2, Stage.REWRITTEN))
    step(agreement, 2, "a", "a")
    assert agreement.rewritten == {}


def test_a_rank_that_wrote_what_was_there_agrees() -> None:
    agreement = Agreement()
    wrapped(agreement, 2)
    agreement.add(1, TWO, digest_record("s1", 2, Stage.REWRITTEN))
    step(agreement, 2, "a", "b")
    assert agreement.rewritten == {}


def test_rewrites_after_the_divergence_explain_nothing() -> None:
    agreement = Agreement()
    wrapped(agreement, 2)
    step(agreement, 2, "a", "b")
    agreement.add(1, TWO, digest_record("mine", 3, Stage.REWRITTEN))
    step(agreement, 3, "a", "b")
    assert agreement.rewritten == {}


def held(agreement: Agreement) -> int:
    return len(agreement._pending) + len(agreement._rewrites)


def test_memory_stays_constant_over_ten_thousand_steps() -> None:
    agreement = Agreement()
    most = 0
    for number in range(10_000):
        for rank in range(4):
            if number % 10 == 0:
                agreement.add(rank, FOUR, digest_record("r", number, Stage.REWRITTEN))
            agreement.add(rank, FOUR, digest_record("other" if rank == 1 and number > 50 else "same", number))
        most = max(most, held(agreement))
    assert most == 0
    assert agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS).compared == 10_000


def test_a_rank_that_never_reports_does_not_block_the_others() -> None:
    """It may be on a node whose records are elsewhere: its neighbours must still be compared while the job runs."""
    agreement = Agreement()
    most = 0
    for number in range(10_000):
        for rank in range(3):
            agreement.add(
                rank, FOUR, digest_record("other" if rank == 1 and number == 5000 else "same", number)
            )
        most = max(most, held(agreement))
    assert most < 5000
    assert first(agreement) is not None
    agreement.end_all()
    stats = agreement.stats_of(FOUR, Stage.PARAMS, TensorKind.PARAMETERS)
    assert (stats.compared, stats.differing) == (10_000, 1)


GROUP = (0, 1, 2)


def test_complete_once_all_ranks_have_reported() -> None:
    pending: PendingValues[str, int] = PendingValues()
    assert [pending.add("a", GROUP, rank, rank * 10) for rank in (2, 0, 0, 1)] == [False, False, False, True]
    assert pending.take("a") == {0: 0, 1: 10, 2: 20}
    assert len(pending) == 0


def test_ranks_that_ended_are_not_waited_for() -> None:
    pending: PendingValues[str, int] = PendingValues()
    pending.add("a", GROUP, 0, 1)
    pending.add("b", GROUP, 0, 1)
    pending.add("b", GROUP, 1, 1)
    assert pending.end_rank(2) == ["b"]
    assert pending.end_rank(2) == []
    assert pending.end_rank(1) == ["a"]
    # Nor for later keys.
    assert pending.add("c", GROUP, 0, 1)
    assert pending.active({0, 1, 2}) == {0}


def test_values_of_a_rank_that_ended_are_kept() -> None:
    pending: PendingValues[str, int] = PendingValues()
    pending.end_rank(2)
    pending.add("a", GROUP, 2, 5)
    pending.add("a", GROUP, 0, 5)
    assert pending.add("a", GROUP, 1, 5)
    assert set(pending.take("a")) == {0, 1, 2}


def test_the_oldest_key_is_the_first_that_was_reported() -> None:
    pending: PendingValues[str, int] = PendingValues()
    for key in "cab":
        pending.add(key, GROUP, 0, 1)
    assert pending.oldest() == "c"
    assert list(pending) == ["c", "a", "b"]
