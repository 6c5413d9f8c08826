"""DDP406: gradients are reduced more than once per step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.timing import ClockRecord
from tests.helpers.run_builder import RunBuilder

STEPS = 40


def run(
    folder: Path, synced: list[int], wait_us: int, step_us: int = 40_000, steps: int = STEPS
) -> RunBuilder:
    build = RunBuilder(folder, 2).wrap().optimizer().train(steps)
    rest = step_us - wait_us
    for step in range(steps):
        build.apply(step, synced=synced[step % len(synced)])
        for rank in build.ranks:
            record = ClockRecord(
                step,
                total=[step_us],
                data=[0],
                forward=[rest // 2],
                backward=[rest // 4],
                optimizer=[rest // 8],
                wait=[wait_us],
                watching=[0],
                queued=[0],
            )
            build.add(rank, record)
    return build


@pytest.mark.parametrize(
    ("wait_us", "severity", "cost_ms"), [(20_000, "warning", 15.0), (4_000, "note", 3.0), (1_000, None, 0.0)]
)
def test_severity_follows_the_cost(
    tmp_path: Path, wait_us: int, severity: str | None, cost_ms: float
) -> None:
    found = run(tmp_path, [4], wait_us).end().findings("DDP406")
    assert [each.severity.value for each in found] == ([severity] if severity else [])
    for each in found:
        assert each.evidence["reductions_per_step"] == 4
        assert each.evidence["cost_ms"] == pytest.approx(cost_ms, rel=0.01)
        assert (each.step, each.ranks, each.stage) == (None, (0, 1), "wait")


def test_a_short_step_is_a_note(tmp_path: Path) -> None:
    (found,) = run(tmp_path, [2], 800, step_us=1_600).end().findings("DDP406")
    assert found.severity.value == "note"


@pytest.mark.parametrize("synced", [[1], [1, 1, 1, 2], [0, 1]])
def test_one_reduction_in_most_steps(tmp_path: Path, synced: list[int]) -> None:
    assert run(tmp_path, synced, 20_000).end().findings("DDP406") == []


def test_too_few_steps_to_measure(tmp_path: Path) -> None:
    assert run(tmp_path, [4], 20_000, steps=12).end().findings("DDP406") == []
