"""Watching never changes the result: trained bits, output and exit status are those of the job without ddpcheck."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fork_server import prepared
from tests.helpers.launchers import torchrun
from tests.helpers.paths import JOBS, TRAIN
from tests.helpers.watched_run import Run, RunWatched, WatchedRun, assert_healthy, run_to_end

pytestmark = pytest.mark.slow

BATTERY = JOBS / "battery.py"
# Set by tests/compat: variants that fail without ddpcheck are left out.
ANY_TORCH = "DDPCHECK_ANY_TORCH"

# At every world size; the other variants at 2 and 3.
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
    "hybrid_sharded",
    "hybrid_sharded_noise",
    "hybrid_by_fsdp1",
)
# Compiling takes seconds, and the number of ranks makes no difference to it.
COMPILED = (
    "compiled_outside",
    "compiled_inside",
    "compiled_outside_aot",
    "compiled_inside_aot",
    "compiled_optimizer",
)
# Read from the file that lists them: importing the variants would import torch into the tests.
ALL = runpy.run_path(str(JOBS / "variants" / "order.py"))["ORDER"]
# Their forwards run a second time under --audit: on other ranks, with other inputs and random states.
AUDITED = (
    "accumulation",
    "bucket_view",
    "bf16_autocast",
    "batch_norm",
    "codebook",
    "activation_checkpointing",
    "tied_weights",
    "find_unused",
    "weight_penalty",
    "loss_in_attribute",
    "state_in_attributes",
    "random_of_all_kinds",
    "default_device",
    "gathers_in_forward",
    "structured_outputs",
)
ELSEWHERE = tuple(name for name in ALL if name not in COMPILED)


@pytest.mark.parametrize(
    ("names", "sizes", "skipped", "options"),
    [
        pytest.param(EVERYWHERE, "1,4", {"subgroup/1", "two_subgroups/1"}, (), id="at-1-and-4"),
        pytest.param(ELSEWHERE, "2", {"two_subgroups/2"}, (), id="at-2"),
        pytest.param(ELSEWHERE, "3", {"two_subgroups/3"}, (), id="at-3"),
        pytest.param(COMPILED, "2", set(), (), id="compiled"),
        pytest.param(AUDITED, "2,3,4", set(), ("--audit", "every=1"), id="audited"),
    ],
)
def test_trained_bits_are_the_same_and_nothing_is_found(
    ddpcheck: RunWatched,
    unwatched: Run,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    names: tuple[str, ...],
    sizes: str,
    skipped: set[str],
    options: tuple[str, ...],
) -> None:
    plain, watched = tmp_path / "plain.json", tmp_path / "watched.json"

    def command(chosen: tuple[str, ...]) -> tuple[object, ...]:
        job = (BATTERY, "--variants", ",".join(chosen), "--world-sizes", sizes, "--out")
        # One of them with torch imported under ddpcheck.
        return (sys.executable, *job) if names is COMPILED else prepared(*job)

    alone = unwatched(*command(names), plain)
    expected = json.loads(plain.read_text())
    failed = {
        job.partition("/")[0] for job, result in expected.items() if not all(result.get("ranks", [True]))
    }
    if failed and os.environ.get(ANY_TORCH):
        # This version of torch cannot run them: it lacks what they use, or crashes.
        record_property("left_out", " ".join(sorted(failed)))
        expected = {job: result for job, result in expected.items() if job.partition("/")[0] not in failed}
    else:
        assert alone.status == 0, str(alone)
    done = ddpcheck(*command(tuple(name for name in names if name not in failed)), watched, options=options)
    assert done.status == 0, str(done)

    results = json.loads(watched.read_text())
    assert {job: result.get("ranks") for job, result in results.items()} == {
        job: result.get("ranks") for job, result in expected.items()
    }
    # Variants that need more ranks, and say so.
    assert {job for job, result in expected.items() if "skipped" in result} == skipped
    jobs = {job: result for job, result in expected.items() if job not in skipped}
    assert all(all(result["ranks"]) and not result["late"] for result in jobs.values())
    assert not any(result.get("late") for result in results.values())
    _assert_nothing_found(done, jobs)


def _assert_nothing_found(done: WatchedRun, jobs: dict[str, Any]) -> None:
    complaints = [
        (finding["code"], finding["message"])
        for finding in done.report["findings"]
        if finding["severity"] != "note" or finding["code"] == "DDP605"
    ]
    assert complaints == []
    assert done.report["verdict"] == "ok"
    # Every job is an attempt; one of them makes its process group twice.
    attempts = len(jobs) + sum(job.startswith("group_made_again/") for job in jobs)
    assert len(done.report["attempts"]) == attempts
    assert all(row["status"] == "finished" for attempt in done.report["attempts"] for row in attempt["ranks"])


@pytest.fixture(scope="module")
def printed_by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the example without ddpcheck."""
    alone = run_to_end(torchrun(2, TRAIN, "--epochs", 1), tmp_path_factory.mktemp("alone"), {})
    assert alone.status == 0, str(alone)
    assert "epoch 0: loss" in alone.stdout
    return alone.stdout


@pytest.mark.parametrize("status", [0, 7])
def test_output_and_exit_status_under_torchrun(
    ddpcheck: RunWatched, tmp_path: Path, printed_by_torchrun: str, status: int
) -> None:
    """Byte for byte, with a script that exits with a status of its own."""
    script = tmp_path / "train.py"
    source = TRAIN.read_text()
    assert source.endswith("    main()\n")
    script.write_text(f"{source}    raise SystemExit({status})\n")
    command = torchrun(2, script, "--epochs", 1)
    done = ddpcheck(*command)
    assert done.stdout == printed_by_torchrun
    # torchrun turns any failure of a rank into status 1.
    assert done.status == (1 if status else 0)
    assert done.report["command"] == [str(word) for word in command]
    if not status:
        assert_healthy(done, world_size=2, steps=16)
