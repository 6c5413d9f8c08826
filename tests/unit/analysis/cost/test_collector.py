"""The cost of ddpcheck: sums, shares, the schedule under the budget, and what it left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpcheck.analysis.cost.model import CostTable, LeftOut
from ddpcheck.records.kinds.timing import CostRecord
from tests.helpers.run_builder import RunBuilder

SPENT = {"gradients": 6_400, "parameters": 3_200}


def costs(build: RunBuilder, *records: dict[str, Any], rank: int | None = None) -> RunBuilder:
    for number in build.ranks if rank is None else [rank]:
        for fields in records:
            build.add(number, CostRecord(**{"steps": 64, "wall": 649_600, "spent": SPENT, **fields}))
    return build


def table(build: RunBuilder) -> CostTable:
    cost = build.end().report().cost
    assert cost is not None
    return cost


def start(folder: Path, steps: int = 2) -> RunBuilder:
    build = RunBuilder(folder, 2).wrap().optimizer().train(steps)
    build.description["config"] = {"budget": "2"}
    return build


def test_a_run_without_such_records_has_no_cost(tmp_path: Path) -> None:
    assert start(tmp_path).end().report().cost is None


def test_mean_share_and_probes(tmp_path: Path) -> None:
    cost = table(costs(start(tmp_path), {"step": 0}, {"step": 64}))
    assert (cost.budget, cost.cost_us, cost.share, cost.of) == (2.0, 150.0, 0.015, 2)
    assert list(cost.by_probe.items()) == [("gradients", 100.0), ("parameters", 50.0)]
    assert (cost.ranks[0].step_us, cost.ranks[0].steps, cost.ranks[0].device_us) == (10_000.0, 128, 0.0)
    assert [(part.first_step, part.last_step) for part in cost.schedule] == [(0, 127)]
    assert cost.left_out == LeftOut()


def test_the_highest_rank(tmp_path: Path) -> None:
    build = costs(start(tmp_path), {"step": 0}, rank=0)
    cost = table(costs(build, {"step": 0, "spent": {"gradients": 49_600}, "device": -1}, rank=1))
    assert cost.highest == 1
    assert cost.ranks[1].device_us is None


def test_the_schedule_and_what_it_left_out(tmp_path: Path) -> None:
    build = costs(
        start(tmp_path),
        {"step": 0},
        {"step": 64, "sketch_every": 2, "steps": 16},
        {"step": 80, "sketch_every": 64, "applied_every": 4},
        {"step": 144, "sketch_every": 64, "applied_every": 64, "params_every": 16},
    )
    cost = table(build)
    assert [
        (part.first_step, part.last_step, part.allreduce_every, part.applied_every, part.params_every)
        for part in cost.schedule
    ] == [(0, 63, 1, 1, 1), (64, 79, 2, 1, 1), (80, 143, 64, 4, 1), (144, 207, 64, 64, 16)]
    # Multiples of 64 from step 80 on: 128 and 192. Of 16 from step 144 on: 144, 160, 176, 192.
    assert cost.left_out == LeftOut(8 + 63 + 63, 48 + 63, 60)


def test_coverage_counts_what_was_left_out(tmp_path: Path) -> None:
    build = start(tmp_path, 64).apply(0).apply(64).step(64)
    report = costs(build, {"step": 0}, {"step": 64, "applied_every": 64, "params_every": 16}).end().report()
    left_out = {check.name: check.steps_left_out for check in report.checks}
    assert left_out["gradients as applied"] == 63
    assert left_out["parameters after each step"] == 60
    assert left_out["optimizer hyperparameters, scale and step counts"] == 60
    assert left_out["parameters after wrapping"] == left_out["reduced gradients against the mean"] == 0


def test_steps_after_the_last_digest_are_counted(tmp_path: Path) -> None:
    report = (
        costs(start(tmp_path, 65), {"step": 0}, {"step": 64, "steps": 10, "params_every": 16}).end().report()
    )
    assert report.steps == 74
    assert [row.steps for row in report.attempts[0].ranks] == [74, 74]


def test_ranks_that_end_between_two_digests_took_different_numbers_of_steps(tmp_path: Path) -> None:
    build = costs(start(tmp_path, 65), {"step": 64, "steps": 10, "params_every": 16}, rank=0)
    costs(build, {"step": 64, "steps": 12, "params_every": 16}, rank=1)
    finding = build.end().only("DDP207")
    assert finding.evidence["steps"] == {"0": 74, "1": 76}


def test_a_rank_without_a_count_of_its_own_is_not_compared(tmp_path: Path) -> None:
    build = costs(start(tmp_path, 65), {"step": 64, "steps": 10, "params_every": 16}, rank=0)
    assert not build.end().findings("DDP207")


def test_many_names_and_odd_numbers(tmp_path: Path) -> None:
    build = costs(
        start(tmp_path),
        {"step": 0, "spent": {f"probe {n}": 1 for n in range(100)}},
        {"step": 64, "wall": 0, "steps": 0, "spent": {"x": -5}},
        {"step": 64, "wall": -1, "steps": -1, "params_every": 0},
    )
    build.description["config"] = {"budget": "lots"}
    cost = table(build)
    assert cost.budget is None
    assert len(cost.by_probe) <= 33
    assert sum(cost.by_probe.values()) > 0


def test_many_changes_of_the_schedule_are_bounded(tmp_path: Path) -> None:
    changes = [{"step": n, "steps": 1, "sketch_every": 1 + n % 2} for n in range(200)]
    cost = table(costs(start(tmp_path), *changes))
    assert len(cost.schedule) == 64
    assert cost.schedule[-1].last_step == 199


def test_nodes_with_different_schedules(tmp_path: Path) -> None:
    """Only what all ranks check is compared."""
    build = costs(start(tmp_path), {"step": 0}, {"step": 64, "sketch_every": 2}, {"step": 128}, rank=0)
    costs(build, {"step": 0}, {"step": 64}, {"step": 128, "sketch_every": 4}, rank=1)
    cost = table(build)
    assert [(part.first_step, part.last_step, part.allreduce_every) for part in cost.schedule] == [
        (0, 63, 1), (64, 127, 2), (128, 191, 4)
    ]  # fmt: skip
    assert cost.left_out.allreduce == 32 + 48
    assert cost.schedule[1].cost_us == 150.0
