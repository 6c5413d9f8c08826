"""Runs that were stored by earlier versions stay readable: `<schema>-<name>` each, never rewritten."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.records.registry import SCHEMA
from tests.helpers.paths import ROOT

STORED = ROOT / "tests" / "stored_runs"


def report_of(name: str) -> Report:
    return analyse_run(STORED / name)


def worse_than_a_note(report: Report) -> list[tuple[str, int | None, tuple[int, ...], str | None]]:
    return [
        (finding.code, finding.step, finding.ranks, finding.parameter)
        for finding in report.findings
        if finding.severity.value != "note"
    ]


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_every_version_is_stored(schema: int) -> None:
    assert list(STORED.glob(f"{schema}-*"))


def test_a_sound_run() -> None:
    report = report_of("1-sound")
    assert (report.verdict.value, report.world_size, report.steps, report.findings) == ("ok", 2, 16, ())
    compared = {check.name: check.compared for check in report.checks}
    assert compared["parameters after each step"] == 16
    assert compared["buffers after each synchronisation"] == 16
    assert report.run["unreadable_lines"] == 0


def test_a_wrapper_that_was_bypassed() -> None:
    report = report_of("1-bypass")
    assert (report.verdict.value, report.steps) == ("findings", 11)
    # Without gradients on record the general code is all there is to say.
    assert worse_than_a_note(report) == [("DDP201", 0, (0, 1, 2), "0.weight")]
    (finding,) = (finding for finding in report.findings if finding.code == "DDP201")
    # Its captures are lost; what ranks remembered of the step is in their records.
    assert finding.evidence["elements"]["exact"] is False
    assert len(finding.evidence["elements"]["values"]) == 4


def test_a_learning_rate_of_its_own() -> None:
    report = report_of("1-learning-rate")
    assert worse_than_a_note(report) == [("DDP206", 5, (2,), "0.weight")]
    (finding,) = (finding for finding in report.findings if finding.code == "DDP206")
    (row,) = finding.evidence["hyperparameters"]
    assert row["name"] == "lr"
    assert row["by_rank"]["0"] == row["by_rank"]["1"] != row["by_rank"]["2"]
    elements = finding.evidence["elements"]
    assert (elements["exact"], elements["of"], elements["step"]) == (True, 64 * 32, 5)
    assert elements["values"][0]["by_rank"].keys() == {"0", "2"}


def test_a_parameter_that_was_unfrozen() -> None:
    assert worse_than_a_note(report_of("1-unfrozen")) == [("DDP104", 5, (0, 1, 2), "3.weight")]


def test_a_rank_that_was_killed() -> None:
    report = report_of("1-killed")
    assert (report.verdict.value, report.exit_code, report.steps) == ("failed", 1, 7)
    assert worse_than_a_note(report) == [("DDP602", 6, (1,), None)]
    assert [row.status.value for row in report.attempts[0].ranks] == ["raised", "died"]


def test_a_damaged_run() -> None:
    """Torn lines, garbage, records of a later version, no description, a file that lost its head."""
    report = report_of("1-damaged")
    assert ("DDP206", 5, (2,), "0.weight") in worse_than_a_note(report)
    assert report.run["unreadable_lines"] == 2
    assert report.run["files_without_header"] == 1
    assert report.command == ()
