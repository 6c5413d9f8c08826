"""Two runs of the same job, rank by rank: the first difference in the order of events is reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.diff.compare import compare_runs
from ddpcheck.diff.exact import MOST_AHEAD, RankComparison
from ddpcheck.diff.model import Comparison, DiffSource, DiffVerdict, Method
from ddpcheck.diff.record_diff import ComparedRank
from ddpcheck.diff.run_input import read_run
from ddpcheck.errors import NotComparable
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import OptimizerRecord, SkipRecord
from ddpcheck.records.kinds.rank import DeviceRecord, RankHeader
from tests.helpers.run_builder import NAMES, RunBuilder

STEPS = 6
HYPER = {"0.lr": 0.1, "0.momentum": 0.9}
LOCAL = {0: (1.0, 2.0, 3.0), 1: (3.0, 2.0, 1.0)}


class Changes:
    """What a run does in another way, by step."""

    def __init__(self, **at: Any) -> None:
        self.at = at

    def __getattr__(self, name: str) -> Any:
        return self.at.get(name)


def build(folder: Path, world_size: int = 2, steps: int = STEPS, **changes: Any) -> RunBuilder:
    """A sound run with all that is recorded of one, but for `changes`."""
    change = Changes(**changes)
    run = RunBuilder(folder, world_size).wrap(buffers=("mean",), outliers=change.init)
    run.description["config"] = {"every": change.every or 1}
    run.optimizer()
    for step in range(steps):
        batch(run, step, change)
        run.snapshot(
            Stage.BUFFERS,
            step,
            ("mean",),
            of=TensorKind.BUFFERS,
            width=1,
            outliers=change.buffers if step == 4 else None,
        )
        if change.rewrite == step:
            run.rewrite(step, run.ranks, outliers={rank: [NAMES[2]] for rank in run.ranks})
        scale = 2.0 if change.local == step else 1.0
        local = {rank: [scale * x for x in LOCAL[rank % 2]] for rank in run.ranks}
        run.backward(step + 1, local, (5.0 if change.reduced == step else 2.0, 2.0, 2.0))
        run.apply(step, outliers={0: NAMES[:1]} if change.applied == step else None)
        if not step or change.lr == step:
            lr = {"0.lr": 0.05} if change.lr == step else {}
            run.hyper(step, {rank: {**HYPER, **lr} for rank in run.ranks})
        outliers = {1: NAMES[1:2]} if change.params is not None and step >= change.params else None
        if step % (change.every or 1) == 0:
            run.step(step, outliers, forward=dict.fromkeys(run.ranks, step + 1 + (change.more or 0)))
    return run.end()


def batch(run: RunBuilder, step: int, change: Changes) -> None:
    for rank in run.ranks:
        other = change.data == step and rank == 1
        drew = "fedcba" if change.drew == step else "abcdef"
        run.add(rank, BatchRecord(step, digest=f"{step:04x}{rank:04x}{other:04x}", rows=8, drew=drew))


Compare = Callable[..., Comparison]


@pytest.fixture
def compared(tmp_path: Path) -> Compare:
    """A sound run against one with changes."""

    def compare(**changes: Any) -> Comparison:
        return compare_runs(build(tmp_path / "a").save(), build(tmp_path / "b", **changes).save())

    return compare


def test_the_same_job_twice(compared: Compare) -> None:
    comparison = compared()
    assert (comparison.verdict, comparison.method, comparison.first) == (
        DiffVerdict.AGREE,
        Method.EXACT,
        None,
    )
    # Of every stage, what both ranks have in both runs.
    assert comparison.compared == {
        "init.after": 4,
        "buffers": 12,
        "local": 12,
        "reduced": 12,
        "applied": 12,
        "forwards": 12,
        "hyperparameters": 12,
        "params": 12,
        "data": 12,
        "random": 12,
    }
    assert (comparison.suspects, comparison.notes, comparison.growth) == ((), (), ())


@pytest.mark.parametrize(
    ("changes", "step", "stage", "parameter", "ranks", "printed"),
    [
        (
            {"init": {0: [NAMES[1]], 1: [NAMES[1]]}},
            -1,
            DiffSource.INIT,
            NAMES[1],
            (0, 1),
            "start from different",
        ),
        ({"more": 1}, 0, DiffSource.FORWARDS, None, (0, 1), "number of forwards per step differs"),
        ({"data": 3}, 3, DiffSource.DATA, None, (1,), "trained on different data"),
        ({"drew": 2}, 2, DiffSource.RANDOM, None, (0, 1), "random numbers differ"),
        ({"buffers": {0: ["mean"]}}, 4, DiffSource.BUFFERS, "mean", (0,), "Buffers differ"),
        ({"rewrite": 3}, 3, DiffSource.REWRITTEN, NAMES[2], (0, 1), "outside the optimizer"),
        ({"local": 2}, 2, DiffSource.LOCAL, NAMES[0], (0, 1), "the computation differs"),
        ({"reduced": 2}, 2, DiffSource.REDUCED, NAMES[0], (0, 1), "reduced gradients differ"),
        ({"applied": 5}, 5, DiffSource.APPLIED, None, (0,), "are equal after the reduction"),
        ({"lr": 4}, 4, DiffSource.HYPER, None, (0, 1), "the optimizer's hyperparameters"),
        ({"params": 1}, 1, DiffSource.PARAMS, NAMES[1], (1,), "the optimizer's update differs"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_one_change(
    compared: Compare,
    changes: dict[str, Any],
    step: int,
    stage: DiffSource,
    parameter: str | None,
    ranks: tuple[int, ...],
    printed: str,
) -> None:
    comparison = compared(**changes)
    assert comparison.verdict is DiffVerdict.DIVERGED
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage, comparison.first.parameter) == (
        step,
        stage,
        parameter,
    )
    assert comparison.first.ranks == ranks
    assert printed in comparison.cause


def test_what_was_not_sketched_is_not_known(tmp_path: Path) -> None:
    a, b = build(tmp_path / "a"), build(tmp_path / "b", applied=5, params=5)
    for run in (a, b):
        for rank in run.ranks:
            run.records[rank] = [
                record for record in run.records[rank] if not (record.kind == "backward" and record.step == 5)
            ]
    comparison = compare_runs(a.save(), b.save())
    assert comparison.first is not None
    # The parameters after the step show which one it was.
    assert (comparison.first.step, comparison.first.stage, comparison.first.parameter) == (
        5,
        DiffSource.APPLIED,
        NAMES[1],
    )
    assert "It was not sketched" in comparison.cause


def test_the_earliest_of_several_changes(compared: Compare) -> None:
    comparison = compared(data=3, params=3, lr=3, local=3, rewrite=3, drew=4)
    assert comparison.first is not None
    stages = [(divergence.step, divergence.stage) for divergence in (comparison.first, *comparison.then)]
    assert stages == [
        (3, DiffSource.DATA),
        (3, DiffSource.REWRITTEN),
        (3, DiffSource.LOCAL),
        (3, DiffSource.HYPER),
        (3, DiffSource.PARAMS),
        (4, DiffSource.RANDOM),
    ]


def test_a_rank_that_diverges_before_the_others(tmp_path: Path) -> None:
    a, b = build(tmp_path / "a"), build(tmp_path / "b", data=1, lr=4)
    comparison = compare_runs(a.save(), b.save())
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage, comparison.first.ranks) == (
        1,
        DiffSource.DATA,
        (1,),
    )
    # Rank 0 first differs three steps later, which is not reported.
    assert all(divergence.step <= 3 for divergence in comparison.then)


def test_values_of_both_sides(compared: Compare) -> None:
    comparison = compared(lr=4)
    assert comparison.first is not None
    assert comparison.first.message == "0.lr is 0.1 in run A and 0.05 in run B"
    assert [(value.rank, value.a, value.b) for value in comparison.first.values] == [
        (0, 0.1, 0.05),
        (1, 0.1, 0.05),
    ]
    assert comparison.first.agreed_until == 3


def test_norms_with_a_parameter_that_diverges(compared: Compare) -> None:
    comparison = compared(params=1)
    assert comparison.first is not None
    [norm] = [value for value in comparison.first.values if value.what == "gradient norm, about"]
    # Known to half an octave.
    assert (norm.rank, norm.a) == (1, norm.b)
    assert 2 / 1.5 < norm.a < 2 * 1.5


def test_gradients_that_are_a_multiple(compared: Compare) -> None:
    """The bits say where, the sketches say by how much."""
    comparison = compared(reduced=2)
    assert comparison.first is not None
    # By 3; their size is known to half an octave. With one parameter any ratio may be a coincidence: none is reported.
    assert re.fullmatch(r"gradients differ by 0\.\d+ of their size, suddenly", comparison.first.message)
    assert [(one.step, one.beyond) for one in comparison.growth] == [(n, n == 2) for n in range(STEPS)]
    assert "from step 2 on" in comparison.notes[0]


def test_differences_no_larger_than_rounding(tmp_path: Path) -> None:
    b = build(tmp_path / "b")
    for rank in b.ranks:
        kept = [record for record in b.records[rank] if record.kind != "backward"]
        b.records[rank] = kept
    for step in range(STEPS):
        b.backward(step + 1, LOCAL, (2.0 * (1 + 2e-7), 2.0, 2.0))
    for rank in b.ranks:
        # In the file before the end, as they would be.
        ending = next(record for record in b.records[rank] if record.kind == "end")
        b.records[rank].remove(ending)
        b.records[rank].append(ending)
    comparison = compare_runs(build(tmp_path / "a").save(), b.save())
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage) == (0, DiffSource.REDUCED)
    assert "Rounding explains" in comparison.notes[0]
    assert compare_runs(tmp_path / "a", tmp_path / "b", rtol=1e-5).verdict is DiffVerdict.AGREE


def test_a_run_that_was_stopped_early(tmp_path: Path) -> None:
    comparison = compare_runs(build(tmp_path / "a").save(), build(tmp_path / "b", steps=3).save())
    assert comparison.verdict is DiffVerdict.AGREE
    assert comparison.notes == ("Run A took 6 steps and run B 3: the first 3 were compared.",)


def test_a_rewrite_after_the_other_run_ended_is_no_difference(tmp_path: Path) -> None:
    comparison = compare_runs(build(tmp_path / "a", steps=4).save(), build(tmp_path / "b", rewrite=4).save())
    assert comparison.verdict is DiffVerdict.AGREE


def test_rewrites_in_both_runs(tmp_path: Path) -> None:
    same = compare_runs(build(tmp_path / "a", rewrite=3).save(), build(tmp_path / "b", rewrite=3).save())
    assert same.verdict is DiffVerdict.AGREE


def test_a_step_left_out(tmp_path: Path) -> None:
    b = build(tmp_path / "b")
    for rank in b.ranks:
        b.records[rank].insert(-8, SkipRecord(0, 0, 4, 5, 1024.0))
    comparison = compare_runs(build(tmp_path / "a").save(), b.save())
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.stage) == (4, DiffSource.FORWARDS)
    assert "run B skipped an optimizer step" in comparison.first.message


def test_another_optimizer(tmp_path: Path) -> None:
    b = build(tmp_path / "b")
    for rank in b.ranks:
        key = next(n for n, record in enumerate(b.records[rank]) if isinstance(record, OptimizerRecord))
        b.records[rank][key] = OptimizerRecord(0, "AdamW", 0, [[0, 1, 2]])
    comparison = compare_runs(build(tmp_path / "a").save(), b.save())
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.message) == (
        0,
        "class is SGD in run A and AdamW in run B",
    )
    assert [(one.what, one.a, one.b) for one in comparison.suspects] == [("optimizers", "SGD", "AdamW")]


def test_options_of_another_version_are_no_difference(tmp_path: Path) -> None:
    b = build(tmp_path / "b")
    b.hyper(2, {rank: {"0.brand_new": True} for rank in b.ranks})
    assert compare_runs(build(tmp_path / "a").save(), b.save()).verdict is DiffVerdict.AGREE


def test_environments_are_reported_with_a_divergence(tmp_path: Path) -> None:
    b = build(tmp_path / "b", local=0)
    for rank in b.ranks:
        header = b.records[rank][0]
        assert isinstance(header, RankHeader)
        environment = {"OMP_NUM_THREADS": "2", "MASTER_PORT": "29500"}
        b.records[rank][0] = replace(header, torch="2.14.0", host="node1", environment=environment)
    b.description["command"] = ["torchrun", "other.py"]
    comparison = compare_runs(build(tmp_path / "a").save(), b.save())
    assert [(one.what, one.a, one.b) for one in comparison.suspects] == [
        ("torch", "2.13.0", "2.14.0"),
        ("hosts", "node0", "node1"),
        ("command", "torchrun train.py", "torchrun other.py"),
        ("environment: OMP_NUM_THREADS", None, "2"),
    ]


def test_other_intervals(tmp_path: Path) -> None:
    comparison = compare_runs(build(tmp_path / "a", every=2).save(), build(tmp_path / "b", every=3).save())
    assert comparison.verdict is DiffVerdict.AGREE
    # Steps 0 of both; 6 would be the next.
    assert comparison.compared["params"] == 2
    assert "every 2 and run B every 3 steps" in comparison.notes[0]


def test_nothing_in_common(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        run = RunBuilder(tmp_path / folder, 1)
        run.wrap()
        run.records[0] = [record for record in run.records[0] if not isinstance(record, DigestRecord)]
        run.save()
    with pytest.raises(NotComparable, match="no recorded step in common"):
        compare_runs(tmp_path / "a", tmp_path / "b")


def test_other_models(tmp_path: Path) -> None:
    a = RunBuilder(tmp_path / "a", 1).wrap().save()
    b = RunBuilder(tmp_path / "b", 1).wrap(names=("body.weight", "tail.weight")).save()
    with pytest.raises(
        NotComparable, match=r"parameter body\.bias of module 0 is 4 in run A and missing in run B"
    ):
        compare_runs(a, b)


def test_a_run_without_ranks(tmp_path: Path) -> None:
    empty = RunBuilder(tmp_path / "empty", 0).save()
    with pytest.raises(NotComparable, match="no rank reported"):
        compare_runs(empty, build(tmp_path / "b").save())


def test_a_missing_rank(tmp_path: Path) -> None:
    build(tmp_path / "b").save()
    (tmp_path / "b" / "rank-00001.jsonl").unlink()
    comparison = compare_runs(build(tmp_path / "a").save(), tmp_path / "b")
    assert comparison.verdict is DiffVerdict.AGREE
    assert comparison.notes == ("Run B has no records of rank 1.",)


def test_attempts(tmp_path: Path) -> None:
    """The last one, unless another is asked for."""
    build(tmp_path / "a").save()
    second = build(tmp_path / "a", lr=2)
    for rank in second.ranks:
        header = second.records[rank][0]
        assert isinstance(header, RankHeader)
        second.records[rank][0] = replace(header, session="b2", time=3000.0)
    second.save()
    other = build(tmp_path / "b").save()
    assert compare_runs(tmp_path / "a", other).verdict is DiffVerdict.DIVERGED
    assert compare_runs(tmp_path / "a", other, attempts=(0, 0)).verdict is DiffVerdict.AGREE
    with pytest.raises(NotComparable, match="has no attempt 2: it has attempts 0 to 1"):
        compare_runs(tmp_path / "a", other, attempts=(2, 0))


def test_buffered_events_without_a_counterpart_are_dropped(tmp_path: Path) -> None:
    """Run B was not sketched, so every backward of run A waits in vain."""
    a, b = build(tmp_path / "a", world_size=1, steps=600), build(tmp_path / "b", world_size=1, steps=600)
    b.records[0] = [record for record in b.records[0] if record.kind not in ("backward", "batch")]
    comparison = RankComparison(read_run("A", a.save(), None), read_run("B", b.save(), None), ComparedRank(0))
    assert comparison.differences(None) == []
    # Two records a step.
    assert 0 < len(comparison.waiting[0]) <= 2 * 2 * (MOST_AHEAD + 1)
    assert comparison.compared["params"] == 600


def test_the_algorithm_of_a_run_is_that_of_its_devices(tmp_path: Path) -> None:
    """A run on the CPU and one on a device have the same header, but their digests cannot be compared."""
    host = RunBuilder(tmp_path / "host", 2).wrap().optimizer().train(2).end()
    device = RunBuilder(tmp_path / "device", 2).wrap()
    for rank in device.ranks:
        device.add(rank, DeviceRecord(0, f"cuda:{rank}", "of the device"))
    device.optimizer().train(2).end()
    runs = [read_run(name, run.save(), None) for name, run in (("A", host), ("B", device))]
    assert runs[0].algorithms() == {runs[0].header().algorithm}
    assert runs[1].algorithms() == {"of the device"}
