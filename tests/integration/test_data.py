"""Data and random numbers in real jobs: every mistake is found under its own code, healthy jobs raise nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, run_watched

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
ERRORS = {"DDP301"}
# Mistakes whose evidence is checked at three ranks.
DETAILED = ("seed_differs", "all_are_rank_0", "uneven_last_batch")
# Healthy jobs in which the number of ranks makes a difference.
AT_THREE = ("healthy_padding", "healthy_large", "healthy_accelerate", "healthy_join")
# A healthy job of 49 samples; last, because report.json holds the data of the last job.
PADDING = "healthy_padding"


def all_cases() -> list[str]:
    """Read from the source: importing the cases would import torch into the tests."""
    lines = CASES.read_text().splitlines()
    return [
        line.split()[1].partition("(")[0]
        for above, line in pairwise(lines)
        if above == "@case" and line.startswith("def ")
    ]


HEALTHY = [name for name in all_cases() if name.startswith("healthy_")]


@dataclass(frozen=True)
class Jobs:
    """One watched command that ran several cases; each is an attempt."""

    run: WatchedRun
    names: list[str]

    def findings(self, name: str) -> list[dict[str, Any]]:
        attempt = self.names.index(name)
        return [finding for finding in self.run.report["findings"] if finding["attempt"] == attempt]

    def reported(self, name: str) -> list[tuple[str, str]]:
        """Findings above a note, and DDP605."""
        return [
            (finding["code"], finding["severity"])
            for finding in self.findings(name)
            if finding["severity"] != "note" or finding["code"] == "DDP605"
        ]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Jobs]:
    """All cases for a world size, run once."""
    ran: dict[int, Jobs] = {}
    others = [name for name in HEALTHY if name != PADDING]
    cases = {2: [*MISTAKES, "constant_input", *others, PADDING], 3: [*DETAILED, *AT_THREE]}

    def at(world_size: int) -> Jobs:
        if world_size not in ran:
            names = cases[world_size]
            command = prepared(CASES, "--cases", ",".join(names), "--world-size", world_size)
            run = run_watched(command, tmp_path_factory.mktemp("data"), options=["--fail-on", "never"])
            assert run.status == 0, str(run)
            assert len(run.report["attempts"]) == len(names)
            ran[world_size] = Jobs(run, names)
        return ran[world_size]

    return at


def test_each_case_is_a_mistake_or_healthy() -> None:
    assert set(all_cases()) == {*MISTAKES, *HEALTHY, "constant_input"}


def test_every_mistake_is_found_under_its_code(jobs: Callable[[int], Jobs]) -> None:
    done = jobs(2)
    results = {name: done.reported(name) for name in (*MISTAKES, "constant_input")}
    # Where all ranks have the same data, epochs in the same order are not reported as well.
    expected = {name: [(code, "error" if code in ERRORS else "warning")] for name, code in MISTAKES.items()}
    assert results == {**expected, "constant_input": []}
    [note] = done.findings("constant_input")
    assert (note["code"], note["severity"]) == ("DDP301", "note")


def test_evidence_of_the_split(jobs: Callable[[int], Jobs]) -> None:
    done = jobs(3)
    overlap, same, uneven = (
        next(finding for finding in done.findings(name) if finding["severity"] != "note") for name in DETAILED
    )
    [first, *_] = overlap["evidence"]["data_split"]
    assert (first["samples"], first["per_rank"]) == (48, {"0": 16, "1": 16, "2": 16})
    assert first["overlap"] > 2
    assert first["missing"] > 0
    assert same["ranks"] == [0, 1, 2]
    assert uneven["evidence"]["counts"] == {"0": 3, "1": 2, "2": 1}
    assert uneven["evidence"]["weights"] == {"0": 0.6667, "1": 1.0, "2": 2.0}


@pytest.mark.parametrize(("world_size", "names"), [(2, HEALTHY), (3, AT_THREE)], ids=["2", "3"])
def test_healthy_jobs_raise_nothing(jobs: Callable[[int], Jobs], world_size: int, names: list[str]) -> None:
    done = jobs(world_size)
    assert {name: done.reported(name) for name in names} == {name: [] for name in names}


def test_the_table_of_the_split(jobs: Callable[[int], Jobs]) -> None:
    """Of 49 samples each of two ranks gets 25, one of them for the second time."""
    done = jobs(2)
    assert [
        (row["epoch"], row["samples"], row["per_rank"], row["overlap"], row["missing"], row["padding"])
        for row in done.run.report["data"]
    ] == [(epoch, 49, {"0": 25, "1": 25}, 1, 0, 1) for epoch in range(3)]
    records = done.run.records(0, attempt=done.names.index(PADDING))
    batches = [record for record in records if record["kind"] == "batch"]
    assert len(batches) == 21
    assert max(len(json.dumps(record)) for record in batches) < 150
