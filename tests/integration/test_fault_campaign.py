"""A sample of the fault campaign: `make chaos` runs the rest. docs/reliability.md says what has to hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.campaign import MAX_ATTEMPTS, Outcome, plain_weights, run_fault
from tests.chaos.faults import FAULTS, Fault

pytestmark = pytest.mark.slow

# None of them needs a library that is loaded into the job, or a lab.
SAMPLE = ("none", "launcher-killed", "ranks-killed", "file-size-limit", "folder-replaced", "disk-filled")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """The jobs sleep most of the time, so they run together."""
    chosen = [fault for fault in FAULTS if fault.name in SAMPLE and not fault.missing()]
    plain_weights()

    def run(number: int, fault: Fault) -> Outcome:
        return run_fault(fault, number, 100 + number)

    with ThreadPoolExecutor(3) as pool:
        ended = pool.map(run, range(len(chosen)), chosen)
        return {outcome.fault: outcome for outcome in ended}


@pytest.mark.parametrize("name", [name for name in SAMPLE if name != "disk-filled"])
def test_a_fault_does_no_harm(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].wrong == []
    assert outcomes[name].void == "", f"{MAX_ATTEMPTS} jobs ended before the fault"


@pytest.mark.needs("tmpfs")
def test_a_disk_that_another_program_fills(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["disk-filled"].wrong == []
    assert outcomes["disk-filled"].void == ""
