"""Step times of real jobs: a rank that is a fifth slower is found with its slow phase, even ranks are not."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.analysis.timing.table import time_tables
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, run_watched

pytestmark = pytest.mark.slow

CASES = JOBS / "clock_cases.py"
# The phase in which rank 1 is late, by case.
LATE = {
    "slow_forward": "forward",
    "slow_backward": "backward",
    "slow_data": "data",
    "slow_data_workers": "data",
}
# Last, because report.json holds the times of the last job.
EVEN = "even_with_pauses"
RETURNED = "memory_given_back"
# The jobs sleep instead of computing. A fifth of a step is long compared to the delay of a thread that wakes up, and
# ranks have real-time priority where the system permits it, so other programs hardly change what is measured.
SCALE = 2
STEPS = 32


@dataclass(frozen=True)
class Jobs:
    """One watched command that ran several cases; each is an attempt."""

    run: WatchedRun
    names: list[str]

    def stragglers(self, name: str) -> list[dict[str, Any]]:
        attempt = self.names.index(name)
        return [f for f in self.run.report["findings"] if f["code"] == "DDP402" and f["attempt"] == attempt]

    def table(self, name: str) -> TimeTable:
        reader = RunReader(self.run.folder)
        reader.finish()
        attempt = reader.ordered()[self.names.index(name)]
        [table] = time_tables(attempt.step_times, [module[0] for module in attempt.modules()])
        return table


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Jobs]:
    """All cases at a world size, run once."""
    ran: dict[int, Jobs] = {}

    def at(world_size: int) -> Jobs:
        if world_size not in ran:
            names = [*([RETURNED] if world_size == 2 else []), *LATE, EVEN]
            options = [
                "--cases",
                ",".join(names),
                "--world-size",
                world_size,
                "--scale",
                SCALE,
                "--steps",
                STEPS,
            ]
            run = run_watched(
                prepared(CASES, *options),
                tmp_path_factory.mktemp("clocks"),
                options=["--fail-on", "never"],
                env={"JOB_FIRST": "1"},
            )
            assert run.status == 0, str(run)
            assert len(run.report["attempts"]) == len(names)
            ran[world_size] = Jobs(run, names)
        return ran[world_size]

    return at


@pytest.mark.parametrize("world_size", [2, 4])
def test_stragglers_are_found_with_their_phase(jobs: Callable[[int], Jobs], world_size: int) -> None:
    done = jobs(world_size)
    results = {name: [(f["ranks"], f["stage"]) for f in done.stragglers(name)] for name in [*LATE, EVEN]}
    assert results == {**{name: [([1], phase)] for name, phase in LATE.items()}, EVEN: []}, str(done.run)
    check_even(done.run.report["time"], world_size)
    check_late(done.table("slow_forward"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the job sets options of glibc's malloc")
def test_a_rank_that_returns_memory_to_the_system_at_every_step(jobs: Callable[[int], Jobs]) -> None:
    done = jobs(2)
    [finding] = done.stragglers(RETURNED)
    assert (finding["ranks"], finding["stage"], finding["severity"]) == ([1], "forward", "note"), str(
        done.run
    )
    assert "MALLOC_TRIM_THRESHOLD_" in finding["fix"]
    # Twelve tensors of eight megabytes in each step, in pages of 4 KiB.
    assert finding["evidence"]["page_faults_more"] > 20_000
    kept, returned = done.table(RETURNED).ranks
    assert kept.faults is not None
    assert returned.faults is not None
    assert kept.faults < 2_000 < 20_000 < returned.faults
    assert (returned.kernel_us or 0) > (kept.kernel_us or 0)


def check_even(tables: list[dict[str, Any]], world_size: int) -> None:
    """The duration of each phase is known, and the scheduler can only add to it."""
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
        # DDP's own timer measured the same sleep.
        assert row["ddp_us"]["forward"] >= 30_000 * SCALE
    # At every tenth step rank 0 pauses for a second, and the others wait for it.
    assert table["pauses"] >= 1
    assert 0 < table["scaling"]["efficiency"] <= 1


def check_late(table: TimeTable) -> None:
    """Two independent timers measure how long the other ranks wait for rank 1: eleven milliseconds at SCALE 1."""
    others = [row for row in table.ranks if row.rank != 1]
    for row in others:
        assert row.parts["wait"].median_us >= 5_500 * SCALE
    waits = [row.ddp_us["communication"] - row.ddp_us.get("overlap", 0) for row in others]
    assert min(waits) >= 5_500 * SCALE
    assert table.cross_check is not None
    assert table.scaling.waiting_for_stragglers > 0
    assert table.scaling.efficiency < 0.95
