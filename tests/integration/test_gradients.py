"""Gradients from backward to step: every known fault gets its finding, and saved gradients can be compared."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.helpers.commands import BIN, CommandResult
from tests.helpers.fork_server import prepared
from tests.helpers.launchers import forked
from tests.helpers.paths import EXAMPLES, JOBS
from tests.helpers.watched_run import RunWatched, WatchedRun, run_to_end, run_watched

pytestmark = pytest.mark.slow

CAT = EXAMPLES / "cat_walkthrough.py"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[WatchedRun, list[Any]]:
    """All broken jobs one after the other in one run; each is an attempt."""
    folder = tmp_path_factory.mktemp("faults")
    results = folder / "results.json"
    done = run_watched(prepared(JOBS / "faults.py", "--out", results), folder)
    return done, json.loads(results.read_text())


def test_each_broken_job_gets_its_finding_and_no_other(faults: tuple[WatchedRun, list[Any]]) -> None:
    done, expected = faults
    assert len(done.report["attempts"]) == len(expected) >= 19
    wrong = []
    for number, fault in enumerate(expected):
        matches = [
            (finding["code"], finding["step"], tuple(finding["ranks"]), finding["cause"])
            for finding in done.report["findings"]
            if finding["attempt"] == number and finding["severity"] != "note"
        ]
        step = None if fault["step"] < 0 else fault["step"]
        right = len(matches) == 1 and matches[0][:3] == (fault["code"], step, tuple(fault["ranks"]))
        if not right or fault["cause"] not in matches[0][3]:
            wrong.append((fault, matches))
    assert not wrong


def test_evidence_holds_the_values_that_differ(faults: tuple[WatchedRun, list[Any]]) -> None:
    done, expected = faults
    number = next(n for n, fault in enumerate(expected) if fault["name"] == "clipped_on_one")
    finding = next(f for f in done.report["findings"] if f["attempt"] == number)
    elements = finding["evidence"]["elements"]
    assert elements["step"] == 3
    # A rank that detects the difference late has no values of that step; the outlier and one other rank have them.
    values = dict(elements["values"][0]["by_rank"])
    outlier = values.pop("1")
    assert len(set(values.values()) | {outlier}) == 2


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """The example of docs/walkthrough on four ranks."""
    return run_watched(forked(4, CAT), tmp_path_factory.mktemp("cat"), options=["--save-gradients", 0])


def gradients_of(run: WatchedRun, step: int) -> CommandResult:
    return run_to_end([BIN / "ddpcheck", "report", run.folder, "--gradients", step], run.folder, {})


def test_numbers_of_the_cat_example(cat: WatchedRun) -> None:
    assert cat.status == 0
    assert cat.stdout == "rank 0: ear 0.70, whiskers 0.50, eyes 0.50\n"
    assert cat.report["verdict"] == "ok"
    # Rows of the printed table: weights before, gradient of each rank, reduced gradient, weights after.
    shown = gradients_of(cat, 0).stdout
    rows = [re.findall(r"-?\d\.\d+", line) for line in shown.splitlines() if line.startswith("  ")]
    # The first number of each row is the norm.
    assert [row[1:] for row in rows if len(row) == 4] == [
        ["0.5", "0.3", "0.2"],
        ["-0.1", "-0.2", "-0.3"],
        ["-0.2", "-0.1", "-0.4"],
        ["-0.3", "-0.3", "-0.2"],
        ["-0.2", "-0.2", "-0.3"],
        ["-0.2", "-0.2", "-0.3"],
        ["0.7", "0.5", "0.5"],
    ]


def test_saved_gradients_are_safetensors(cat: WatchedRun) -> None:
    from safetensors.torch import load_file

    (file,) = (cat.folder / "gradients").glob("step-00000000-module-0-rank-00002-????????.safetensors")
    kept = load_file(file)
    assert kept["local/cat"].tolist() == pytest.approx([-0.3, -0.3, -0.2])
    assert kept["reduced/cat"].tolist() == pytest.approx([-0.2, -0.2, -0.3])


def test_a_step_that_was_not_saved(cat: WatchedRun) -> None:
    done = gradients_of(cat, 7)
    assert done.status == 1
    assert "7" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_cat_example_without_ddp(ddpcheck: RunWatched) -> None:
    done = ddpcheck(*forked(4, CAT, "--alone"))
    assert done.status == 10
    finding = done.finding("DDP202")
    assert (finding["step"], finding["stage"], finding["parameter"]) == (0, "applied", "cat")
    assert finding["ranks"] == [0, 1, 2, 3]
    # Four ranks share one output, so lines may be mixed.
    assert sorted(re.findall(r"rank \d: ear [\d.]+, whiskers [\d.]+, eyes \d\.\d\d", done.stdout)) == [
        "rank 0: ear 0.60, whiskers 0.50, eyes 0.50",
        "rank 1: ear 0.70, whiskers 0.40, eyes 0.60",
        "rank 2: ear 0.80, whiskers 0.60, eyes 0.40",
        "rank 3: ear 0.70, whiskers 0.50, eyes 0.50",
    ]
