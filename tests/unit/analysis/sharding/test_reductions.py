"""Reductions of sharded gradients are compared with the mean of the local ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report
from tests.helpers.run_builder import RunBuilder
from tests.helpers.shard_reductions import records_of
from tests.helpers.sharded_run import single_shards

CHECK = "reduction of sharded gradients"


def gradients(ranks: int, *shape: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, generator=drawn) for _ in range(ranks)]


def mean(local: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(local)).sum(0) / len(local)


def report(folder: Path, local: Sequence[torch.Tensor], result: torch.Tensor, **options: object) -> Report:
    build = single_shards(RunBuilder(folder, len(local))).covered(0, 5, seen=["fsdp2"], sharded=3)
    for rank, records in enumerate(records_of(local, result, **options)):  # type: ignore[arg-type]
        for record in records:
            build.add(rank, record)
    return build.report()


def outcome(made: Report) -> str:
    [check] = [check for check in made.checks if check.name == CHECK]
    return check.outcome


def of_ddp204(made: Report) -> list[Finding]:
    return [finding for finding in made.findings if finding.code == "DDP204"]


# FSDP2 pads the first dimension, and shards others only evenly.
@pytest.mark.parametrize(
    ("shape", "dim"), [((9, 4), 0), ((2, 3), 0), ((1,), 0), ((70000, 3), 0), ((2, 3), 1), ((500, 600), 1)]
)
def test_the_mean_raises_nothing(tmp_path: Path, shape: tuple[int, ...], dim: int) -> None:
    local = gradients(3, *shape)
    made = report(tmp_path, local, mean(local), steps=2, dim=dim)
    assert outcome(made) == "agree"
    assert of_ddp204(made) == []


def test_a_sum_is_named(tmp_path: Path) -> None:
    local = gradients(3, 9, 4)
    made = report(tmp_path, local, 3 * mean(local))
    [finding] = of_ddp204(made)
    assert outcome(made) == "differ"
    assert (finding.severity, finding.step, finding.parameter) == (Severity.ERROR, 0, "layer.weight")
    assert finding.ranks == (0, 1, 2)
    assert "not divided by 3" in finding.cause


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    local = gradients(4, 8, 4)
    made = report(tmp_path, local, mean([*local[:2], torch.zeros(8, 4), local[3]]))
    [finding] = of_ddp204(made)
    assert finding.ranks == (2,)
    assert "without rank 2" in finding.cause


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    local = gradients(2, 8, 4)
    made = report(tmp_path, local, mean(local).roll(4, 0))
    [finding] = of_ddp204(made)
    assert finding.ranks == (0, 1)
    assert finding.cause == "the reduction itself"


def test_a_compressing_reduction_of_the_job_is_a_note(tmp_path: Path) -> None:
    local = gradients(2, 64, 64)
    made = report(tmp_path, local, mean(local).bfloat16().float(), custom="Quantised")
    [finding] = of_ddp204(made)
    assert finding.severity is Severity.NOTE
    assert finding.evidence["reduce_scatter"] == "Quantised"


def test_without_the_records_of_a_rank_nothing_is_concluded(tmp_path: Path) -> None:
    local = gradients(2, 8, 4)
    build = single_shards(RunBuilder(tmp_path, 2)).covered(0, 5, seen=["fsdp2"], sharded=3)
    for record in records_of(local, 5 * mean(local))[0]:
        build.add(0, record)
    made = build.report()
    assert outcome(made) == "not checked"
    assert of_ddp204(made) == []
