"""GitHub Actions: workflow commands that the job cannot forge, with source lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import AgreementHistory
from ddpcheck.reports.ci.github import add_summary, workflow_commands
from ddpcheck.reports.finding_text import script_line
from tests.helpers.sample_reports import attacking, stored

HANG = {
    "standings": [
        {"ranks": [0], "step": 3, "waits_in": "all_reduce", "left": False,
         "stack": ["/venv/lib/python3.11/site-packages/torch/x.py:9 in all_reduce", "/repo/train.py:12 in main"]},
        {"ranks": [1], "step": 3, "waits_in": None, "left": False,
         "stack": ["/venv/lib/python3.11/threading.py:1 in wait", "/repo/train.py:40 in save"]},
    ]
}  # fmt: skip


def finding(**fields: Any) -> Finding:
    return Finding(**{"code": "DDP603", "severity": Severity.ERROR, "title": "t", "message": "m", **fields})


def report_of(*findings: Finding) -> Report:
    return replace(
        stored("1-sound"), findings=findings, command=("torchrun", "--nproc-per-node", "2", "train.py")
    )


def test_the_script_is_named_where_no_line_is_known() -> None:
    [line] = workflow_commands(report_of(finding(step=3, cause="c", fix="f"))).splitlines()
    assert line == "::error file=train.py,title=DDP603 t::m%0Astep 3%0Awhy: c%0Afix: f"


def test_a_hang_points_at_the_line_of_the_outlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", "/repo")
    line = workflow_commands(report_of(finding(evidence=HANG, ranks=(1,))))
    assert line.startswith("::error file=train.py,line=40,title=")


def test_a_failure_points_at_the_line_that_raised() -> None:
    raised = finding(evidence={"details": {"1": "ValueError: bad (/repo/train.py:7)"}}, ranks=(1,))
    assert script_line(report_of(raised), raised) == ("/repo/train.py", 7)
    inside = finding(evidence={"details": {"1": "E: x (/usr/lib/python3.11/json/x.py:7)"}}, ranks=(1,))
    assert script_line(report_of(inside), inside) == ("train.py", None)


@pytest.mark.parametrize(
    ("code", "step", "line"),
    [("DDP101", None, 10), ("DDP104", 3, 30), ("DDP201", 3, 30), ("DDP302", 3, None)],
)
def test_parameter_findings_point_at_the_wrapping_or_the_step(
    code: str, step: int | None, line: int | None
) -> None:
    history = AgreementHistory("0", "Net", (0, 1), (), wrapped_at="model.py:10", stepped_at="C:loop.py:30")
    results = finding(code=code, step=step, module="0")
    file, number = script_line(replace(report_of(results), agreement=(history,)), results)
    assert number == line
    assert file == {10: "model.py", 30: "C:loop.py", None: "train.py"}[line]


def test_severities_have_their_own_commands() -> None:
    results = [finding(severity=severity) for severity in Severity]
    kinds = [line.split()[0] for line in workflow_commands(report_of(*results)).splitlines()]
    assert kinds == ["::error", "::warning", "::notice"]


def test_the_job_cannot_start_a_command_of_its_own() -> None:
    evil = "a\n::set-output name=x::y\r%0A, line=3::"
    [line] = workflow_commands(report_of(finding(title=evil, message=evil, parameter=evil))).splitlines()
    properties, _, message = line.removeprefix("::error ").partition("::")
    assert properties.count(",") == 1
    assert "%250A" in message
    assert all(one.startswith("::error ") for one in workflow_commands(attacking()).splitlines())


def test_no_more_than_github_shows() -> None:
    assert len(workflow_commands(report_of(*[finding()] * 30)).splitlines()) == 10


def test_the_summary_is_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    assert add_summary(report_of(finding()), {"GITHUB_STEP_SUMMARY": str(summary)})
    assert summary.read_text().startswith("before\n## ")
    assert add_summary(report_of(), {})
    assert not add_summary(report_of(), {"GITHUB_STEP_SUMMARY": str(tmp_path / "none" / "x")})
    assert "summary could not be written" in capsys.readouterr().err
