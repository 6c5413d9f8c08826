"""DDP301-306: the rules about data, on stored runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.records.kinds.data import BatchRecord, EpochRecord, LoaderRecord
from ddpcheck.records.kinds.modules import JoinRecord, LossRecord
from ddpcheck.records.kinds.state import LossFormRecord
from tests.helpers.run_builder import NAMES, RunBuilder
from tests.unit.analysis.data.test_collector import packed

HEALTHY = {"shuffle": True, "replicas": 2, "seed": 0, "mark": "m"}


class DataRun(RunBuilder):
    """A healthy job of two ranks and a few steps, to which data is added."""

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        super().__init__(folder, world_size)
        self.wrap().optimizer().train(4)

    def forwards(self, rows: Sequence[Mapping[str, Sequence[Any]]]) -> DataRun:
        """One row per forward; each field with one value per rank."""
        for forward, row in enumerate(rows):
            for rank in self.ranks:
                self.add(rank, BatchRecord(forward, **{name: values[rank] for name, values in row.items()}))
        return self

    def loader(self, length: int = 40, number: int = 0, **fields: Sequence[Any] | Any) -> DataRun:
        for rank in self.ranks:
            own = {
                name: values[rank] if isinstance(values, list) else values for name, values in fields.items()
            }
            facts = {**HEALTHY, "share": rank, "sampler": "DistributedSampler", **own}
            self.add(rank, LoaderRecord(number, length, **facts))
        return self

    def epoch(self, epoch: int, dealt: Sequence[Sequence[int]], **fields: Any) -> DataRun:
        for rank, samples in enumerate(dealt):
            own = {
                name: values[rank] if isinstance(values, list) else values for name, values in fields.items()
            }
            known = {
                "largest": 4,
                "fed": 5,
                "yielded": 5,
                "complete": True,
                "at": epoch,
                "map": packed(samples),
            }
            given = {**known, "order": f"{epoch}", "head": f"{epoch}", **own}
            self.add(rank, EpochRecord(0, epoch, given.pop("drawn", len(samples)), **given))
        return self

    def one(self, code: str) -> Finding:
        self.end()
        return self.only(code)

    def quiet(self) -> list[Finding]:
        """The notes; nothing more severe is found."""
        self.end()
        findings = list(self.report().findings)
        assert [finding for finding in findings if finding.severity.value != "note"] == []
        return findings


@pytest.fixture
def run(tmp_path: Path) -> DataRun:
    return DataRun(tmp_path / "run")


EVEN, ODD = range(0, 40, 2), range(1, 40, 2)


def test_the_same_batches(run: DataRun) -> None:
    finding = run.forwards([{"digest": (f"{n}", f"{n}")} for n in range(4)]).one("DDP301")
    assert finding.ranks == (0, 1)
    assert finding.step == 0
    assert "in 4 of 4 forwards" in finding.message


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"share": 0}, "every rank's DistributedSampler is configured as rank 0 of 2"),
        ({"share": None, "replicas": None, "sampler": "RandomSampler"}, "no sampler splits the data"),
    ],
)
def test_the_same_samples_show_only_as_the_same_batches(run: DataRun, facts: Any, cause: str) -> None:
    run.forwards([{"digest": (f"{n}", f"{n}")} for n in range(4)])
    finding = run.loader(**facts).epoch(0, (EVEN, EVEN)).one("DDP301")
    assert cause in finding.cause
    assert finding.evidence["data_split"][0]["overlap"] == 20


def with_gradients(run: DataRun, *, equal: bool, drew: str = "") -> DataRun:
    """The same batches on both ranks, and equal or different local gradients."""
    run.forwards([{"digest": (f"{n}", f"{n}"), "drew": (drew, drew and drew + "1")} for n in range(4)])
    for number in range(1, 5):
        own = [float(number + index) for index in range(len(NAMES))]
        other = own if equal else [value * 2 for value in own]
        mean = [(one + two) / 2 for one, two in zip(own, other, strict=True)]
        run.backward(number, {0: own, 1: other}, mean)
    return run


def test_the_same_batches_and_the_same_gradients(run: DataRun) -> None:
    assert with_gradients(run, equal=True).one("DDP301").severity is Severity.ERROR


def test_a_shared_input_with_different_gradients_is_a_note(run: DataRun) -> None:
    [note] = with_gradients(run, equal=False).quiet()
    assert note.code == "DDP301"
    assert "computed different gradients" in note.message


def test_dropout_makes_gradients_differ_and_the_loader_decides(run: DataRun) -> None:
    with_gradients(run, equal=False, drew="x")
    run.loader(share=None, replicas=None, sampler="RandomSampler").epoch(0, (EVEN, EVEN))
    assert run.one("DDP301").severity is Severity.ERROR


def test_an_input_that_never_changes_is_a_note(run: DataRun) -> None:
    [note] = run.forwards([{"digest": ("a", "a")}] * 4).quiet()
    assert note.code == "DDP301"


def test_a_correct_split_and_its_table(run: DataRun) -> None:
    run.loader().epoch(0, (EVEN, ODD)).epoch(1, (EVEN, ODD)).epoch(2, ([*EVEN, 0], ODD))
    assert run.quiet() == []
    assert [(row.samples, dict(row.per_rank), row.overlap, row.missing) for row in run.report().data[:2]] == [
        (40, {"0": 20, "1": 20}, 0, 0)
    ] * 2


def test_ranks_that_were_given_one_share(run: DataRun) -> None:
    run.forwards([{"digest": (f"{n}", f"{n}")} for n in range(4)])
    finding = run.loader(share=1, replicas=3).epoch(0, (EVEN, EVEN)).one("DDP301")
    assert finding.cause == "every rank's DistributedSampler is configured as rank 1 of 3"


def test_some_ranks_that_were_given_one_share(tmp_path: Path) -> None:
    run = DataRun(tmp_path / "run", world_size=3)
    run.forwards([{"digest": (f"{n}", f"-{n}", f"{n}")} for n in range(4)])
    finding = run.loader(share=[0, 1, 0]).epoch(0, (EVEN, ODD, EVEN)).one("DDP301")
    assert finding.ranks == (0, 2)
    assert "ranks 0 and 2 are each configured as rank 0 of 2, but 3 ranks train" in finding.cause


@pytest.mark.parametrize(
    "facts",
    [
        {"columns": [["a"], ["b"]]},
        {"columns": [["a", "b"], ["c", "d"]], "mark": ["m", "n"]},
    ],
)
def test_a_dataset_that_was_split_before(run: DataRun, facts: Any) -> None:
    finding = run.loader(**facts).epoch(0, (EVEN, ODD)).one("DDP302")
    assert "rank 0 20 of its 40, rank 1 20 of its 40" in finding.message
    assert "already split by rank, or cut or shuffled with another seed" in finding.cause
    assert finding.ranks == (0, 1)


def test_datasets_of_different_length_are_different(run: DataRun) -> None:
    for rank, length in ((0, 40), (1, 38)):
        run.add(rank, LoaderRecord(0, length, "DistributedSampler", **HEALTHY, share=rank))
    finding = run.epoch(0, (EVEN, range(1, 38, 2))).one("DDP302")
    assert finding.evidence["lengths"] == {"0": 40, "1": 38}


@pytest.mark.parametrize(
    "facts",
    [
        # Additional columns of a rank; parts that no sampler splits again.
        {"columns": [["a", "x"], ["b", "x"]], "mark": ["m", "n"]},
        {"columns": [["a"], ["a", "b"]]},
        {"columns": [["a"], ["b"]], "replicas": None, "mark": ["m", "n"], "sampler": "RandomSampler"},
    ],
)
def test_datasets_that_may_differ(run: DataRun, facts: Any) -> None:
    run.loader(**facts).epoch(0, (EVEN, ODD))
    assert run.quiet() == []


@pytest.mark.parametrize(
    ("dealt", "problem"),
    [
        ((EVEN, range(20)), "10 of 40 samples were used by several ranks and 10 were not used"),
        ((range(10), range(10, 20)), "20 were not used"),
        ((range(30), range(30, 40)), "ranks drew between 10 and 30 samples"),
    ],
)
def test_overlap_gaps_and_uneven_shares(run: DataRun, dealt: Any, problem: str) -> None:
    finding = run.loader().epoch(0, dealt).one("DDP302")
    assert problem in finding.message


def test_other_seeds_are_the_cause(run: DataRun) -> None:
    finding = run.loader(seed=[1, 2]).epoch(0, (EVEN, range(20))).one("DDP302")
    assert "seeds differ (rank 0: 1, rank 1: 2)" in finding.cause


@pytest.mark.parametrize(
    ("facts", "dealt"),
    [
        # Padding of a sampler, evened batches, a last batch left out.
        ({}, (EVEN, [*ODD[:-1], 0, 1])),
        ({}, ([*EVEN, 0, 2, 4], [*ODD, 6, 8, 10])),
        ({}, (EVEN[:18], ODD[:17])),
        # With replacement any overlap may occur.
        ({"replacement": True, "replicas": None}, (EVEN, range(20))),
        # A part of the data, by a sampler of the user's own.
        ({"replicas": None, "sampler": "Mine"}, (range(5), range(5, 10))),
    ],
)
def test_intended_effects_of_samplers_are_not_reported(run: DataRun, facts: Any, dealt: Any) -> None:
    assert run.loader(**facts).epoch(0, dealt).quiet() == []


def test_different_datasets_give_at_most_a_note(run: DataRun) -> None:
    run.loader(replicas=None, share=None, mark=["a", "b"], sampler="RandomSampler")
    [note] = run.epoch(0, (range(40), range(40))).quiet()
    assert note.code == "DDP302"


def test_the_same_dataset_shuffled_by_each_rank_is_a_warning(run: DataRun) -> None:
    run.loader(replicas=None, share=None, sampler="RandomSampler")
    assert "no sampler splits" in run.epoch(0, (range(40), range(40))).one("DDP302").cause


@pytest.mark.parametrize("dealt", [(range(30), range(10, 40)), (range(30), range(30, 40))])
def test_samplers_of_the_users_own_give_a_note_at_most(run: DataRun, dealt: Any) -> None:
    """Repeated augmentation hands one sample to several ranks on purpose."""
    [note] = run.loader(sampler="RepeatAugSampler").epoch(0, dealt).quiet()
    assert note.code == "DDP302"


def test_batches_made_by_length_may_be_uneven(run: DataRun) -> None:
    assert run.loader().epoch(0, (range(30), range(30, 40)), batches=20).quiet() == []


def test_an_epoch_that_ended_early_is_checked_for_overlap(run: DataRun) -> None:
    assert run.loader().epoch(0, (EVEN[:3], ODD[:3]), complete=False).quiet() == []


def test_the_same_order_again(run: DataRun) -> None:
    run.loader().epoch(0, (EVEN, ODD), order="x", at=0).epoch(1, (EVEN, ODD), order="x", at=0)
    finding = run.one("DDP303")
    assert "set_epoch was not called" in finding.cause


@pytest.mark.parametrize(
    ("facts", "again"),
    [
        ({"shuffle": False}, {"order": "x"}),
        ({"shuffle": None}, {"order": "x"}),
        ({}, {"order": "y"}),
        ({}, {"order": ["x", "y"]}),
        ({}, {"order": "x", "complete": False, "head": "other"}),
        ({}, {"order": "x", "head": ""}),
    ],
)
def test_orders_that_may_repeat_or_do_not(run: DataRun, facts: Any, again: Any) -> None:
    run.loader(**facts).epoch(0, (EVEN, ODD), order="x").epoch(1, (EVEN, ODD), **again)
    assert run.quiet() == []


def test_an_uneven_last_batch(run: DataRun) -> None:
    finding = run.forwards([{"rows": (8, 8)}, {"rows": (8, 8)}, {"rows": (8, 2)}]).one("DDP305")
    assert finding.step == 2
    assert finding.ranks == (1,)
    assert finding.evidence["weights"] == {"0": 0.625, "1": 2.5}
    assert "counted 4 times as much" in finding.message


def test_means_over_tokens(run: DataRun) -> None:
    finding = run.forwards([{"rows": (8, 8), "tokens": (100, 50 + n)} for n in range(3)]).one("DDP305")
    assert finding.evidence["counted"] == "labelled tokens"
    assert finding.evidence["counts"] == {"0": 100, "1": 50}


@pytest.mark.parametrize(("per_token", "notes"), [(0.01, 1), (0.0, 0)])
def test_losses_that_grow_with_the_tokens_are_not_means(run: DataRun, per_token: float, notes: int) -> None:
    counts = [(100 - 7 * n, 40 + 9 * n) for n in range(6)]
    run.forwards([{"rows": (8, 8), "tokens": each} for each in counts])
    for rank in run.ranks:
        losses = [each[rank] * per_token if per_token else 2.0 for each in counts]
        run.add(rank, LossRecord(0, 0, list(losses)))
    finding = run.quiet()[0] if notes else run.one("DDP305")
    assert (finding.code, finding.severity.value) == ("DDP305", "note" if notes else "warning")
    assert finding.evidence["loss_grows_with_count"] is bool(notes)
    assert ("divided by the count of all ranks" in finding.cause) is bool(notes)


@pytest.mark.parametrize(
    ("rows", "notes"),
    [
        ([{"rows": (20, 19), "tokens": (100, 95)}] * 3, 0),
        ([{"rows": (n + 1, 3 * n + 2)} for n in range(5)], 1),
        ([{"rows": (8, 8), "attended": (40, 80)}] * 3, 1),
        ([{"rows": (8, 8), "attended": (40, 80), "tokens": (9, 9)}] * 3, 0),
        ([{"rows": (8, 0)}] * 3, 0),
    ],
)
def test_counts_that_are_close_or_inconclusive(run: DataRun, rows: Any, notes: int) -> None:
    assert [finding.code for finding in run.forwards(rows).quiet()] == ["DDP305"] * notes


def test_inside_join_counts_may_differ(run: DataRun) -> None:
    for rank in run.ranks:
        run.add(rank, JoinRecord(0, 0))
    assert run.forwards([{"rows": (8, 2)}] * 3).quiet() == []


def test_the_same_random_numbers(run: DataRun) -> None:
    finding = run.forwards([{"drew": ("a", "a")}, {"drew": ("b", "b")}]).one("DDP306")
    assert finding.ranks == (0, 1)
    assert "2 of the 2 steps" in finding.message


@pytest.mark.parametrize(
    "rows",
    [
        [{"drew": ("a", "a")}],
        [{"drew": ("a", "b")}] * 3,
        [{"drew": ("a", "")}] * 3,
        [{"drew": ("a", "a")}] * 2 + [{"drew": ("c", "d")}] * 5,
    ],
)
def test_draws_that_are_equal_once_or_never(run: DataRun, rows: Any) -> None:
    assert run.forwards(rows).quiet() == []


def test_ranks_of_other_groups_may_do_the_same(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", 4)
    run.wrap(group=[0, 1]).wrap(group=[2, 3])
    for forward in range(4):
        for rank in run.ranks:
            run.add(rank, BatchRecord(forward, digest=f"{rank % 2} {forward}", drew=f"{rank % 2} {forward}"))
    run.end()
    assert [f for f in run.report().findings if f.severity.value != "note"] == []


def drawn_before(
    run: DataRun, parts: Sequence[Sequence[list[str]]], drew: tuple[str, str] = ("a", "a"), same: bool = False
) -> DataRun:
    """Each row: the parts of each rank's batch, after random numbers were drawn."""
    return run.forwards(
        [
            {
                "digest": (f"{n} x", f"{n} {'x' if same else 'y'}"),
                "drew_before": tuple(f"{n} {one}" for one in drew),
                "parts": row,
            }
            for n, row in enumerate(parts)
        ]
    )


def test_the_same_time_steps_beside_different_images(run: DataRun) -> None:
    finding = drawn_before(run, [([f"x{n}", f"t{n}"], [f"y{n}", f"t{n}"]) for n in range(4)]).one("DDP306")
    assert (finding.ranks, finding.step, finding.severity.value) == ((0, 1), 0, "warning")
    assert "in 4 of 4 forwards" in finding.message
    assert "seeded its generator with the same number" in finding.cause


@pytest.mark.parametrize(
    "parts",
    [
        # Positions: the same everywhere, and in every step.
        [([f"x{n}", "p"], [f"y{n}", "p"]) for n in range(6)],
        # Too few values to decide.
        [([f"x{n}", ""], [f"y{n}", ""]) for n in range(6)],
        # Their own.
        [([f"x{n}", f"t{n}"], [f"y{n}", f"s{n}"]) for n in range(6)],
        # Now and then by chance.
        [([f"x{n}", f"t{n}"], [f"y{n}", f"t{n}" if n < 2 else f"s{n}"]) for n in range(6)],
    ],
)
def test_inputs_that_may_be_equal(run: DataRun, parts: Any) -> None:
    assert drawn_before(run, parts).quiet() == []


def test_a_common_schedule_is_not_drawn(run: DataRun) -> None:
    """The tensor is the same on all ranks and new in every step; the generators differ."""
    parts = [([f"x{n}", f"t{n}"], [f"y{n}", f"t{n}"]) for n in range(6)]
    assert drawn_before(run, parts, drew=("a", "b")).quiet() == []


def form(run: DataRun, factors: Sequence[float], reduction: str = "mean") -> DataRun:
    for rank, factor in zip(run.ranks, factors, strict=True):
        run.add(rank, LossFormRecord(0, 0, ["NllLoss"], [reduction], [factor]))
    return run


@pytest.mark.parametrize(("factors", "weighted"), [((4 / 3, 2 / 3), True), ((1.0, 1.0), False)])
def test_means_may_be_weighted_by_their_counts(
    run: DataRun, factors: tuple[float, float], weighted: bool
) -> None:
    form(run.forwards([{"rows": (8, 4)}] * 6), factors)
    finding = run.quiet()[0] if weighted else run.one("DDP305")
    assert finding.severity is (Severity.NOTE if weighted else Severity.WARNING)
    assert finding.evidence["loss_weighted_by_count"] is weighted


def test_sums_with_one_factor_weigh_all_samples_alike(run: DataRun) -> None:
    finding = form(run.forwards([{"rows": (8, 4)}] * 6), (0.1, 0.1), "sum").quiet()[0]
    assert finding.evidence["loss_weighted_by_count"] is True


def test_an_uneven_last_batch_is_not_weighted(run: DataRun) -> None:
    form(run.forwards([*[{"rows": (8, 8)}] * 5, {"rows": (8, 2)}]), (1.0, 1.0))
    assert run.one("DDP305").severity is Severity.WARNING


def test_batches_that_come_later_on_another_rank(run: DataRun) -> None:
    finding = run.forwards([{"digest": (f"{n}", f"{n - 2}")} for n in range(9)]).one("DDP301")
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0, 1))
    assert finding.evidence["forwards_later"] == 2
    assert finding.evidence["forwards_with_an_earlier_batch"] == 7


@pytest.mark.parametrize(
    "rows",
    [
        # Too few, or each time another number of forwards later.
        [{"digest": (f"{n}", f"{n - 1}")} for n in range(4)],
        [{"digest": (f"{n}", f"{n - 1 - n % 3}" if n > 3 else f"a{n}")} for n in range(9)],
        # Batches that ranks exchange after every second step.
        [{"digest": (f"{n}", f"{n - 1}" if n % 2 else f"a{n}")} for n in range(16)],
        # Batches with few values are equal by chance.
        [{"digest": (f"{n}", f"{n - 1}"), "variety": (2, 2)} for n in range(9)],
    ],
)
def test_batches_that_meet_another_rank_now_and_then(run: DataRun, rows: Any) -> None:
    assert run.forwards(rows).quiet() == []
