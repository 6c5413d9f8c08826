"""Runs of earlier versions stay readable. They are stored as `<schema>-<name>` and never rewritten."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.records.registry import SCHEMA
from tests.helpers.paths import ROOT

STORED = ROOT / "tests" / "stored_runs"


def report_of(name: str) -> Report:
    return analyse_run(STORED / name)


def errors_and_warnings(report: Report) -> list[tuple[str, int | None, tuple[int, ...], str | None]]:
    return [
        (finding.code, finding.step, finding.ranks, finding.parameter)
        for finding in report.findings
        if finding.severity.value != "note"
    ]


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_every_version_is_stored(schema: int) -> None:
    assert list(STORED.glob(f"{schema}-*"))


def test_run_without_findings() -> None:
    report = report_of("1-sound")
    assert (report.verdict.value, report.world_size, report.steps, report.findings) == ("ok", 2, 16, ())
    compared = {check.name: check.compared for check in report.checks}
    assert compared["parameters after each step"] == 16
    assert compared["buffers after each synchronisation"] == 16
    assert report.run["unreadable_lines"] == 0


def test_bypassed_wrapper() -> None:
    report = report_of("1-bypass")
    assert (report.verdict.value, report.steps) == ("findings", 11)
    # Without recorded gradients only the general code is reported.
    assert errors_and_warnings(report) == [("DDP201", 0, (0, 1, 2), "0.weight")]
    (finding,) = (finding for finding in report.findings if finding.code == "DDP201")
    # Its captured tensors are missing; the records contain the first values.
    assert finding.evidence["elements"]["exact"] is False
    assert len(finding.evidence["elements"]["values"]) == 4


@pytest.mark.parametrize("name", ["1-learning-rate", "2-learning-rate"])
def test_different_learning_rate(name: str) -> None:
    report = report_of(name)
    assert errors_and_warnings(report) == [("DDP206", 5, (2,), "0.weight")]
    (finding,) = (finding for finding in report.findings if finding.code == "DDP206")
    (row,) = finding.evidence["hyperparameters"]
    assert row["name"] == "lr"
    assert row["by_rank"]["0"] == row["by_rank"]["1"] != row["by_rank"]["2"]
    elements = finding.evidence["elements"]
    assert (elements["exact"], elements["of"], elements["step"]) == (True, 64 * 32, 5)
    assert elements["values"][0]["by_rank"].keys() == {"0", "2"}


def test_unfrozen_parameter() -> None:
    assert errors_and_warnings(report_of("1-unfrozen")) == [("DDP104", 5, (0, 1, 2), "3.weight")]


def test_killed_rank() -> None:
    report = report_of("1-killed")
    assert (report.verdict.value, report.exit_code, report.steps) == ("failed", 1, 7)
    assert errors_and_warnings(report) == [("DDP602", 6, (1,), None)]
    assert [row.status.value for row in report.attempts[0].ranks] == ["raised", "died"]


def test_damaged_run() -> None:
    """Incomplete and damaged lines, records of a newer version, no run.json, a file without header."""
    report = report_of("1-damaged")
    assert ("DDP206", 5, (2,), "0.weight") in errors_and_warnings(report)
    assert report.run["unreadable_lines"] == 2
    assert report.run["files_without_header"] == 1
    assert report.command == ()


def test_folded_steps() -> None:
    """A rank that differs from step 1240 on, after steps 128 to 895 were folded."""
    report = report_of("3-folded")
    assert errors_and_warnings(report)[0][:3] == ("DDP201", 1240, (0, 1))
    assert report.run["folded"] == [[128, 895]]
    assert report.run["unreadable_lines"] == 0
    compared = {check.name: check.compared for check in report.checks}
    assert compared["parameters after each step"] == report.steps == 1300
    assert compared["reduced gradients against the mean"] == 1300
