"""Checks that compare the ranks of a job, and merged diagnoses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import DoctorContext, all_checks, diagnose
from tests.helpers.doctor_contexts import (
    job,
    machine,
    on_gpus,
    problems,
    single,
    the_problem,
)

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


@pytest.mark.parametrize(
    "context",
    [
        single(),
        single(**on_gpus(8)),
        single(infiniband=[{"name": "mlx5_0/1"}], limits={**machine().limits, "locked_memory": [None, None]}),
        job(1, 1),
        job(1, 4),
        job(2, 2),
        job(3, 1),
        job(2, 2, lambda facts: replace(facts, **on_gpus(2))),
    ],
)
def test_nothing_is_reported_for_healthy_machines(context: DoctorContext) -> None:
    assert [one for one in diagnose(context) if not one.passed] == []


def test_every_check_reports_that_it_passed() -> None:
    context = job(2, 2, lambda facts: replace(facts, **on_gpus(2)))
    assert {one.code for one in diagnose(context)} == {check.name for check in all_checks()}


def test_several_ranks_on_one_gpu() -> None:
    diagnosis = the_problem(job(1, 4, lambda facts: replace(facts, **on_gpus(2))), "GPUs of ranks")
    assert (diagnosis.severity, diagnosis.ranks) == (ERROR, (0, 1, 2, 3))

    def one_each(facts: Facts) -> Facts:
        visible = {"CUDA_VISIBLE_DEVICES": str(facts.local_rank)}
        return replace(facts, **on_gpus(2), environment={**facts.environment, **visible})

    assert problems(job(2, 2, one_each), "GPUs of ranks") == []

    def all_the_first(facts: Facts) -> Facts:
        return replace(facts, **on_gpus(2), environment={"CUDA_VISIBLE_DEVICES": "GPU-0000"})

    diagnosis = the_problem(job(1, 2, all_the_first), "GPUs of ranks")
    assert "ranks 0-1: GPU-0000" in diagnosis.message


def test_ranks_that_differ() -> None:
    def change(facts: Facts) -> Facts:
        if facts.rank != 2:
            return facts
        return replace(
            facts,
            torch={**facts.torch, "version": "2.12.0"},
            environment={**facts.environment, "NCCL_ALGO": "Tree", "GLOO_SOCKET_IFNAME": "ens1"},
        )

    diagnosis = {one.evidence["what"]: one for one in problems(job(2, 2, change), "differences")}
    assert set(diagnosis) == {"torch", "NCCL_ALGO", "GLOO_SOCKET_IFNAME"}
    assert diagnosis["torch"].message == "torch differs: ranks 0-1 and 3: 2.13.0; rank 2: 2.12.0."
    assert [diagnosis[name].ranks for name in diagnosis] == [(2,)] * 3
    assert (diagnosis["NCCL_ALGO"].severity, diagnosis["GLOO_SOCKET_IFNAME"].severity) == (WARNING, NOTE)


def test_clocks() -> None:
    context = job(3, 1)
    ahead = replace(context, clocks=(replace(context.clocks[0], offset=42.0), context.clocks[1]))
    diagnosis = the_problem(ahead, "clocks")
    assert (diagnosis.severity, diagnosis.hosts, "42.00 s ahead of" in diagnosis.message) == (
        WARNING,
        ("node1",),
        True,
    )
    # A slow answer is imprecise.
    unsure = replace(context, clocks=(replace(context.clocks[0], offset=1.5, uncertainty=1.0),))
    assert problems(unsure, "clocks") == []


def test_ranks_that_did_not_report() -> None:
    complete = job(2, 2)
    diagnosis = the_problem(replace(complete, facts=complete.facts[:3], missing=(3,)), "ranks")
    assert (diagnosis.severity, diagnosis.message) == (ERROR, "Rank 3 of 4 did not report.")
    apart = the_problem(replace(job(1, 1), rendezvous_error="head:29500: timed out"), "ranks")
    assert "head:29500: timed out" in apart.message


def test_machines_of_the_same_name() -> None:
    context = job(2, 1, lambda facts: replace(facts, host="worker"))
    assert [host.name for host in context.hosts] == ["worker", "worker #2"]
    diagnosis = the_problem(context, "ranks")
    assert (diagnosis.severity, diagnosis.hosts) == (NOTE, ("worker", "worker #2"))


def test_equal_diagnoses_of_several_hosts_are_merged() -> None:
    context = job(3, 2, lambda facts: replace(facts, limits={**facts.limits, "open_files": [256, 256]}))
    [diagnosis] = [one for one in diagnose(context) if not one.passed]
    assert (diagnosis.hosts, diagnosis.ranks) == (("node0", "node1", "node2"), tuple(range(6)))


def test_the_worst_comes_first() -> None:
    context = single(
        environment={"NCCL_ALGO": "Ring"},
        limits={**machine().limits, "open_files": [256, 256]},
        torch={"error": "ModuleNotFoundError: No module named 'torch'"},
    )
    levels = [one.severity for one in diagnose(context)]
    assert levels == sorted(levels, key=lambda level: -level.weight)
    assert levels[:3] == [ERROR, WARNING, NOTE]
