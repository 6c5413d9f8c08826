"""Memory of real jobs: growth and imbalance are found, and fluctuation is not reported."""

from __future__ import annotations

import pytest

from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, run_watched

pytestmark = pytest.mark.slow

CASES = ["leak", "uneven", "steady"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """Three jobs one after the other; each is an attempt."""
    job = prepared(JOBS / "memory_cases.py", ",".join(CASES))
    return run_watched(job, tmp_path_factory.mktemp("memory"))


def test_growth_and_imbalance_are_found(watched: WatchedRun) -> None:
    assert watched.status == 0, str(watched)
    results = {(CASES[f["attempt"]], f["code"]): f for f in watched.report["findings"]}
    assert set(results) == {("leak", "DDP501"), ("uneven", "DDP501")}, str(watched)
    leak, uneven = results["leak", "DDP501"], results["uneven", "DDP501"]
    assert (leak["ranks"], leak["severity"], uneven["ranks"]) == ([1], "warning", [1])
    assert leak["evidence"]["bytes_a_step"]["1"] == pytest.approx(2 << 20, rel=0.1)
    held = uneven["evidence"]["bytes"]
    assert held["1"] - held["0"] == pytest.approx(700 << 20, rel=0.1)


def test_the_report_has_a_row_for_each_rank(watched: WatchedRun) -> None:
    rows = watched.report["memory"]["ranks"]
    assert [(row["rank"], row["measured"], row["steps"]) for row in rows] == [
        (0, "resident", 80),
        (1, "resident", 80),
    ]
    for row in rows:
        assert (row["parameters"], row["gradients"], row["buckets"]) == (1088, 1088, 1088)
        assert row["most"] >= row["after_step"] > row["before"] > 1 << 20
        assert row["curve"][-1][0] >= 48
