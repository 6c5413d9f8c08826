"""Faults of the corpus on the simulated accelerator: found with the code, step, ranks and cause of their headers.

`python -m tests.corpus --device sim` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.corpus.jobs import jobs_of, run_batch
from tests.corpus.run import FAULTS, ROOT, VARIANTS, collect, device_environment
from tests.corpus.verdict import judge

pytestmark = [pytest.mark.slow, pytest.mark.needs("g++")]

# Codes 1xx and 2xx, each found by another mechanism.
SCRIPTS = (
    "adapters_added_late",
    "clip_on_one_rank",
    "forward_around_wrapper",
    "hook_forgets_to_divide",
    "init_sync_off",
    # Needs operators that torch takes on accelerators only.
    "no_sync_never_left",
    "nan_spreads",
    "optimizer_settings_differ",
    "optimizer_state_on_rank_0",
    "nan_in_one_layer",
    "update_bn_per_rank",
    # Labels and class numbers are copied from the device.
    "labels_shifted_on_one_rank",
    "labels_smoothed_on_one_rank",
)


def test_faults_are_found_as_on_the_cpu() -> None:
    headers = [header for folder in (FAULTS, VARIANTS) for header in collect(ROOT / folder)]
    jobs = [job for header in headers if header.name in SCRIPTS for job in jobs_of(header)]
    assert {job.header.name for job in jobs} == set(SCRIPTS)
    verdicts = [judge(outcome) for outcome in run_batch(jobs, env=device_environment("sim"))]
    assert {v.outcome.job.name: v.misses for v in verdicts if not v.passed} == {}
