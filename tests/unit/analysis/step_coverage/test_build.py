"""Coverage of an attempt, and the verdicts that come from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.records.kinds.coverage import TrainingRecord
from ddpcheck.records.kinds.modules import CommHookRecord, OptimizerRecord
from ddpcheck.records.kinds.rank import FaultRecord, GraphRecord
from tests.helpers.run_builder import RunBuilder
from tests.helpers.unwrapped_run import BESIDE, beside, step_beside


def trained(folder: Path, world_size: int = 2) -> RunBuilder:
    return RunBuilder(folder, world_size).wrap().optimizer().train(5)


def coverage_of(report: Report) -> Coverage:
    assert report.coverage is not None
    return report.coverage


def gap_finding(report: Report) -> Finding:
    [finding] = [finding for finding in report.findings if finding.severity.value != "note"]
    assert finding.code == "DDP606"
    return finding


def test_everything_is_compared(tmp_path: Path) -> None:
    report = trained(tmp_path).covered().end().report()
    coverage = coverage_of(report)
    assert (report.verdict.value, report.findings) == ("ok", ())
    assert (coverage.complete, coverage.gap, coverage.trained, coverage.compared) == (True, "", 3, 3)
    assert (coverage.steps, coverage.compared_steps, coverage.not_compared) == (5, 5, {})


def test_a_second_optimizer_of_parameters_outside_of_ddp(tmp_path: Path) -> None:
    build = trained(tmp_path).covered().covered(0, entry=1, name="Adam", no_module=4)
    report = build.end().report()
    coverage = coverage_of(report)
    assert report.verdict.value == "incomplete"
    assert (coverage.trained, coverage.compared, coverage.missing) == (7, 3, 4)
    assert (coverage.gap, coverage.not_compared, coverage.ranks) == ("not_compared", {"no_module": 4}, (0, 1))
    finding = gap_finding(report)
    assert (finding.ranks, finding.cause) == ((0, 1), "they are in no DDP module")
    [row] = finding.evidence["optimizers"]
    assert (row["optimizer"], row["not_compared"], row["where"]) == ("Adam", 4, "/home/me/train.py:31")
    [check] = [check for check in report.checks if "Adam" in check.name]
    assert (check.outcome, check.compared) == ("not checked", 0)


@pytest.mark.parametrize(
    ("reason", "seen", "cause"),
    [
        ("dtensor", ["dtensor", "fsdp2"], "FSDP2"),
        ("no_module", ["fsdp"], "FSDP"),
        ("flat_parameter", ["fsdp"], "FSDP"),
        ("no_module", ["deepspeed"], "DeepSpeed"),
        ("no_module", ["data_parallel"], "DataParallel"),
        ("dtensor", ["dtensor"], "DTensors"),
        ("no_module", [], "no wrapper"),
    ],
)
def test_a_job_without_a_ddp_module(tmp_path: Path, reason: str, seen: list[str], cause: str) -> None:
    build = RunBuilder(tmp_path, 2).covered(0, 7, seen=seen, **{reason: 9})
    report = build.end().report()
    coverage = coverage_of(report)
    assert report.verdict.value == "incomplete"
    # Steps were taken, and the report must not say otherwise.
    assert (report.steps, coverage.steps, coverage.compared_steps) == (7, 7, 0)
    assert (coverage.trained, coverage.compared) == (9, 0)
    assert cause in gap_finding(report).cause
    details = {check.name: check.detail for check in report.checks}
    assert "no optimizer step" not in details["parameters after each step"]


def test_a_wrapper_that_was_deleted(tmp_path: Path) -> None:
    report = trained(tmp_path).covered().covered(0, entry=1, wrapper_deleted=3).end().report()
    assert "deleted" in gap_finding(report).cause


@pytest.mark.parametrize("reason", ["ignored"])
def test_parameters_that_need_not_be_equal(tmp_path: Path, reason: str) -> None:
    report = trained(tmp_path).covered(3, **{reason: 2}).end().report()
    coverage = coverage_of(report)
    assert (report.verdict.value, report.findings) == ("ok", ())
    assert (coverage.complete, coverage.trained, coverage.compared) == (True, 5, 3)


def test_local_sgd(tmp_path: Path) -> None:
    build = trained(tmp_path).covered()
    for rank in build.ranks:
        build.add(rank, CommHookRecord(0, "post_localSGD_hook", 0))
    report = build.end().report()
    assert report.verdict.value == "ok"
    assert coverage_of(report).not_compared == {"local_sgd": 3}


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    for folder, module in (("with", True), ("without", False)):
        build = RunBuilder(tmp_path / folder, 1)
        (tmp_path / folder).mkdir()
        build = trained(tmp_path / folder, 1).covered() if module else build.covered(0, no_module=3)
        report = build.end().report()
        assert (report.verdict.value, report.findings) == ("ok", ())
        assert coverage_of(report).complete


def test_a_model_of_one_rank_alone_has_no_replicas(tmp_path: Path) -> None:
    report = trained(tmp_path, 3).covered().covered(0, 5, [0], entry=1, no_module=2).end().report()
    assert (report.verdict.value, coverage_of(report).complete) == ("ok", True)
    # But not if nothing else was compared.
    (tmp_path / "other").mkdir()
    other = RunBuilder(tmp_path / "other", 3).covered(0, 5, [0], no_module=2).end().report()
    assert (other.verdict.value, coverage_of(other).ranks) == ("incomplete", (0,))


def test_steps_of_which_none_was_compared(tmp_path: Path) -> None:
    report = RunBuilder(tmp_path, 2).wrap().optimizer().covered().end().report()
    assert (report.verdict.value, coverage_of(report).gap) == ("incomplete", "no_step_compared")
    assert gap_finding(report).ranks == (0, 1)


def test_a_job_that_failed_before_its_first_comparison_is_not_reported_twice(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().covered()
    build.description["exit_code"] = 1
    report = build.end(error="ValueError: no").report()
    assert report.verdict.value == "failed"
    assert "DDP606" not in [finding.code for finding in report.findings]


def test_steps_inside_graphs(tmp_path: Path) -> None:
    build = trained(tmp_path).covered()
    for rank in build.ranks:
        build.add(rank, GraphRecord(captures=1, steps=1, replays=100, replayed_steps=100))
    report = build.end().report()
    assert (report.verdict.value, coverage_of(report).gap) == ("incomplete", "captured")


@pytest.mark.parametrize(("backwards", "verdict"), [(4, "incomplete"), (0, "ok")])
def test_a_job_without_a_module_and_without_a_step(tmp_path: Path, backwards: int, verdict: str) -> None:
    build = RunBuilder(tmp_path, 2)
    for rank in build.ranks:
        build.add(rank, TrainingRecord(backwards))
    report = build.end().report()
    assert report.verdict.value == verdict
    assert (coverage_of(report).gap == "no_step_seen") is (backwards > 0)


def test_records_that_were_lost(tmp_path: Path) -> None:
    report = trained(tmp_path).covered().end(dropped=3).report()
    assert (report.verdict.value, coverage_of(report).gap) == ("incomplete", "records_lost")


@pytest.mark.parametrize("probe", ["agent", "parameters", "structure", "optimizers", "coverage"])
def test_a_lost_main_check(tmp_path: Path, probe: str) -> None:
    build = trained(tmp_path).covered()
    build.add(1, FaultRecord(probe, "after_step", "KeyError: 'weight'", ""))
    report = build.end().report()
    coverage = coverage_of(report)
    assert (report.verdict.value, coverage.gap, coverage.ranks) == ("incomplete", "check_lost", (1,))
    assert coverage.lost_checks


def test_a_divergence_counts_more_than_a_gap(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(5, outliers={1: ["body.bias"]})
    report = build.covered().covered(0, entry=1, no_module=4).end().report()
    assert report.verdict.value == "findings"
    assert not coverage_of(report).complete


def test_records_of_an_earlier_version_keep_their_verdict(tmp_path: Path) -> None:
    report = trained(tmp_path).end().report()
    assert (report.verdict.value, coverage_of(report).complete) == ("ok", True)


def test_an_optimizer_of_other_tensors_than_those_of_the_ddp_module(tmp_path: Path) -> None:
    build = beside(RunBuilder(tmp_path, 2).wrap()).covered(3)
    for step in range(3):
        build.backward(step + 1, {0: [1.0] * 3, 1: [3.0] * 3}, [2.0] * 3)
        step_beside(build, step)
        for rank in build.ranks if not step else ():
            build.add(rank, OptimizerRecord(0, "SGD", BESIDE, [[0, 1]]))
    report = build.end().report()
    assert (report.verdict.value, coverage_of(report).gap) == ("incomplete", "not_stepped")
    assert "other tensors" in gap_finding(report).cause
