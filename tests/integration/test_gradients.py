"""Gradients from backward to step: every known way of losing them is named, and full ones can be compared."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import BIN, CommandResult
from tests.helpers.paths import EXAMPLES, JOBS
from tests.helpers.watched_run import RunWatched, WatchedRun, run_to_end

pytestmark = pytest.mark.slow

CAT = EXAMPLES / "cat_walkthrough.py"


def watched(folder: Path, command: Sequence[object], *options: object) -> WatchedRun:
    """Like the fixture `ddpcheck`, for jobs that several tests share."""
    watch = [BIN / "ddpcheck", "run", "--out", folder / "run", *options, "--", *command]
    done = run_to_end(watch, folder, {}, leaves=folder / "run")
    report = json.loads((folder / "run" / "report.json").read_text())
    return WatchedRun(done.status, done.stdout, done.stderr, folder / "run", report)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[WatchedRun, list[Any]]:
    """All broken jobs, one after the other under one watch; each is an attempt of its own."""
    folder = tmp_path_factory.mktemp("faults")
    results = folder / "results.json"
    done = watched(folder, [sys.executable, JOBS / "faults.py", "--out", results])
    return done, json.loads(results.read_text())


def test_each_broken_job_gets_its_finding_and_no_other(faults: tuple[WatchedRun, list[Any]]) -> None:
    done, expected = faults
    assert len(done.report["attempts"]) == len(expected) >= 19
    wrong = []
    for number, fault in enumerate(expected):
        found = [
            (finding["code"], finding["step"], tuple(finding["ranks"]), finding["cause"])
            for finding in done.report["findings"]
            if finding["attempt"] == number and finding["severity"] != "note"
        ]
        step = None if fault["step"] < 0 else fault["step"]
        right = len(found) == 1 and found[0][:3] == (fault["code"], step, tuple(fault["ranks"]))
        if not right or fault["cause"] not in found[0][3]:
            wrong.append((fault, found))
    assert not wrong


def test_the_values_that_part_are_shown(faults: tuple[WatchedRun, list[Any]]) -> None:
    done, expected = faults
    number = next(n for n, fault in enumerate(expected) if fault["name"] == "clipped_on_one")
    finding = next(f for f in done.report["findings"] if f["attempt"] == number)
    elements = finding["evidence"]["elements"]
    assert elements["step"] == 3
    # A rank that saw the disagreement late has no values of that step to show; the odd one and another do.
    values = dict(elements["values"][0]["by_rank"])
    odd = values.pop("1")
    assert len(set(values.values()) | {odd}) == 2


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    command = [BIN / "torchrun", "--nproc-per-node", "4", CAT]
    return watched(tmp_path_factory.mktemp("cat"), command, "--save-gradients", "0")


def gradients_of(run: WatchedRun, step: int) -> CommandResult:
    return run_to_end([BIN / "ddpcheck", "report", run.folder, "--gradients", step], run.folder, {})


def test_the_cats_numbers(cat: WatchedRun) -> None:
    assert cat.status == 0
    assert cat.stdout == "rank 0: ear 0.70, whiskers 0.50, eyes 0.50\n"
    assert cat.report["verdict"] == "ok"
    shown = gradients_of(cat, 0).stdout
    rows = {line[2:28].strip(): line[28:].split() for line in shown.splitlines() if line.startswith("  ")}
    assert rows["weights before, all ranks"][1:] == ["0.5", "0.3", "0.2"]
    assert rows["gradient of rank 0"][1:] == ["-0.1", "-0.2", "-0.3"]
    assert rows["gradient of rank 1"][1:] == ["-0.2", "-0.1", "-0.4"]
    assert rows["gradient of rank 2"][1:] == ["-0.3", "-0.3", "-0.2"]
    assert rows["gradient of rank 3"][1:] == ["-0.2", "-0.2", "-0.3"]
    assert rows["reduced, all ranks"][1:] == ["-0.2", "-0.2", "-0.3"]
    assert rows["weights after, all ranks"][1:] == ["0.7", "0.5", "0.5"]


def test_saved_gradients_are_safetensors(cat: WatchedRun) -> None:
    from safetensors.torch import load_file

    (file,) = (cat.folder / "gradients").glob("step-00000000-module-0-rank-00002-????????.safetensors")
    kept = load_file(file)
    assert kept["local/cat"].tolist() == pytest.approx([-0.3, -0.3, -0.2])
    assert kept["reduced/cat"].tolist() == pytest.approx([-0.2, -0.2, -0.3])


def test_a_step_that_was_not_saved(cat: WatchedRun) -> None:
    done = gradients_of(cat, 7)
    assert done.status == 1
    assert "has no saved gradients of step 7 (saved steps: 0)." in done.stderr


def test_four_cats_without_ddp(ddpcheck: RunWatched) -> None:
    done = ddpcheck(BIN / "torchrun", "--nproc-per-node", "4", CAT, "--alone")
    assert done.status == 10
    finding = done.finding("DDP202")
    assert (finding["cause"], finding["step"], finding["parameter"]) == ("wrapper bypassed", 0, "cat")
    assert finding["ranks"] == [0, 1, 2, 3]
    # Four ranks share one output: a line may end up within another's.
    assert sorted(re.findall(r"rank \d: ear [\d.]+, whiskers [\d.]+, eyes \d\.\d\d", done.stdout)) == [
        "rank 0: ear 0.60, whiskers 0.50, eyes 0.50",
        "rank 1: ear 0.70, whiskers 0.40, eyes 0.60",
        "rank 2: ear 0.80, whiskers 0.60, eyes 0.40",
        "rank 3: ear 0.70, whiskers 0.50, eyes 0.50",
    ]
