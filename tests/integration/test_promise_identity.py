"""Watching never changes the result: trained bits, output and exit status are those of the unwatched job."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import JOBS, TRAIN
from tests.helpers.watched_run import Run, RunWatched, WatchedRun

pytestmark = pytest.mark.slow

BATTERY = JOBS / "battery.py"

# At every world size; the others at 2 and 3.
EVERYWHERE = (
    "plain",
    "accumulation",
    "bucket_view",
    "grad_scaler",
    "power_sgd",
    "join_uneven",
    "batch_norm",
    "gan",
    "zero_optimizer",
    "loader_workers",
    "sparse_adam",
    "subgroup",
    "two_subgroups",
    "codebook",
)
# Compiling takes seconds, and how many ranks there are makes no difference to it.
COMPILED = (
    "compiled_outside",
    "compiled_inside",
    "compiled_outside_aot",
    "compiled_inside_aot",
    "compiled_optimizer",
)
# Read from its file alone: importing the variants would import torch into the tests.
ALL = runpy.run_path(str(JOBS / "variants" / "order.py"))["ORDER"]
ELSEWHERE = tuple(name for name in ALL if name not in COMPILED)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        pytest.param(EVERYWHERE, "1,4", id="at-1-and-4"),
        pytest.param(ELSEWHERE, "2", id="at-2"),
        pytest.param(ELSEWHERE, "3", id="at-3"),
        pytest.param(COMPILED, "2", id="compiled"),
    ],
)
def test_trained_bits_are_the_same_and_nothing_is_found(
    ddpcheck: RunWatched, unwatched: Run, tmp_path: Path, names: tuple[str, ...], sizes: str
) -> None:
    plain, watched = tmp_path / "plain.json", tmp_path / "watched.json"
    command = (sys.executable, BATTERY, "--variants", ",".join(names), "--world-sizes", sizes, "--out")
    alone = unwatched(*command, plain)
    assert alone.status == 0, str(alone)
    done = ddpcheck(*command, watched)
    assert done.status == 0, str(done)

    expected, found = json.loads(plain.read_text()), json.loads(watched.read_text())
    assert {job: result.get("ranks") for job, result in found.items()} == {
        job: result.get("ranks") for job, result in expected.items()
    }
    jobs = {job: result for job, result in expected.items() if "skipped" not in result}
    assert all(all(result["ranks"]) for result in jobs.values())
    _assert_nothing_found(done, jobs)


def _assert_nothing_found(done: WatchedRun, jobs: dict[str, Any]) -> None:
    complaints = [
        (finding["code"], finding["message"])
        for finding in done.report["findings"]
        if finding["severity"] != "note" or finding["code"] == "DDP605"
    ]
    assert complaints == []
    assert done.report["verdict"] == "ok"
    # Every job is an attempt of its own; one of them makes its process group twice.
    attempts = len(jobs) + sum(job.startswith("group_made_again/") for job in jobs)
    assert len(done.report["attempts"]) == attempts
    assert all(row["status"] == "finished" for attempt in done.report["attempts"] for row in attempt["ranks"])


def test_variants_at_one_rank_and_below_their_least_are_skipped_openly(
    unwatched: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    command = (sys.executable, BATTERY, "--variants", "two_subgroups", "--world-sizes", "1", "--out", out)
    assert unwatched(*command).status == 0
    assert json.loads(out.read_text()) == {"two_subgroups/1": {"skipped": "needs 4 ranks"}}


@pytest.mark.parametrize("status", [0, 7])
def test_output_and_exit_status_under_torchrun(
    ddpcheck: RunWatched, unwatched: Run, tmp_path: Path, status: int
) -> None:
    """Byte for byte, with a script that ends by a status of its own choosing."""
    script = tmp_path / "train.py"
    source = TRAIN.read_text()
    assert source.endswith("    main()\n")
    script.write_text(f"{source}    raise SystemExit({status})\n")
    command = ("torchrun", "--nproc-per-node", "2", script, "--epochs", "1")
    alone, done = unwatched(*command), ddpcheck(*command)
    assert "epoch 0: loss" in alone.stdout
    assert done.stdout == alone.stdout
    assert done.status == alone.status
    # torchrun itself turns any failure of a rank into 1.
    assert done.status == (1 if status else 0)
