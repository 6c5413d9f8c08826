"""The follower of a run under way: what it notes, and what becomes of it when it stumbles."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_builder import RunBuilder

from ddpcheck.analysis.run import Run
from ddpcheck.config import Config
from ddpcheck.launcher.follower import Follower
from ddpcheck.launcher.node_log import NodeLog

ODD = {1: ["body.bias"]}


def follower(folder: Path, fail_fast: bool) -> Follower:
    config = Config(run_dir=str(folder), run_id="test", fail_fast=fail_fast)
    return Follower(Run(folder), NodeLog(folder), config)


@pytest.mark.parametrize("fail_fast", [False, True])
def test_only_fail_fast_stops_a_job_that_parts(tmp_path: Path, fail_fast: bool) -> None:
    RunBuilder(tmp_path, 2).wrap().optimizer().train(3).step(3, odd=ODD).save()
    follow = follower(tmp_path, fail_fast)
    assert (follow.tick() is not None) == fail_fast
    follow.close()


def test_a_sound_job_is_not_stopped(tmp_path: Path) -> None:
    RunBuilder(tmp_path, 2).wrap().optimizer().train(3).save()
    follow = follower(tmp_path, fail_fast=True)
    assert follow.tick() is None
    follow.close()


def test_one_that_stumbled_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = []

    def stumble(run: Run) -> bool:
        polls.append(run)
        raise KeyError("unexpected")

    monkeypatch.setattr(Run, "poll", stumble)
    follow = follower(tmp_path, fail_fast=False)
    with pytest.raises(KeyError):
        follow.tick()
    assert follow.tick() is None
    assert follow.stumbled
    assert len(polls) == 1
    follow.close()


def test_a_view_that_fails_costs_the_view_alone(tmp_path: Path) -> None:
    RunBuilder(tmp_path, 2).wrap().optimizer().train(3).step(3, odd=ODD).save()
    turns = []

    class Broken:
        def tick(self) -> None:
            turns.append(1)
            raise ValueError("no")

    config = Config(run_dir=str(tmp_path), run_id="test", fail_fast=True)
    follow = Follower(Run(tmp_path), NodeLog(tmp_path), config, show=Broken())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"):
        follow.tick()
    assert follow.tick() is not None
    assert len(turns) == 1
    follow.close()
