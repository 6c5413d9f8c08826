"""Clocks of real jobs: a rank that is a fifth slower is named with what it is slower in; even ranks are not."""

from __future__ import annotations

import platform
import sys
from typing import Any

import pytest

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.analysis.timing.table import time_tables
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import RunWatched, WatchedRun

pytestmark = pytest.mark.slow

CASES = JOBS / "clock_cases.py"
# By case: the part in which rank 1 is late.
LATE = {
    "slow_forward": "forward",
    "slow_backward": "backward",
    "slow_data": "data",
    "slow_data_workers": "data",
}
# Last, because report.json shows the time of the last job.
EVEN = "even_with_pauses"
# Work is sleep, a fifth of it is long against what a scheduler does to a thread that wakes up, and where the system
# lets them, ranks come before other programs: what is measured is the job and not what else the machine does.
SCALE = 2


def run(ddpcheck: RunWatched, names: list[str], world_size: int) -> WatchedRun:
    options = ["--cases", ",".join(names), "--world-size", world_size, "--scale", SCALE]
    done = ddpcheck(sys.executable, CASES, *options, options=["--fail-on", "never"], JOB_FIRST="1")
    assert done.status == 0, str(done)
    assert len(done.report["attempts"]) == len(names)
    return done


def late(done: WatchedRun, attempt: int) -> list[tuple[list[int], str]]:
    return [
        (finding["ranks"], finding["stage"])
        for finding in done.report["findings"]
        if finding["code"] == "DDP402" and finding["attempt"] == attempt
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_late_ranks_are_named(ddpcheck: RunWatched, world_size: int) -> None:
    names = [*LATE, EVEN]
    done = run(ddpcheck, names, world_size)
    found = {name: late(done, number) for number, name in enumerate(names)}
    assert found == {**{name: [([1], part)] for name, part in LATE.items()}, EVEN: []}, str(done)
    judge_even(done.report["time"], world_size)
    judge_late(tables(done)[0])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told what to keep")
def test_a_rank_whose_memory_is_taken_anew_in_each_step(ddpcheck: RunWatched) -> None:
    done = run(ddpcheck, ["memory_given_back"], 2)
    [finding] = [each for each in done.report["findings"] if each["code"] == "DDP402"]
    assert (finding["ranks"], finding["stage"], finding["severity"]) == ([1], "forward", "note"), str(done)
    assert finding["cause"].startswith("page faults: ")
    assert "MALLOC_TRIM_THRESHOLD_" in finding["fix"]
    # Twelve times eight megabytes.
    assert finding["evidence"]["page_faults_more"] > 20_000
    [table] = done.report["time"]
    kept, given_back = table["ranks"]
    assert kept["faults"] < 2_000 < 20_000 < given_back["faults"]
    assert given_back["kernel_us"] > kept["kernel_us"]
    assert "memory is given back and taken again" in " ".join(done.stderr.split())


def tables(done: WatchedRun) -> list[TimeTable]:
    """Where the time of each job went."""
    run = RunReader(done.folder)
    run.finish()
    found = [time_tables(each.clocks, [module[0] for module in each.modules()]) for each in run.ordered()]
    return [only for (only,) in found]


def judge_even(tables: list[dict[str, Any]], world_size: int) -> None:
    """What each part takes is known, and the scheduler can only add to it."""
    [table] = tables
    assert (table["group"], table["straggler"]) == (list(range(world_size)), None)
    for row in table["ranks"]:
        took = {part: spent["median_us"] / 1000 for part, spent in row["parts"].items()}
        assert took["data"] >= 4 * SCALE
        assert took["forward"] >= 30 * SCALE
        assert took["backward"] >= 20 * SCALE
        assert sum(part["mean_us"] for part in row["parts"].values()) == pytest.approx(
            row["step"]["mean_us"], abs=10
        )
        # DDP's own clock saw the same sleep.
        assert row["ddp_us"]["forward"] >= 30_000 * SCALE
    # At every tenth step rank 0 makes a pause of a second, which the others wait for.
    assert table["pauses"] >= 1
    assert 0 < table["scaling"]["efficiency"] <= 1


def judge_late(table: TimeTable) -> None:
    """Two clocks that know nothing of each other see the others wait for rank 1, by eleven milliseconds."""
    others = [row for row in table.ranks if row.rank != 1]
    for row in others:
        assert row.parts["wait"].median_us >= 5_500 * SCALE
    waits = [row.ddp_us["communication"] - row.ddp_us.get("overlap", 0) for row in others]
    assert min(waits) >= 5_500 * SCALE
    assert table.cross_check is not None
    assert table.scaling.waiting_for_stragglers > 0
    assert table.scaling.efficiency < 0.95
