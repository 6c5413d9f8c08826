"""Runs on other numbers of ranks: gradients within rounding, settings exactly, simple ratios by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.diff.approximate import LARGEST, Tolerance, common_ratio, explain_ratio, ratio_of
from ddpcheck.diff.compare import compare_runs
from ddpcheck.diff.model import Comparison, DiffSource, DiffVerdict, Method
from ddpcheck.errors import NotComparable
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import Packed, pack, unpack
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.rank import RankHeader
from tests.helpers.run_builder import NAMES, RunBuilder, sketch_of

MEAN = (2.0, 3.0, -4.0)
STEPS = 5


def build(
    folder: Path,
    world_size: int,
    *,
    factors: Mapping[int, Sequence[float]] | None = None,
    lr: Mapping[int, float] | None = None,
    rows: int = 32,
    uneven: int = 0,
    rewrite: int = -1,
    **wrap: Any,
) -> RunBuilder:
    """A run whose global batch is distributed over its ranks; `factors` multiply the reduced gradients of a step."""
    run = RunBuilder(folder, world_size).wrap(**wrap)
    run.optimizer()
    for step in range(STEPS):
        for rank in run.ranks:
            share = rows // world_size - (uneven if rank else 0)
            run.add(rank, BatchRecord(step, digest=f"{rank}", rows=share))
        if step == rewrite:
            run.rewrite(step, run.ranks)
        by = (factors or {}).get(step, (1.0,) * len(MEAN))
        # Ranks compute different gradients with the same mean.
        shifts = {rank: (rank - (world_size - 1) / 2) for rank in run.ranks}
        local = {rank: [x + shift for x in MEAN] for rank, shift in shifts.items()}
        run.backward(step + 1, local, [x * factor for x, factor in zip(MEAN, by, strict=True)])
        run.apply(step)
        changed = {"0.lr": (lr or {})[step]} if step in (lr or {}) else {} if step else {"0.lr": 0.1}
        if changed:
            run.hyper(step, dict.fromkeys(run.ranks, changed))
        run.step(step)
    return run.end()


def against_one(tmp_path: Path, world_size: int = 4, **changes: Any) -> Comparison:
    rtol = changes.pop("rtol", None)
    a = build(tmp_path / "a", 1).save()
    return compare_runs(a, build(tmp_path / "b", world_size, **changes).save(), rtol)


def test_one_rank_and_four(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, factors=dict.fromkeys(range(STEPS), (1 + 3e-07, 1 - 3e-07, 1.0)))
    assert (comparison.verdict, comparison.method) == (DiffVerdict.AGREE, Method.ROUNDING)
    assert comparison.compared == {"init.after": 1, "reduced": STEPS, "hyperparameters": STEPS}
    assert [one.step for one in comparison.growth] == list(range(STEPS))
    assert all(0 < one.relative < 1e-6 for one in comparison.growth)
    assert "so results are not bitwise equal" in comparison.notes[0]


@pytest.mark.parametrize(
    ("factor", "printed"),
    [
        (4.0, "gradient norm ratio 4.0 (= world size) in 3 of 3 parameters"),
        (0.25, "gradient norm ratio 0.25 (= 1 / world size) in 3 of 3 parameters"),
        (32.0, "gradient norm ratio 32.0 (= global batch) in 3 of 3 parameters"),
        (8.0, "gradient norm ratio 8.0 (= batch of a rank of run B) in 3 of 3 parameters"),
        (-1.0, "gradient norm ratio -1.0 in 3 of 3 parameters"),
        (3.0, "gradient norm ratio 3.0 in 3 of 3 parameters"),
        (1.2345, "gradient norm ratio 1.2345 in 3 of 3 parameters"),
    ],
)
def test_a_factor_is_named(tmp_path: Path, factor: float, printed: str) -> None:
    comparison = against_one(tmp_path, factors=dict.fromkeys(range(STEPS), (factor,) * 3))
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage, comparison.first.message) == (
        0,
        DiffSource.REDUCED,
        printed,
    )
    assert "a multiple of the other's" in comparison.cause
    assert ("world size", 1, 4) in [(one.what, one.a, one.b) for one in comparison.suspects]


def test_a_factor_under_coarse_rounding(tmp_path: Path) -> None:
    """As autocast to bfloat16 makes it."""
    comparison = against_one(tmp_path, factors=dict.fromkeys(range(STEPS), (4.006, 3.993, 4.002)))
    assert comparison.first is not None
    assert comparison.first.message == "gradient norm ratio 4.0 (= world size) in 3 of 3 parameters"
    assert comparison.first.ratio == 4.0


def test_one_parameter_of_three(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, factors={2: (1.0, 2.0, 1.0)})
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.parameter, comparison.first.differing) == (2, NAMES[1], 1)
    assert comparison.first.message == "gradient norm ratio 2.0 in 1 of 3 parameters"
    assert comparison.first.agreed_until == 1
    assert [(one.rank, one.what) for one in comparison.first.values[2:]] == [
        (rank, "local norm, about") for rank in range(4)
    ]


def test_a_sudden_difference(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, factors={3: (1.3, 0.8, 1.1)})
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.agreed_until) == (3, 2)
    assert comparison.first.message.endswith("suddenly")
    assert "equal up to step 2" in comparison.cause


def test_a_difference_that_grew(tmp_path: Path) -> None:
    factors = {step: (1 + 1e-4 * 8**step, 1 - 1e-4 * 8**step, 1.0) for step in range(STEPS)}
    comparison = against_one(tmp_path, factors=factors)
    assert comparison.first is not None
    assert 1 < comparison.first.step < 4
    assert "grew step by step" in comparison.cause


def test_a_custom_tolerance(tmp_path: Path) -> None:
    factors = dict.fromkeys(range(STEPS), (1.02, 0.98, 1.0))
    assert against_one(tmp_path, factors=factors).verdict is DiffVerdict.DIVERGED
    assert against_one(tmp_path, factors=factors, rtol=0.1).verdict is DiffVerdict.AGREE
    assert against_one(tmp_path, factors=factors, rtol=1e-3).verdict is DiffVerdict.DIVERGED


def test_settings_are_compared_exactly(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, lr={2: 0.4})
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage) == (2, DiffSource.HYPER)
    assert comparison.first.message == "0.lr is 0.1 in run A and 0.4 in run B, ratio 4.0 (= world size)"


def test_another_start(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, outliers={rank: [NAMES[1]] for rank in range(4)})
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage, comparison.first.parameter) == (
        -1,
        DiffSource.INIT,
        NAMES[1],
    )


def test_a_write_in_one_run_only(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, rewrite=3)
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage) == (3, DiffSource.REWRITTEN)
    assert comparison.first.message == "parameters were written before this step in run B only"


def test_effects_of_a_split(tmp_path: Path) -> None:
    factors = {0: (1.3, 0.8, 1.1)}
    suspects = against_one(tmp_path, factors=factors, rows=128, uneven=8).suspects
    causes = {one.what: (one.a, one.b) for one in suspects}
    assert causes["rows of the global batch"] == (32, 104)
    assert causes["rows of each rank, which averages over its own"] == ("32", "32, 24, 24, 24")
    assert not any("BatchNorm" in what for what in causes)


def test_batch_norm_depends_on_the_split(tmp_path: Path) -> None:
    a = build(tmp_path / "a", 1, buffers=("bn.running_mean",)).save()
    b = build(tmp_path / "b", 4, buffers=("bn.running_mean",), factors={0: (1.3, 0.8, 1.1)}).save()
    causes = {one.what: (one.a, one.b) for one in compare_runs(a, b).suspects}
    assert causes["BatchNorm normalises on each rank"] == ("over 32 rows", "over 8 rows")


def test_not_finite_in_one_run_only(tmp_path: Path) -> None:
    comparison = against_one(tmp_path, factors={1: (1.0, float("nan"), 1.0)})
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.parameter) == (1, NAMES[1])
    assert comparison.first.message == "gradients are not finite in one run only"


def test_gradients_that_were_accumulated(tmp_path: Path) -> None:
    """One rank takes four backwards for a step: the last one holds what all came to."""
    a = RunBuilder(tmp_path / "a", 1).wrap()
    for step in range(STEPS):
        for part in range(4):
            share = [x * (part + 1) / 4 for x in MEAN]
            a.backward(4 * step + part + 1, {0: share}, share, step=step)
        a.step(step)
    comparison = compare_runs(a.end().save(), build(tmp_path / "b", 4).save())
    assert comparison.verdict is DiffVerdict.AGREE
    assert comparison.compared["reduced"] == STEPS


def test_parameters_in_another_order(tmp_path: Path) -> None:
    """They are found by name."""
    order = (NAMES[2], NAMES[0], NAMES[1])
    a = build(tmp_path / "a", 1).save()
    b = RunBuilder(tmp_path / "b", 2).wrap(names=order)
    for step in range(STEPS):
        mean = (MEAN[2], MEAN[0], MEAN[1])
        b.backward(step + 1, {0: mean, 1: mean}, mean)
        b.step(step)
    assert compare_runs(a, b.end().save()).verdict is DiffVerdict.AGREE


def test_other_hashes(tmp_path: Path) -> None:
    """Digests cannot be compared then; sketches can."""
    b = build(tmp_path / "b", 2)
    for rank in b.ranks:
        header = b.records[rank][0]
        assert isinstance(header, RankHeader)
        b.records[rank][0] = replace(header, algorithm="multilinear-128")
    comparison = compare_runs(build(tmp_path / "a", 2).save(), b.save())
    assert (comparison.verdict, comparison.method) == (DiffVerdict.AGREE, Method.ROUNDING)
    assert "init.after" not in comparison.compared
    assert "DDPCHECK_HASH=multilinear" in comparison.notes[0]


def test_without_sketches(tmp_path: Path) -> None:
    b = build(tmp_path / "b", 2)
    for rank in b.ranks:
        b.records[rank] = [record for record in b.records[rank] if record.kind != "backward"]
    with pytest.raises(NotComparable, match=r"run B has no gradient sketches .*--gradients off"):
        compare_runs(build(tmp_path / "a", 1).save(), b.save())


def test_sketches_of_another_version(tmp_path: Path) -> None:
    b = build(tmp_path / "b", 2)
    b.description["ddpcheck"] = "9.0"
    with pytest.raises(NotComparable, match="recorded by ddpcheck"):
        compare_runs(build(tmp_path / "a", 1).save(), b.save())


def test_gradients_that_come_late(tmp_path: Path) -> None:
    """From a device, sketches are written down steps after they were taken."""
    b = build(tmp_path / "b", 4, factors={1: (4.0,) * 3})
    for rank in b.ranks:
        late = [record for record in b.records[rank] if record.kind == "backward"]
        others = [record for record in b.records[rank] if record.kind != "backward"]
        b.records[rank] = [*others[:-1], *late, others[-1]]
    comparison = compare_runs(build(tmp_path / "a", 1).save(), b.save())
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage) == (1, DiffSource.REDUCED)
    assert comparison.compared["reduced"] == STEPS


SLACK = 1e-4


def packed(*values: float) -> list[Packed]:
    return unpack(pack(map(sketch_of, values)))


def test_a_factor_of_all() -> None:
    pairs = list(zip(packed(1.0, -2.0, 0.3), packed(3.0, -6.0, 0.9), strict=True))
    assert common_ratio(pairs, SLACK) == pytest.approx(3.0, rel=1e-6)


def test_no_factor_of_all() -> None:
    assert common_ratio(list(zip(packed(1.0, -2.0), packed(3.0, -6.1), strict=True)), SLACK) is None
    assert common_ratio(list(zip(packed(0.0), packed(1.0), strict=True)), SLACK) is None
    assert common_ratio(list(zip(packed(1.0), packed(float("nan")), strict=True)), SLACK) is None


def test_values_that_fit_by_chance_and_norms_that_do_not() -> None:
    [a], [b] = unpack(pack([Sketch(1.0, 1.0, 0, 4)])), unpack(pack([Sketch(2.0, 1.0, 0, 4)]))
    assert common_ratio([(a, b)], SLACK) is None


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (4.00001, "4.0 (= world size)"),
        (0.25, "0.25 (= 1 / world size)"),
        (-4.0, "-4.0 (= world size)"),
        (7.0001, "7.0"),
        (1 / 3, "0.333333"),
        (1.2345, "1.2345"),
    ],
)
def test_names(ratio: float, text: str) -> None:
    assert str(explain_ratio(ratio, {"nothing": 1.0, "world size": 4.0}, SLACK)) == text


def test_ratios_of_settings() -> None:
    assert ratio_of(0.1, 0.4) == pytest.approx(4.0)
    for a, b in ((0, 1), (1, 0), (True, 2), ("a", "b"), (None, 1), (1.0, float("inf"))):
        assert ratio_of(a, b) is None


@pytest.mark.parametrize(
    ("dtypes", "half", "first"),
    [
        (["float32"], False, 2.0**-8),
        (["float32", "float64"], False, 2.0**-8),
        # The records' own resolution.
        (["float64"], False, 2.0**-20),
        # A GradScaler shows that fp32 parameters are trained in fp16.
        (["float32"], True, LARGEST),
        (["float32", "bfloat16"], False, LARGEST),
        (["something new"], False, LARGEST),
    ],
)
def test_the_coarsest_dtype_decides(dtypes: list[str], half: bool, first: float) -> None:
    assert Tolerance(None, dtypes, half).at(0) == first


def test_it_grows_with_the_steps_up_to_a_limit() -> None:
    tolerance = Tolerance(None, ["float32"], False)
    assert tolerance.at(9) == pytest.approx(10 * tolerance.at(0))
    assert tolerance.at(100_000) == LARGEST


def test_a_requested_tolerance_holds_at_every_step() -> None:
    tolerance = Tolerance(0.5, ["float32"], False)
    assert (tolerance.at(0), tolerance.at(1000)) == (0.5, 0.5)
