"""Clocks of real jobs: a rank that is a fifth slower is named with what it is slower in; even ranks are not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from conftest import JOBS, RunWatched, Watched

pytestmark = pytest.mark.slow

CASES = JOBS / "clock_cases.py"
# By case: the late rank and what it is late in.
LATE = {
    "slow_forward": ([1], "forward"),
    "slow_data": ([1], "data"),
}
EVEN = ["even_with_pauses"]


def run(ddpcheck: RunWatched, names: list[str], world_size: int) -> Watched:
    options = ["--cases", ",".join(names), "--world-size", world_size]
    done = ddpcheck(sys.executable, CASES, *options, options=["--fail-on", "never"])
    assert done.status == 0, str(done)
    assert len(done.report["attempts"]) == len(names)
    return done


def late(done: Watched, attempt: int) -> list[tuple[list[int], str]]:
    return [
        (finding["ranks"], finding["stage"])
        for finding in done.report["findings"]
        if finding["code"] == "DDP402" and finding["attempt"] == attempt
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_late_ranks_are_named(ddpcheck: RunWatched, world_size: int) -> None:
    names = [*LATE, *EVEN]
    done = run(ddpcheck, names, world_size)
    found = {name: late(done, number) for number, name in enumerate(names)}
    assert found == {**{name: [told] for name, told in LATE.items()}, **{name: [] for name in EVEN}}, str(
        done
    )
    [finding, *_] = (f for f in done.report["findings"] if f["attempt"] == 0)
    assert 7 < finding["evidence"]["excess_ms"]["forward"] < 15
    [table] = done.report["time"]
    judge_even(table, world_size)


def judge_even(table: dict[str, Any], world_size: int) -> None:
    """Of the last job: what each part took is known, and the scheduler can only have added to it."""
    assert (table["group"], table["straggler"]) == (list(range(world_size)), None)
    # At every tenth step rank 0 made a pause.
    assert table["pauses"] >= 3
    for row in table["ranks"]:
        took = {part: spent["median_us"] / 1000 for part, spent in row["parts"].items()}
        assert 4 <= took["data"] < 12
        assert 30 <= took["forward"] < 45
        assert 20 <= took["backward"] < 35
        # DDP's own clock saw the same forward.
        assert row["ddp_us"]["forward"] / 1000 == pytest.approx(took["forward"], rel=0.3)
    assert 0.5 < table["scaling"]["efficiency"] <= 1
