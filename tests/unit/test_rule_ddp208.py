"""DDP208: parameters were written outside the optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_builder import RunBuilder

ODD = {1: ["body.bias"]}


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_rank_loaded_a_checkpoint(tmp_path: Path, world_size: int) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().optimizer().train(3).rewrite(3, [1], ODD)
    finding = build.train(2, first=3, odd=ODD).end().only("DDP208")
    assert (finding.step, finding.stage, finding.parameter) == (3, "rewritten", "body.bias")
    assert finding.ranks == ((0, 1) if world_size == 2 else (1,))
    assert finding.evidence["rewritten_on_ranks"] == [1]
    assert "Before step 3" in finding.message
    assert "rank 1 wrote" in finding.message


def test_all_ranks_wrote_and_one_something_else(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().train(3).rewrite(3, range(4), {2: ["body.bias"]})
    finding = build.step(3, odd={2: ["body.bias"]}).end().only("DDP208")
    assert (finding.ranks, finding.evidence["rewritten_on_ranks"]) == ((2,), [0, 1, 2, 3])


def test_parameters_that_no_optimizer_steps(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer([[0, 2]]).train(2)
    finding = build.step(2, odd=ODD).end().only("DDP208")
    assert (finding.ranks, finding.step) == ((1,), 2)
    assert finding.cause == "no optimizer steps these parameters"


def test_all_ranks_wrote_the_same(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().train(3).rewrite(3, range(4)).train(2, first=3)
    assert build.end().findings() == []


def test_a_write_that_changed_nothing_explains_nothing(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().train(3).rewrite(3, [1])
    build.step(3, odd=ODD).end().only("DDP201")
