"""The rules about gradients: DDP202 to DDP205, DDP209 and DDP304, each with similar jobs that are correct."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.divergence.explain import REASON_TEXT
from ddpcheck.records.kinds.modules import PYTHON_REDUCER, CommHookRecord, JoinRecord
from ddpcheck.records.kinds.rank import EndRecord, FaultRecord, RankHeader
from ddpcheck.records.reasons import UnsyncedReason
from tests.helpers.run_builder import NAMES, RunBuilder

OWN = dict.fromkeys(range(4), NAMES)
LOCAL = {0: [1.0, 2.0, 3.0], 1: [3.0, 4.0, 5.0]}
MEAN = [2.0, 3.0, 4.0]


def start(folder: Path, world_size: int = 2) -> RunBuilder:
    return RunBuilder(folder, world_size).wrap().optimizer()


def hook(build: RunBuilder, name: str) -> RunBuilder:
    for rank in build.ranks:
        build.add(rank, CommHookRecord(0, name, 0))
    return build


def test_a_healthy_run_reports_what_was_checked(tmp_path: Path) -> None:
    build = start(tmp_path)
    for step in range(4):
        build.backward(step + 1, LOCAL, MEAN).apply(step).step(step)
    report = build.end().report()
    assert report.findings == ()
    checks = {check.name: check for check in report.checks}
    assert checks["reduced gradients against the mean"].compared == 4
    assert checks["gradients as applied"].compared == 4


def test_gradients_that_a_compiled_backward_reduces_are_named_as_such(tmp_path: Path) -> None:
    details = []
    for number, options in enumerate(({PYTHON_REDUCER: True}, {})):
        build = RunBuilder(tmp_path / str(number), 2).wrap(options=options).optimizer().train(3)
        checks = {check.name: check for check in build.end().report().checks}
        means = checks["reduced gradients against the mean"]
        assert (means.compared, means.outcome) == (0, "not checked")
        details.append(means.detail)
    assert details[0] != details[1]
    assert "Python reducer" in details[0]


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("wrapper bypassed", "not ddp.module(inputs)"),
        ("no_sync open", "Leave no_sync()"),
        ("forward inside no_sync, backward outside", "both inside or both outside no_sync()"),
        ("two forwards before two backwards", "before the next forward"),
        ("second backward on one forward", "one backward per forward"),
    ],
)
def test_ddp202_has_a_fix_for_each_reason(tmp_path: Path, reason: str, fix: str) -> None:
    build = start(tmp_path).apply(0, outliers=OWN, last="unsynced", reason=reason).step(0, outliers=OWN)
    finding = build.end().only("DDP202")
    assert fix in finding.fix
    assert (finding.severity.value, finding.stage, finding.step) == ("error", "applied", 0)
    assert finding.evidence["groups"][0]["ranks"] == [0]


def test_every_reason_has_a_fix_of_its_own() -> None:
    from ddpcheck.rules.divergence.ddp202 import FIXES

    assert {REASON_TEXT[reason] for reason in UnsyncedReason} <= set(FIXES)
    assert len(set(FIXES.values())) == len(FIXES)


def test_ddp202_names_the_parameters_that_were_waited_for(tmp_path: Path) -> None:
    fields = {"last": "unfinished", "synced": 0, "waiting": [1, 2, 99]}
    finding = start(tmp_path).apply(0, outliers=OWN, **fields).step(0, outliers=OWN).end().only("DDP202")
    assert finding.evidence["unused_parameters"] == ["body.bias", "head.weight"]
    assert finding.parameter == "body.bias"
    assert "find_unused_parameters=True" in finding.fix


def test_ddp203_reports_the_outlier_and_the_hook(tmp_path: Path) -> None:
    local = {0: [1.0] * 3, 1: [2.0] * 3, 2: [6.0] * 3}
    build = hook(start(tmp_path, 3), "my_hook").backward(1, local, [3.0] * 3, reduced_on={2: [3.0, 3.0, 9.0]})
    finding = build.apply(0, outliers={2: NAMES}).step(0, outliers={2: NAMES}).end().only("DDP203")
    assert (finding.ranks, finding.step, finding.stage) == ((2,), 0, "reduced")
    assert finding.evidence["comm_hooks"] == ["my_hook"]
    assert "my_hook" in finding.cause


def test_ddp204_a_sum_that_was_not_divided(tmp_path: Path) -> None:
    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0).step(0)
    build.backward(2, LOCAL, [2 * x for x in MEAN]).apply(1).step(1)
    finding = build.end().only("DDP204")
    assert (finding.step, finding.stage) == (1, "reduced")
    assert finding.cause == "the reduction itself returned the sum of the ranks' gradients, not divided by 2"
    assert finding.parameter in NAMES
    assert finding.evidence["backwards"] == {"checked": 2, "off": 1}
    assert finding.evidence["error"] > finding.evidence["bound"]


@pytest.mark.parametrize(
    ("reduced", "cause"),
    [
        ([1.0, 1.5, 2.0], "divided by 2 again: divided twice"),
        ([1.5, 2.0, 2.5], "without rank 0, divided by 2"),
        ([1.0, 2.0, 3.0], "without rank 1, divided by 1"),
    ],
)
def test_ddp204_reports_the_actual_result(tmp_path: Path, reduced: list[float], cause: str) -> None:
    build = hook(start(tmp_path), "my_hook").backward(1, LOCAL, reduced).apply(0).step(0)
    finding = build.end().only("DDP204")
    assert finding.cause.startswith("the communication hook my_hook returned ")
    assert finding.cause.endswith(cause)


@pytest.mark.parametrize("reduced", [[4.0, 6.0, 4.0], [4.0, 6.0, 9.0], [2.0, 3.0, 40.0]])
def test_ddp204_explains_all_parameters_or_nothing(tmp_path: Path, reduced: list[float]) -> None:
    """Only some parameters are not divided: no single mistake explains that."""
    build = hook(start(tmp_path), "my_hook").backward(1, LOCAL, reduced).apply(0).step(0)
    assert build.end().only("DDP204").cause == "the communication hook my_hook"


@pytest.mark.parametrize(
    ("name", "factor", "severity"),
    [
        ("powerSGD_hook", 1.3, "note"),
        ("bf16_compress_hook", 1.001, "note"),
        ("my_hook", 1.001, "note"),
        ("my_hook", 2.0, "error"),
    ],
)
def test_ddp204_and_hooks_that_lose_precision(
    tmp_path: Path, name: str, factor: float, severity: str
) -> None:
    build = hook(start(tmp_path), name).backward(1, LOCAL, [factor * x for x in MEAN]).apply(0).step(0)
    (finding,) = build.end().findings()
    assert (finding.code, finding.severity.value) == ("DDP204", severity)
    assert finding.evidence["comm_hooks"] == [name]


MANY = tuple(f"layers.{number}.weight" for number in range(12))


def many_ranks(folder: Path, missing: int | None) -> RunBuilder:
    """Ten steps of 16 ranks in bfloat16. No single error exceeds the bound."""
    build = RunBuilder(folder, 16)
    build.rows = lambda names: [[name, "bfloat16", [4], 1] for name in MANY]  # type: ignore[method-assign]
    build.wrap(MANY)
    draw = random.Random(5)
    for step in range(10):
        local = {rank: [draw.gauss(0, 1) for _ in MANY] for rank in build.ranks}
        kept = [own for rank, own in local.items() if rank != missing]
        mean = [math.fsum(column) / 16 + draw.gauss(0, 1e-4) for column in zip(*kept, strict=True)]
        build.backward(step + 1, local, mean)
    return build.end()


def test_ddp204_names_the_rank_that_is_missing_below_the_bound(tmp_path: Path) -> None:
    finding = many_ranks(tmp_path, missing=11).only("DDP204")
    assert (finding.ranks, finding.stage, finding.parameter) == ((11,), "reduced", None)
    assert (
        finding.cause == "the reduction itself: the gradient of rank 11 does not enter the mean of 16 ranks"
    )
    assert finding.evidence["share"] == pytest.approx(0.0, abs=0.1)
    assert finding.evidence["deviations"] > 9


def test_ddp204_is_silent_about_correct_means_of_many_ranks(tmp_path: Path) -> None:
    assert many_ranks(tmp_path, missing=None).findings("DDP204") == []


def test_ddp204_is_silent_where_ranks_diverge_at_the_same_step(tmp_path: Path) -> None:
    build = start(tmp_path).backward(1, LOCAL, MEAN, reduced_on={1: [2.0, 9.0, 4.0]})
    build.apply(0, outliers=OWN).step(0, outliers=OWN).end().only("DDP203")


def test_ddp204_is_silent_about_a_rank_that_was_killed(tmp_path: Path) -> None:
    """The mean contains its share, but its records end before that backward."""
    build = start(tmp_path, 3).backward(1, {0: [1.0] * 3, 1: [2.0] * 3, 2: [6.0] * 3}, [3.0] * 3)
    build.apply(0).step(0).backward(2, {0: [1.0] * 3, 1: [2.0] * 3}, [3.0] * 3).end([0, 1])
    assert build.findings("DDP204") == []


def test_ddp204_is_silent_about_a_probe_that_was_switched_off(tmp_path: Path) -> None:
    build = start(tmp_path)
    build.add(1, FaultRecord(probe="gradients", entry="reduced", error="ValueError", where="", pid=1))
    build.backward(1, {0: [1.0] * 3}, [3.0] * 3).apply(0, ranks=[0]).step(0).end()
    assert [finding.code for finding in build.findings()] == ["DDP605"]


@pytest.mark.parametrize("record", ["join", "no join"])
def test_ddp204_under_join(tmp_path: Path, record: str) -> None:
    """A rank without data contributes zeros inside join(); outside, a missing record is inconclusive."""
    build = start(tmp_path)
    if record == "join":
        for rank in build.ranks:
            build.add(rank, JoinRecord(0, 0))
    build.backward(1, LOCAL, MEAN).apply(0).step(0).backward(2, {0: [4.0] * 3}, [2.0] * 3)
    report = build.end().report()
    assert [finding for finding in report.findings if finding.code == "DDP204"] == []
    checks = {check.name: check.compared for check in report.checks}
    assert checks["reduced gradients against the mean"] == (2 if record == "join" else 1)


def test_ddp204_under_join_without_the_parameters_of_a_rank(tmp_path: Path) -> None:
    """The rank writes no more digests of parameters. Its gradients are part of the mean all the same."""
    build = start(tmp_path)
    for rank in build.ranks:
        build.add(rank, JoinRecord(0, 0))
    build.add(1, FaultRecord(probe="parameters", entry="before_forward", error="", where="", pid=1))
    build.backward(1, LOCAL, MEAN)
    (*before, backward), others = build.records[1], build.records[0]
    attempt = Attempt(build.session)
    # The rank with the fault writes its backward last.
    for of_rank in (before, others, [before[0], backward]):
        header = of_rank[0]
        assert isinstance(header, RankHeader)
        for record in of_rank[1:]:
            attempt.feed(header, record)
    attempt.end()
    [stats] = attempt.gradients.stats.values()
    assert (stats.checked, stats.mismatches) == (1, 0)


def test_ddp205_reports_the_ranks_that_wrote(tmp_path: Path) -> None:
    outliers = {1: ["body.bias"]}
    build = start(tmp_path, 3).apply(0, outliers=outliers, on={1: {"moved": True}}).step(0, outliers=outliers)
    finding = build.end().only("DDP205")
    assert (finding.ranks, finding.step, finding.stage) == ((1,), 0, "applied")
    assert "Outlier: rank 1" in finding.message


def test_ddp205_describes_the_change_by_gradients_of_a_later_step(tmp_path: Path) -> None:
    """On a device, digests arrive when the values of the first step are gone."""
    outliers = {1: ["body.bias"]}
    build = start(tmp_path, 2)
    for step in range(3):
        build.apply(step, outliers=outliers, on={1: {"moved": True}}).step(step, outliers=outliers)
    for rank, factor in ((0, 1.0), (1, 0.0)):
        build.detail(rank, 0, outliers.get(rank, []), {}, stage="applied", of="gradients")
        values = factor * torch.arange(1.0, 6.0)
        build.capture(rank, 2, {"body.bias": values}, stage="applied", of="gradients")
    finding = build.end().only("DDP205")
    assert finding.step == 0
    assert finding.evidence["elements"]["step"] == 2
    assert "set to zero on rank 1 (at step 2)" in finding.cause


def test_ddp205_is_silent_where_all_clip_alike(tmp_path: Path) -> None:
    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0, moved=True).step(0)
    assert build.end().findings() == []


def nan_at(build: RunBuilder, number: int, maker: int, applied: bool) -> RunBuilder:
    for rank in build.ranks:
        own = [1.0, math.nan if rank == maker else 1.0, 1.0]
        build.backward(
            number,
            {rank: own},
            [1.0, math.nan, 1.0],
            local_nonfinite={"1": 5} if rank == maker else {},
            reduced_nonfinite={"1": 5},
        )
    if applied:
        build.apply(number - 1, nonfinite={"1": 5}).step(number - 1)
    return build


def test_ddp209_where_it_began(tmp_path: Path) -> None:
    finding = nan_at(start(tmp_path, 3), 1, maker=2, applied=True).end().only("DDP209")
    assert (finding.severity.value, finding.ranks, finding.step) == ("warning", (2,), 0)
    assert (finding.parameter, finding.stage) == ("body.bias", "local")
    assert finding.evidence == {
        "values": 5,
        "gradients": {"count": 1, "of": 3},
        "applied_at_step": 0,
        "applied_on_ranks": [0, 1, 2],
    }
    assert "in 1 of its 3 gradients, first in that of body.bias" in finding.cause


def test_ddp209_a_loss_that_is_not_finite_shows_in_all_gradients(tmp_path: Path) -> None:
    """The first gradient of the backward is named: it is nearest to the loss."""
    build = start(tmp_path)
    for rank in build.ranks:
        own = {"2": 4, "1": 4, "0": 4} if rank == 1 else {}
        mine = [math.nan if rank == 1 else 1.0] * 3
        build.backward(
            1, {rank: mine}, [math.nan] * 3, local_nonfinite=own, reduced_nonfinite=dict.fromkeys("012", 4)
        )
    finding = build.apply(0, nonfinite={"0": 4}).step(0).end().only("DDP209")
    assert (finding.ranks, finding.parameter) == ((1,), "head.weight")
    assert "in all 3 of its gradients: it comes from the loss or the inputs" in finding.cause


def test_ddp209_produced_by_the_reduction(tmp_path: Path) -> None:
    build = start(tmp_path)
    big = {0: [3e38] * 3, 1: [3e38] * 3}
    build.backward(1, big, [math.inf] * 3, reduced_nonfinite={"0": 4})
    finding = build.apply(0, nonfinite={"0": 4}).step(0).end().only("DDP209")
    assert "that the reduction itself produced" in finding.cause
    assert finding.ranks == (0, 1)


def test_ddp209_is_silent_where_the_step_was_left_out(tmp_path: Path) -> None:
    assert nan_at(start(tmp_path), 1, maker=1, applied=False).step(0).end().findings() == []


def test_ddp304_the_same_gradients(tmp_path: Path) -> None:
    build = start(tmp_path, 3)
    for step in range(3):
        build.backward(step + 1, {0: [1.0] * 3, 1: [4.0] * 3, 2: [1.0] * 3}, [2.0] * 3).apply(step).step(step)
    finding = build.end().only("DDP304")
    assert (finding.severity.value, finding.ranks, finding.stage) == ("warning", (0, 2), "local")
    assert finding.message.startswith("Ranks 0 and 2 computed bit-identical gradients in 3 of 3 backwards")


@pytest.mark.parametrize(("alike", "other"), [(1, 0), (2, 3)])
def test_ddp304_is_silent_about_chance(tmp_path: Path, alike: int, other: int) -> None:
    """Once, or in fewer than half of all backwards."""
    build = start(tmp_path)
    for step in range(alike + other):
        local = {0: MEAN, 1: MEAN} if step < alike else LOCAL
        build.backward(step + 1, local, MEAN).apply(step).step(step)
    assert build.end().findings() == []


def test_a_damaged_record_does_not_prevent_the_report(tmp_path: Path) -> None:
    from dataclasses import replace

    from ddpcheck.records.kinds.gradients import BackwardRecord

    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0).step(0)
    for rank, records in build.records.items():
        records[:] = [
            replace(record, local="~~~") if rank and isinstance(record, BackwardRecord) else record
            for record in records
        ]
        build.add(rank, EndRecord("exit", 2000.0))
    assert build.report().verdict.value == "ok"


def test_parameters_after_the_step_show_which_gradients_differ(tmp_path: Path) -> None:
    """No rank wrote the digest of each gradient."""
    outliers = {1: ["head.weight"]}
    build = (
        start(tmp_path).apply(0).step(0).apply(1, outliers=outliers, last="none").step(1, outliers=outliers)
    )
    finding = build.end().only("DDP202")
    assert (finding.step, finding.parameter) == (1, "head.weight")
    assert finding.evidence["parameters"] == {"count": 1, "of": 3, "names": ["head.weight"]}


def test_parameters_that_diverge_later_do_not_show_which_gradients_differ(tmp_path: Path) -> None:
    """As in a warm-up with a learning rate of zero."""
    outliers = {1: ["head.weight"]}
    build = (
        start(tmp_path)
        .apply(0, outliers=outliers, last="none")
        .step(0)
        .apply(1, outliers=outliers, last="none")
        .step(1, outliers=outliers)
    )
    finding = build.end().only("DDP202")
    assert (finding.step, finding.parameter) == (0, None)
