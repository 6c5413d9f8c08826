"""Runs of many ranks, made from records of a real one: what is wrong is found, in memory that steps do not fill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.records.reader import RecordFile
from ddpcheck.reports.json_report import to_json
from ddpcheck.reports.verdict import verdict_sentence
from tests.scale.generate import STORED_SEED, make_run
from tests.scale.plan import Plan

BROKEN = Plan(ranks=64, steps=50, epoch=20, outlier_rank=49, outlier_step=30, slow_node=2)
# What a rank may take, and a rank's step: its clocks and what its memory held, where its records take ten times that.
MOST_A_RANK = 400_000
MOST_A_STEP = 600

MEASURE = """
import sys
from pathlib import Path
from ddpcheck.analysis import run_reader as run
from ddpcheck.analysis.report_builder import analyse_run

# What is read ahead is bounded by these, which are more than a short run has.
run._BYTES_OF_ALL, run._LINES_OF_ALL = 1 << 20, 1 << 10

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

peaks = []
for path in sys.argv[1:]:
    analyse_run(Path(path))
    peaks.append(peak())
print(*peaks)
"""


def made(folder: Path, plan: Plan) -> Path:
    make_run(folder, STORED_SEED, plan)
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return analyse_run(made(tmp_path_factory.mktemp("scale") / "run", BROKEN))


def test_one_divergent_rank_and_one_slow_node_are_named_and_nothing_else(report: Report) -> None:
    outlier, slow = (finding for finding in report.findings if finding.severity.value != "note")
    assert (outlier.code, outlier.step, outlier.ranks, outlier.stage) == ("DDP201", 30, (49,), "params")
    assert outlier.parameter == "0.weight"
    assert (slow.code, slow.ranks, slow.stage) == ("DDP402", tuple(range(16, 24)), "backward")
    assert slow.evidence["hosts"] == ["node0002"]
    assert report.verdict is Verdict.FINDINGS


def test_all_was_compared(report: Report) -> None:
    checks = {check.name: check for check in report.checks}
    assert checks["parameters after each step"].compared == BROKEN.steps
    means = checks["reduced gradients against the mean"]
    assert (means.compared, means.outcome) == (BROKEN.steps, "agree")
    assert [(one.overlap, one.missing, one.complete) for one in report.data] == [(0, 0, True)] * 2
    assert len(report.hosts) == BROKEN.nodes


def test_the_report_says_that_no_job_wrote_this(report: Report) -> None:
    assert verdict_sentence(report).startswith("Synthetic records")
    assert json.loads(to_json(report))["run"]["synthetic"]["made_from"] == STORED_SEED.name


def test_a_sound_run_is_sound(tmp_path: Path) -> None:
    report = analyse_run(made(tmp_path / "run", Plan(ranks=24, steps=30)))
    assert [finding for finding in report.findings if finding.severity.value != "note"] == []
    assert report.verdict is Verdict.OK


def test_lines_are_like_those_of_the_seed(tmp_path: Path) -> None:
    """Kinds and fields of a rank's records are those that a real rank wrote, and all of them are readable."""
    run = made(tmp_path / "run", Plan(ranks=4, steps=30, epoch=30))

    def shapes(path: Path) -> set[tuple[str, ...]]:
        found = map(json.loads, path.read_text().splitlines())
        return {(raw["kind"], *sorted(raw.keys() - {"reduced", "step"})) for raw in found}

    seeds = set.union(*map(shapes, STORED_SEED.glob("rank-*.jsonl")))
    for path in run.glob("rank-*.jsonl"):
        assert shapes(path) <= seeds
        file = RecordFile(path)
        while file.read():
            pass
        assert (file.bad, file.torn) == (0, False)


def test_memory_is_bounded_by_ranks_and_not_by_steps(tmp_path: Path) -> None:
    # The step windows, too, are filled after 120 steps.
    plans = [Plan(ranks=16, steps=120), Plan(ranks=64, steps=120), Plan(ranks=64, steps=240)]
    runs = [made(tmp_path / str(number), plan) for number, plan in enumerate(plans)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, runs)], capture_output=True, text=True, check=True
    )
    few, many, longer = map(int, done.stdout.split())
    assert many - few < 48 * MOST_A_RANK
    assert longer - many < 64 * 120 * MOST_A_STEP
