"""Data and randomness in real jobs: every mistake is found under its own code, sound jobs raise nothing."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest

from tests.helpers.paths import JOBS
from tests.helpers.watched_run import RunWatched, WatchedRun

pytestmark = pytest.mark.slow

CASES = JOBS / "data_cases.py"

MISTAKES = {
    "no_sampler": "DDP301",
    "sequential_everywhere": "DDP301",
    "all_are_rank_0": "DDP301",
    "all_are_alone": "DDP301",
    "stream_unsplit": "DDP301",
    "seed_differs": "DDP302",
    "seed_differs_and_left_early": "DDP302",
    "shuffled_alone": "DDP302",
    "epoch_not_set": "DDP303",
    "epoch_not_set_and_left_early": "DDP303",
    "uneven_last_batch": "DDP305",
    "token_means": "DDP305",
    "same_dropout": "DDP306",
    "same_noise": "DDP306",
}
LOUD = {"DDP301": "error"}


def all_cases() -> list[str]:
    """Read from the source: importing them would import torch into the tests."""
    lines = CASES.read_text().splitlines()
    return [
        line.split()[1].partition("(")[0]
        for above, line in pairwise(lines)
        if above == "@case" and line.startswith("def ")
    ]


HEALTHY = [name for name in all_cases() if name.startswith("healthy_")]


def run(ddpcheck: RunWatched, names: list[str], world_size: int) -> WatchedRun:
    """All cases in one watched command: each is an attempt of its own."""
    done = ddpcheck(
        sys.executable,
        CASES,
        "--cases",
        ",".join(names),
        "--world-size",
        world_size,
        options=["--fail-on", "never"],
    )
    assert done.status == 0, str(done)
    assert len(done.report["attempts"]) == len(names)
    return done


def grave(done: WatchedRun, attempt: int) -> list[tuple[str, str]]:
    return [
        (finding["code"], finding["severity"])
        for finding in done.report["findings"]
        if finding["attempt"] == attempt and (finding["severity"] != "note" or finding["code"] == "DDP605")
    ]


def test_each_case_is_a_mistake_or_sound() -> None:
    assert set(all_cases()) == {*MISTAKES, *HEALTHY, "constant_input"}


def test_every_mistake_is_found_under_its_code(ddpcheck: RunWatched) -> None:
    names = [*MISTAKES, "constant_input"]
    done = run(ddpcheck, names, 2)
    found = {name: grave(done, number) for number, name in enumerate(names)}
    # Epochs that come in the same order are no secret where everybody has the same data anyway.
    expected = {name: [(code, LOUD.get(code, "warning"))] for name, code in MISTAKES.items()}
    assert found == {**expected, "constant_input": []}
    notes = [f for f in done.report["findings"] if f["attempt"] == names.index("constant_input")]
    assert [(note["code"], note["severity"]) for note in notes] == [("DDP301", "note")]


def test_a_finding_tells_the_shares_and_the_cause(ddpcheck: RunWatched) -> None:
    done = run(ddpcheck, ["seed_differs", "all_are_rank_0", "uneven_last_batch"], 3)
    overlap, same, uneven = (
        next(f for f in done.report["findings"] if f["attempt"] == number and f["severity"] != "note")
        for number in range(3)
    )
    [first, *_] = overlap["evidence"]["data_split"]
    assert (first["samples"], first["per_rank"]) == (48, {"0": 16, "1": 16, "2": 16})
    assert first["overlap"] > 2
    assert first["missing"] > 0
    assert "seeds differ (rank 0: 0, rank 1: 1, rank 2: 2)" in overlap["cause"]
    assert same["ranks"] == [0, 1, 2]
    assert "rank 0 of 3" in same["cause"]
    assert uneven["evidence"]["counts"] == {"0": 3, "1": 2, "2": 1}
    assert uneven["evidence"]["weights"] == {"0": 0.6667, "1": 1.0, "2": 2.0}


@pytest.mark.parametrize("world_size", [2, 3])
def test_sound_jobs_raise_nothing(ddpcheck: RunWatched, world_size: int) -> None:
    # At two ranks all of them; at three those in which the number of ranks makes a difference.
    names = (
        HEALTHY
        if world_size == 2
        else ["healthy_padding", "healthy_large", "healthy_accelerate", "healthy_join"]
    )
    done = run(ddpcheck, names, world_size)
    found = {name: grave(done, number) for number, name in enumerate(names)}
    assert found == {name: [] for name in names}


def test_the_table_of_the_data_split(ddpcheck: RunWatched) -> None:
    """Of 49 samples two ranks get 25 each, one of them for the second time."""
    done = run(ddpcheck, ["healthy_padding"], 2)
    assert [
        (row["epoch"], row["samples"], row["per_rank"], row["overlap"], row["missing"], row["padding"])
        for row in done.report["data"]
    ] == [(epoch, 49, {"0": 25, "1": 25}, 1, 0, 1) for epoch in range(3)]
    assert "0-2    49       2      25        1        0        1        DistributedSampler" in done.stderr
    batches = [record for record in done.records(0) if record["kind"] == "batch"]
    assert len(batches) == 21
    assert max(len(json.dumps(record)) for record in batches) < 150
