"""What is recorded as the local gradient is the gradient of this rank alone, before DDP divides or reduces it.

tests/jobs/local_gradients.py trains with every way in which DDP treats gradients, and computes the true local gradients
with a copy of the module without DDP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.codecs import unpack
from ddpcheck.records.kinds.modules import PYTHON_REDUCER
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, run_watched

pytestmark = pytest.mark.slow

JOB = JOBS / "local_gradients.py"
# Read as text: importing the job would import torch into the tests.
VARIANTS = re.findall(r"^@variant\ndef (\w+)", JOB.read_text(), re.MULTILINE)
WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3

# A compiled backward runs no callbacks, and the hooks of its reducer run before ours: there must be no record.
WITHOUT_RECORDS = ("compiled_autograd_python_reducer",)


@dataclass(frozen=True)
class Jobs:
    """A finished run with one attempt for each world size, and the true gradients that its ranks wrote."""

    run: WatchedRun
    world_sizes: tuple[int, ...]
    truth: Path

    def variant(self, name: str, world_size: int, rank: int) -> Mapping[str, Any]:
        variants = json.loads((self.truth / f"{world_size}-{rank}.json").read_text())
        found: Mapping[str, Any] = next(each for each in variants if each["name"] == name)
        return found

    def records(self, kind: str, module: int, world_size: int, rank: int) -> list[dict[str, Any]]:
        # Each rank numbers its own files.
        with_rank = [size for size in self.world_sizes if size > rank]
        records = self.run.records(rank, with_rank.index(world_size))
        # The copies without DDP are tracked as well.
        wrapped = [
            each["module"]
            for each in records
            if each["kind"] == "module" and each.get("role", "ddp") == "ddp"
        ]
        index = list(dict.fromkeys(wrapped))[module]
        return [each for each in records if each["kind"] == kind and each.get("module", 0) == index]

    def differences(self, name: str, world_size: int) -> list[tuple[int, int, str]]:
        """Rank, number of the backward and parameter where the recorded sketch is not that of the local gradient."""
        return [
            (rank, number, parameter)
            for rank in range(world_size)
            for number, parameter in self._differences(name, world_size, rank)
        ]

    def _differences(self, name: str, world_size: int, rank: int) -> list[tuple[int, str]]:
        truth = self.variant(name, world_size, rank)
        [module] = self.records("module", truth["module"], world_size, rank)
        backwards = self.records("backward", truth["module"], world_size, rank)
        assert [each["number"] for each in backwards] == list(range(1, len(truth["expected"]) + 1))
        parameters = [row[0] for row in module["parameters"]]
        return [
            (backward["number"], parameter)
            for backward, rows in zip(backwards, truth["expected"], strict=True)
            for parameter, recorded, row in zip(parameters, unpack(backward["local"]), rows, strict=True)
            if not _equal(recorded, *row)
        ]


def _equal(recorded: Any, value: float, norm: float, nonfinite: int) -> bool:
    """Whether a sketch is the recorded one, to within the precision of the record."""
    return (
        abs(recorded.value - value) <= recorded.error + 1e-12 * norm
        and recorded.norm_low <= norm * (1 + 1e-9)
        and norm <= recorded.norm * (1 + 1e-9)
        and recorded.nonfinite == nonfinite
    )


def run_jobs(folder: Path, world_sizes: tuple[int, ...], *options: object, status: int = 0) -> Jobs:
    truth = folder / "truth"
    truth.mkdir()
    command = prepared(JOB, "--world-sizes", ",".join(map(str, world_sizes)), "--out", truth)
    jobs = Jobs(run_watched([*command, *options], folder), world_sizes, truth)
    assert jobs.run.status == status, str(jobs.run)
    assert jobs.run.files("fault-*.jsonl") == []
    return jobs


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return run_jobs(tmp_path_factory.mktemp("jobs"), WORLD_SIZES)


def cases() -> list[Any]:
    return [
        pytest.param(
            name,
            world_size,
        )
        for world_size in WORLD_SIZES
        for name in VARIANTS
        if name not in WITHOUT_RECORDS
    ]


@pytest.mark.parametrize(("name", "world_size"), cases())
def test_the_recorded_gradient_is_the_local_one(jobs: Jobs, name: str, world_size: int) -> None:
    truth = jobs.variant(name, world_size, 0)
    if truth["skipped"]:
        pytest.skip(truth["skipped"])
    assert len(truth["expected"]) == STEPS
    assert jobs.differences(name, world_size) == []


@pytest.mark.parametrize("name", WITHOUT_RECORDS)
def test_reduced_gradients_are_not_recorded_as_local_ones(jobs: Jobs, name: str) -> None:
    truth = jobs.variant(name, 2, 0)
    if truth["skipped"]:
        pytest.skip(truth["skipped"])
    assert len(truth["expected"]) == STEPS
    for rank in range(2):
        # What the report says of it.
        [module] = jobs.records("module", truth["module"], 2, rank)
        assert module["options"][PYTHON_REDUCER] is True
        assert jobs.records("applied", truth["module"], 2, rank)
        assert jobs.records("backward", truth["module"], 2, rank) == []


def test_only_the_options_that_torch_lacks_are_skipped(jobs: Jobs) -> None:
    skipped = {
        (name, world_size)
        for world_size in WORLD_SIZES
        for name in VARIANTS
        if jobs.variant(name, world_size, 0)["skipped"]
    }
    assert {name for name, _ in skipped} <= {
        "batched_copy",
        "batched_copy_bucket_view",
        "compiled_autograd",
        "compiled_autograd_python_reducer",
    }


def test_local_gradients_of_ranks_differ_from_each_other(jobs: Jobs) -> None:
    """Otherwise a reduced gradient would be taken for a local one."""
    rows = [jobs.variant("default", 3, rank)["expected"][0] for rank in range(3)]
    # The first parameter is frozen.
    for values in list(zip(*rows, strict=True))[1:]:
        assert len({round(value / norm, 6) for value, norm, _ in values}) == 3


HELD = ("bucket_view", "bucket_view_zeroed", "bucket_view_accumulation", "custom_hook")


def test_gradients_that_are_read_too_late_are_noticed(tmp_path: Path) -> None:
    """With a tracker that reads all gradients at the end of the backward, where DDP has divided some in place."""
    names = ",".join(("default", *HELD))
    # ddpcheck itself finds that the reduced gradients are not the mean of these.
    jobs = run_jobs(tmp_path, (3,), "--variants", names, "--never-hold", status=10)
    assert jobs.differences("default", 3) == []
    for name in HELD:
        wrong = jobs.differences(name, 3)
        assert {(rank, number) for rank, number, _ in wrong} == {
            (rank, number) for rank in range(3) for number in range(1, STEPS + 1)
        }, name
