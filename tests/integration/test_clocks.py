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
TRIES = 3


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
    assert {name: found[name] for name in EVEN} == {name: [] for name in EVEN}, str(done)
    judge_even(done.report["time"], world_size)
    for _ in range(TRIES - 1):
        # On a machine that is busy with other things it may rightly have said nothing; it must not name another.
        missed = [name for name in LATE if not found[name]]
        if missed:
            again = run(ddpcheck, missed, world_size)
            found.update({name: late(again, number) for number, name in enumerate(missed)})
    assert {name: found[name] for name in LATE} == {name: [told] for name, told in LATE.items()}, str(done)


def judge_even(tables: list[dict[str, Any]], world_size: int) -> None:
    """Of the last job: what each part takes is known, and the scheduler can only add to it."""
    [table] = tables
    assert (table["group"], table["straggler"]) == (list(range(world_size)), None)
    for row in table["ranks"]:
        took = {part: spent["median_us"] / 1000 for part, spent in row["parts"].items()}
        assert took["data"] >= 4
        assert took["forward"] >= 30
        assert took["backward"] >= 20
        assert sum(part["mean_us"] for part in row["parts"].values()) == pytest.approx(
            row["step"]["mean_us"], abs=10
        )
        # DDP's own clock saw the same sleep.
        assert row["ddp_us"]["forward"] >= 30_000
    # At every tenth step rank 0 makes a pause of half a second, which the others wait for.
    assert table["pauses"] >= 1
    assert 0 < table["scaling"]["efficiency"] <= 1
