"""The summary: one line for each subject, from finished reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import AttemptSummary, Check, RankStatus, RankSummary, Report, Verdict
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.verdict import verdict_sentence
from ddpcheck.reports.views.summary import SummaryLine, summary_lines
from ddpcheck.reports.views.table import CellMark
from tests.helpers.overlap_builder import overlap
from tests.helpers.paths import ROOT
from tests.unit.reports.views.test_timing import built

STORED_RUNS = ROOT / "tests" / "stored_runs"


@pytest.fixture(scope="module")
def sound() -> Report:
    return analyse_run(STORED_RUNS / "1-sound")


def lines(report: Report) -> dict[str, SummaryLine]:
    found: dict[str, SummaryLine] = {}
    for line in summary_lines(report):
        found.setdefault(line.label, line)
    return found


def test_a_sound_run(sound: Report) -> None:
    of_run = lines(sound)
    assert of_run["replicas"].mark is CellMark.OK
    assert of_run["ranks"].text == f"0-{sound.world_size - 1} finished after {sound.steps} steps"
    assert len(summary_lines(sound)) <= 14


def test_replicas_that_differ_or_were_not_compared(sound: Report) -> None:
    differing = tuple(replace(check, outcome="differ") if check.compared else check for check in sound.checks)
    assert lines(replace(sound, checks=differing))["replicas"].mark is CellMark.ERROR
    nothing = (Check("parameters after each step", 0, "not checked"),)
    coverage = Coverage(complete=False, trained=12, compared=0)
    line = lines(replace(sound, checks=nothing, coverage=coverage))["replicas"]
    assert line.text == "not compared; 0 of 12 trained parameters compared"
    assert line.mark is CellMark.WARNING
    partial = replace(sound, coverage=replace(coverage, compared=6))
    assert lines(partial)["replicas"].mark is CellMark.WARNING


def test_ranks_that_failed_come_first() -> None:
    rows = [RankSummary(rank, RankStatus.FINISHED, host="a", steps=9) for rank in range(4)]
    rows[2] = replace(rows[2], status=RankStatus.DIED, steps=7, last_step=7, last_stage="local")
    report = Report(Verdict.FAILED, 4, 9, (), 1, (), (AttemptSummary(0, 4, 9, tuple(rows)),), ())
    line = lines(report)["ranks"]
    assert line.text == "2 died at step 7, local, 0-1, 3 finished after 9 steps"
    assert line.mark is CellMark.ERROR


def test_a_straggler_has_its_phase_and_cost(tmp_path: Path) -> None:
    report = built(tmp_path, 2).report()
    assert lines(report)["stragglers"].text.startswith("rank 1 in data loading: 10.0 ms per step (")
    alone = replace(report, time=tuple(replace(table, straggler=None) for table in report.time))
    assert lines(alone)["stragglers"].text == "none"


def test_what_could_not_be_judged_is_not_called_healthy(tmp_path: Path) -> None:
    report = built(tmp_path, 2).report()
    # 40 steps of 63 ms suffice; a run that short does not.
    assert report.not_judged == {}
    quiet = tuple(replace(table, straggler=None) for table in report.time)
    withheld = replace(report, time=quiet, not_judged={"DDP402": "too short"})
    assert lines(withheld)["stragglers"].text == "not judged"
    assert lines(withheld)["not judged"].text == "DDP402: too short"
    assert from_json(to_json(withheld)).not_judged == {"DDP402": "too short"}


def test_profiled_steps_have_the_figures_of_ddp401() -> None:
    line = lines(Report(Verdict.OK, 2, 3, (), 0, (), (), (), overlap=overlap()))["profile"]
    assert line.text.startswith(
        "exposed transfers 25.0 ms (25.0 %) and waiting for the last rank 5.0 ms (5.0 %)"
    )
    assert line.text.endswith("medians of 3 profiled steps")


def test_an_interrupted_run_says_what_held_until_then(sound: Report) -> None:
    interrupted = replace(
        sound,
        verdict=Verdict.FAILED,
        exit_code=1,
        findings=(),
        steps=1966,
        run={**sound.run, "interrupted": True},
    )
    assert verdict_sentence(interrupted) == "Interrupted after 1,966 steps; replicas agreed so far"
    hang = Finding("DDP603", Severity.ERROR, "Ranks hang", "")
    assert (
        verdict_sentence(replace(interrupted, findings=(hang,)))
        == "Interrupted after 1,966 steps: ranks hang (DDP603)"
    )
    unknown = replace(interrupted, checks=())
    assert verdict_sentence(unknown) == "Interrupted after 1,966 steps"


def test_an_empty_report_has_no_lines() -> None:
    assert summary_lines(Report(Verdict.INCOMPLETE, 0, 0, (), None, (), (), ())) == []


def test_stored_runs_of_every_kind_have_a_summary() -> None:
    for folder in sorted(Path(STORED_RUNS).iterdir()):
        assert all(line.text for line in summary_lines(analyse_run(folder)))
