"""Checks of the ranks of a job against each other, and what becomes of all that checks say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import CHECKS, diagnose
from tests.helpers.doctor_scenes import (
    alone,
    job,
    machine,
    on_gpus,
    said,
    the_one,
)

PROBLEM, WARNING, NOTE = Level.PROBLEM, Level.WARNING, Level.NOTE


@pytest.mark.parametrize(
    "scene",
    [
        alone(),
        alone(**on_gpus(8)),
        alone(infiniband=[{"name": "mlx5_0/1"}], limits={**machine().limits, "locked_memory": [None, None]}),
        job(1, 1),
        job(1, 4),
        job(2, 2),
        job(3, 1),
        job(2, 2, lambda facts: replace(facts, **on_gpus(2))),
    ],
)
def test_nothing_is_said_of_machines_in_good_order(scene: DoctorContext) -> None:
    assert [one for one in diagnose(scene) if one.level is not Level.OK] == []


def test_every_check_says_that_all_is_well() -> None:
    scene = job(2, 2, lambda facts: replace(facts, **on_gpus(2)))
    assert {one.check for one in diagnose(scene)} == {check.NAME for check in CHECKS}


def test_several_ranks_on_one_gpu() -> None:
    found = the_one(job(1, 4, lambda facts: replace(facts, **on_gpus(2))), "GPUs of ranks")
    assert (found.level, found.ranks) == (PROBLEM, (0, 1, 2, 3))

    def one_each(facts: Facts) -> Facts:
        visible = {"CUDA_VISIBLE_DEVICES": str(facts.local_rank)}
        return replace(facts, **on_gpus(2), environment={**facts.environment, **visible})

    assert said(job(2, 2, one_each), "GPUs of ranks") == []

    def all_the_first(facts: Facts) -> Facts:
        return replace(facts, **on_gpus(2), environment={"CUDA_VISIBLE_DEVICES": "GPU-0000"})

    found = the_one(job(1, 2, all_the_first), "GPUs of ranks")
    assert "ranks 0-1: GPU-0000" in found.what


def test_ranks_that_differ() -> None:
    def spoil(facts: Facts) -> Facts:
        if facts.rank != 2:
            return facts
        return replace(
            facts,
            torch={**facts.torch, "version": "2.12.0"},
            environment={**facts.environment, "NCCL_ALGO": "Tree", "GLOO_SOCKET_IFNAME": "ens1"},
        )

    found = {one.evidence["what"]: one for one in said(job(2, 2, spoil), "differences")}
    assert set(found) == {"torch", "NCCL_ALGO", "GLOO_SOCKET_IFNAME"}
    assert found["torch"].what == "torch differs: ranks 0-1 and 3: 2.13.0; rank 2: 2.12.0."
    assert [found[name].ranks for name in found] == [(2,)] * 3
    assert (found["NCCL_ALGO"].level, found["GLOO_SOCKET_IFNAME"].level) == (WARNING, NOTE)


def test_clocks() -> None:
    scene = job(3, 1)
    ahead = replace(scene, clocks=(replace(scene.clocks[0], offset=42.0), scene.clocks[1]))
    found = the_one(ahead, "clocks")
    assert (found.level, found.hosts, "42.00 s ahead of" in found.what) == (WARNING, ("node1",), True)
    # A slow answer says little.
    unsure = replace(scene, clocks=(replace(scene.clocks[0], offset=1.5, uncertainty=1.0),))
    assert said(unsure, "clocks") == []


def test_ranks_that_did_not_report() -> None:
    whole = job(2, 2)
    found = the_one(replace(whole, facts=whole.facts[:3], missing=(3,)), "ranks")
    assert (found.level, found.what) == (PROBLEM, "Rank 3 of 4 did not report.")
    apart = the_one(replace(job(1, 1), apart="head:29500: timed out"), "ranks")
    assert "head:29500: timed out" in apart.what


def test_machines_of_the_same_name() -> None:
    scene = job(2, 1, lambda facts: replace(facts, host="worker"))
    assert [host.name for host in scene.hosts] == ["worker", "worker #2"]
    found = the_one(scene, "ranks")
    assert (found.level, found.hosts) == (NOTE, ("worker", "worker #2"))


def test_the_same_words_of_several_hosts_are_said_once() -> None:
    scene = job(3, 2, lambda facts: replace(facts, limits={**facts.limits, "open_files": [256, 256]}))
    [found] = [one for one in diagnose(scene) if one.level is not Level.OK]
    assert (found.hosts, found.ranks) == (("node0", "node1", "node2"), tuple(range(6)))


def test_the_worst_comes_first() -> None:
    scene = alone(
        environment={"NCCL_ALGO": "Ring"},
        limits={**machine().limits, "open_files": [256, 256]},
        torch={"error": "ModuleNotFoundError: No module named 'torch'"},
    )
    levels = [one.level for one in diagnose(scene)]
    assert levels == sorted(levels, key=lambda level: level.place)
    assert levels[:3] == [PROBLEM, WARNING, NOTE]
