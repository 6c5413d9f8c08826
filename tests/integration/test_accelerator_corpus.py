"""Faults of the corpus on the simulated accelerator: found with the code, step, ranks and cause of their headers.

`python -m tests.corpus --device sim` runs all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.corpus import on_device
from tests.corpus.header import Header
from tests.corpus.jobs import batches, jobs_of, run_batch
from tests.corpus.run import FAULTS, HEALTHY, ROOT, VARIANTS, collect, device_environment
from tests.corpus.verdict import judge

pytestmark = [pytest.mark.slow, pytest.mark.needs("g++")]

# Codes 1xx and 2xx, each found by another mechanism.
SCRIPTS = (
    "adapters_added_late",
    "autocast_on_one_rank",
    "clip_on_one_rank",
    "forward_around_wrapper",
    # Replays on a default device.
    "gradient_wrong_under_default_device",
    "hook_forgets_to_divide",
    # A mesh of four devices.
    "hybrid_from_own_seeds",
    "init_sync_off",
    # Needs operators that torch takes on accelerators only.
    "no_sync_never_left",
    "nan_spreads",
    "optimizer_settings_differ",
    "optimizer_state_on_rank_0",
    "nan_in_one_layer",
    "update_bn_per_rank",
    "weights_written_in_forward",
    # Labels and class numbers are copied from the device.
    "labels_shifted_on_one_rank",
    "labels_smoothed_on_one_rank",
)


# Healthy jobs that came close on a device: averages and broadcasts by hand through `.data`, which no sample shows
# there, and a setting of CUDA that was changed and set back.
HEALTHY_CASES = {
    "local_parts": ("federated_norms", "personal_head"),
    "program_state": ("evaluated_in_half_precision",),
    "sharded_steps": ("federated", "local_sgd_bypassed", "two_shards_two_optimizers"),
}


def _headers() -> list[Header]:
    return [header for folder in (FAULTS, VARIANTS) for header in collect(ROOT / folder)]


def test_findings_are_those_of_the_cpu() -> None:
    jobs = [job for header in _headers() if header.name in SCRIPTS for job in jobs_of(header)]
    assert {job.header.name for job in jobs} == set(SCRIPTS)
    expected = {header.path: header for header in on_device.expected(job.header for job in jobs)}
    jobs = [replace(job, header=expected[job.header.path]) for job in jobs]
    healthy = {header.name: header for header in collect(ROOT / HEALTHY)}
    jobs += [
        job for name, cases in HEALTHY_CASES.items() for job in jobs_of(healthy[name]) if job.case in cases
    ]
    env = device_environment("sim")
    outcomes = [outcome for batch in batches(jobs, len(jobs)) for outcome in run_batch(batch, env=env)]
    verdicts = [judge(outcome) for outcome in outcomes]
    assert {v.outcome.job.name: v.misses for v in verdicts if not v.passed} == {}


def test_differences_are_of_scripts_that_exist() -> None:
    headers = {header.name: header for header in _headers()}
    for name in [
        *on_device.SINGLE_TENSOR,
        *on_device.DETERMINISTIC,
        *on_device.MOVED,
        *on_device.DIFFERENT,
    ]:
        assert name in headers
    for header in on_device.expected(headers.values()):
        # What a header expects on a device is not what it expects anyway.
        assert (header != headers[header.name]) == (header.name in on_device.DIFFERENT)
