"""Memory of real jobs: growth and unevenness are found, and nothing is said of a job that is merely lively."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.commands import BIN
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, read_run, run_to_end

pytestmark = pytest.mark.slow

CASES = ["leak", "uneven", "steady"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """Three jobs, one after the other: each an attempt of its own."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    command = [BIN / "ddpcheck", "run", "--out", folder, "--", sys.executable, JOBS / "memory_cases.py"]
    done = run_to_end([*command, ",".join(CASES)], folder.parent, {})
    return read_run(done, folder)


def test_each_case_gets_what_it_deserves(watched: WatchedRun) -> None:
    assert watched.status == 0, str(watched)
    said = {(CASES[f["attempt"]], f["code"]): f for f in watched.report["findings"]}
    assert set(said) == {("leak", "DDP501"), ("uneven", "DDP501")}, str(watched)
    leak, uneven = said["leak", "DDP501"], said["uneven", "DDP501"]
    assert (leak["ranks"], leak["severity"], uneven["ranks"]) == ([1], "warning", [1])
    assert leak["evidence"]["bytes_a_step"]["1"] == pytest.approx(2 << 20, rel=0.1)
    held = uneven["evidence"]["bytes"]
    assert held["1"] - held["0"] == pytest.approx(700 << 20, rel=0.1)


def test_the_report_holds_a_row_for_each_rank(watched: WatchedRun) -> None:
    rows = watched.report["memory"]["ranks"]
    assert [(row["rank"], row["measured"], row["steps"]) for row in rows] == [
        (0, "resident", 80),
        (1, "resident", 80),
    ]
    for row in rows:
        assert (row["parameters"], row["gradients"], row["buckets"]) == (1088, 1088, 1088)
        assert row["most"] >= row["after_step"] > row["before"] > 1 << 20
        assert row["curve"][-1][0] >= 48
    assert "Memory of the processes" in watched.stderr
