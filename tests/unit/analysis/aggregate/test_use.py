"""A difference after a step counts if it is still there where the parameters are used."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.aggregate.agreement import Agreement
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord

TWO = ((0, 1), 0)
PARAMS, REWRITTEN, USED = Stage.PARAMS, Stage.REWRITTEN, Stage.USED


class Ranks:
    """Two ranks whose records are added in turns."""

    def __init__(self, on_device: bool = False) -> None:
        self.agreement = Agreement(hashes={0: "", 1: ""})
        if on_device:
            self.agreement.unsampled.add(TWO)

    def add(self, stage: Stage, step: int, *roots: str | None, optimizer: int = 0, forward: int = 0) -> Ranks:
        for rank, root in enumerate(roots):
            if root is not None:
                record = DigestRecord(0, stage.value, step, root, "", 2, optimizer=optimizer, forward=forward)
                self.agreement.add(rank, TWO, record)
        return self

    def apply(self, step: int, *roots: str) -> Ranks:
        for rank, root in enumerate(roots):
            self.agreement.add(rank, TWO, AppliedRecord(step=step, root=root, last="unsynced"))
        return self

    def end(self) -> Ranks:
        self.agreement.end_all()
        return self

    def first(self, stage: Stage = PARAMS, of: TensorKind = TensorKind.PARAMETERS) -> int | None:
        first = self.agreement.stats_of(TWO, stage, of).first
        return None if first is None else first.key.step


def test_parts_that_ranks_exchange_after_the_step_are_no_divergence() -> None:
    ranks = Ranks()
    for step in range(4):
        if step:
            ranks.add(REWRITTEN, step, f"all {step}", f"all {step}", forward=step + 1)
        ranks.add(PARAMS, step, f"0 {step}", f"1 {step}", forward=step + 1)
    ranks.add(USED, 3, "all 4", "all 4", forward=4).end()
    assert ranks.first() is None
    assert ranks.agreement.reunions[TWO].count == 4
    assert not ranks.agreement.averaged(TWO)
    assert ranks.agreement.rewritten == {}


def test_the_last_step_counts_if_nothing_was_exchanged_after_it() -> None:
    ranks = Ranks().add(PARAMS, 0, "0", "1", forward=1).add(REWRITTEN, 1, "all", "all", forward=2)
    assert ranks.add(PARAMS, 1, "0 later", "1 later", forward=2).end().first() == 1


def test_a_rank_that_was_not_written_keeps_the_values_of_its_step() -> None:
    """A broadcast from rank 0 writes to the others only."""
    received = Ranks().add(PARAMS, 0, "right", "wrong", forward=1).add(REWRITTEN, 1, None, "right", forward=2)
    assert received.add(PARAMS, 1, "equal", "equal", forward=2).end().first() is None
    wrong = Ranks().add(PARAMS, 0, "right", "wrong", forward=1).add(REWRITTEN, 1, None, "other", forward=2)
    assert wrong.add(PARAMS, 1, "equal", "equal", forward=2).end().first() == 0


def test_on_a_device_only_a_use_that_all_ranks_recorded_decides() -> None:
    """Writes by `.data` are not noticed there, and each rank learns late that replicas differed."""
    ranks = Ranks(on_device=True)
    for step in range(5):
        ranks.add(PARAMS, step, f"0 {step}", f"1 {step}", forward=step + 1)
        if step >= 1:
            ranks.add(USED, step, f"all {step}", None, forward=step + 2)
        if step >= 3:
            ranks.add(USED, step, None, f"all {step}", forward=step + 2)
    assert ranks.end().first() is None
    assert ranks.agreement.reunions[TWO].count == 5


def test_on_a_device_a_divergence_has_its_first_step() -> None:
    ranks = Ranks(on_device=True)
    for step in range(2, 6):
        ranks.add(PARAMS, step, f"0 {step}", f"1 {step}", forward=step + 1)
    assert ranks.first() is None
    assert ranks.add(USED, 5, "0 5", "1 5", forward=7).first() == 2
    unread = Ranks(on_device=True).add(PARAMS, 2, "0", "1", forward=3).add(PARAMS, 3, "0", "1", forward=4)
    assert unread.end().first() == 2


def test_on_a_device_averages_count_also_if_one_rank_is_read_first() -> None:
    """Its records are known when the others have diverged."""
    ranks = Ranks(on_device=True)
    for rank in range(2):
        for step in range(6):
            values = [f"{rank} {step}" if number == rank else None for number in range(2)]
            ranks.add(PARAMS, step, *values, forward=step + 1)
            after = [value and (f"mean {step}" if step in (2, 5) else value) for value in values]
            ranks.add(USED, step, *after, forward=step + 1)
    ranks.end()
    assert ranks.agreement.reunions[TWO].averaged == [2, 5]
    assert ranks.agreement.averaged(TWO)


def partly_stepped(used: tuple[str, str], forward: int = 1) -> Ranks:
    """The second optimizer steps parameters on rank 0 only, then each rank receives what it does not step."""
    ranks = (
        Ranks(on_device=True)
        .add(PARAMS, 0, "0", "1", forward=1)
        .add(PARAMS, 0, "0b", None, optimizer=1, forward=1)
    )
    ranks.add(USED, 0, used[0], None, optimizer=1, forward=1)
    return ranks.add(USED, 0, None, used[1], forward=forward)


def test_on_a_device_the_last_optimizer_of_a_step_may_be_another_on_each_rank() -> None:
    ranks = partly_stepped(("all", "all"))
    assert ranks.agreement.reunions[TWO].count == 1
    assert ranks.end().first() is None
    assert partly_stepped(("0b", "1")).first() == 0


def test_on_a_device_uses_in_different_forwards_are_not_compared() -> None:
    ranks = partly_stepped(("all", "all later"), forward=2)
    assert ranks.first() is None
    assert TWO not in ranks.agreement.reunions


def test_nothing_is_decided_before_the_parameters_are_used() -> None:
    ranks = Ranks().add(PARAMS, 3, "0", "1", forward=4)
    assert ranks.first() is None
    assert ranks.add(USED, 3, "0", None, forward=4).first() is None
    assert ranks.add(USED, 3, None, "1", forward=4).first() == 3


def test_the_step_of_another_optimizer_before_the_next_forward_is_no_use() -> None:
    ranks = Ranks().add(PARAMS, 0, "0", "1", forward=1).add(PARAMS, 0, "0b", "1b", optimizer=1, forward=1)
    ranks.add(REWRITTEN, 1, "all", "all", forward=2).add(PARAMS, 1, "equal", "equal", forward=2)
    assert ranks.end().first() is None


@pytest.mark.parametrize(("written", "expected"), [("all", None), ("own", 2)])
def test_different_gradients_count_if_the_parameters_do(written: str, expected: int | None) -> None:
    ranks = Ranks().apply(2, "0", "1").add(PARAMS, 2, "0", "1", forward=3)
    values = ("all", "all") if written == "all" else ("0", "1")
    ranks.add(USED, 2, *values, forward=3).end()
    assert ranks.first(Stage.APPLIED, TensorKind.GRADIENTS) == expected


def test_different_gradients_with_equal_parameters_count_as_well() -> None:
    """A step with a learning rate of zero hides them for a while."""
    ranks = Ranks().apply(2, "0", "1").add(PARAMS, 2, "same", "same", forward=3)
    assert ranks.first(Stage.APPLIED, TensorKind.GRADIENTS) == 2


def test_replicas_that_are_averaged_again_and_again() -> None:
    ranks = Ranks()
    for step in range(6):
        if step in (3, 6):
            ranks.add(REWRITTEN, step, f"mean {step}", f"mean {step}", forward=step + 1)
        ranks.add(PARAMS, step, f"0 {step}", f"1 {step}", forward=step + 1)
    assert not ranks.agreement.averaged(TWO)
    ranks.add(USED, 5, "mean 6", "mean 6", forward=6).end()
    assert ranks.agreement.reunions[TWO].averaged == [2, 5]
    assert ranks.agreement.averaged(TWO)


def test_memory_does_not_grow_with_steps() -> None:
    ranks = Ranks()
    for step in range(500):
        ranks.add(PARAMS, step, f"{step}", f"{step}", forward=step + 1)
    use = ranks.agreement._use
    assert len(use._used) <= 2
    assert max(map(len, use._open.values())) == 1
