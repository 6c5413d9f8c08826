"""Where gradients diverge between backward and step, and the precedence of causes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.kinds.modules import StructureRecord
from tests.helpers.run_builder import NAMES, RunBuilder

OWN = dict.fromkeys(range(4), NAMES)
HEAD = {1: ["head.weight"]}
LOCAL = {0: [1.0, 2.0, 3.0], 1: [3.0, 4.0, 5.0]}
MEAN = [2.0, 3.0, 4.0]


def start(folder: Path, world_size: int = 2) -> RunBuilder:
    return RunBuilder(folder, world_size).wrap().optimizer()


def unsynced(**fields: Any) -> dict[str, Any]:
    return {"last": "unsynced", "reason": "wrapper bypassed", "synced": 0, "unsynced": 1, **fields}


def test_equal_gradients_raise_nothing(tmp_path: Path) -> None:
    build = start(tmp_path)
    for step in range(3):
        build.backward(step + 1, LOCAL, MEAN).apply(step).step(step)
    assert build.end().findings() == []


def test_a_warm_up_with_no_learning_rate_hides_nothing(tmp_path: Path) -> None:
    """Gradients diverge at step 0; the parameters follow once the learning rate is not zero."""
    build = start(tmp_path)
    for step in range(5):
        build.apply(step, outliers=OWN, **unsynced()).step(step, outliers=OWN if step >= 3 else None)
    finding = build.end().only("DDP202")
    assert (finding.step, finding.cause, finding.ranks) == (0, "wrapper bypassed", (0, 1))


def test_only_gradients_diverge(tmp_path: Path) -> None:
    """With a learning rate of zero, the parameters never diverge."""
    finding = start(tmp_path).apply(0, outliers=OWN, **unsynced()).step(0).end().only("DDP202")
    assert finding.step == 0


@pytest.mark.parametrize(
    ("fields", "code", "cause"),
    [
        (unsynced(), "DDP202", "wrapper bypassed"),
        (unsynced(reason="no_sync open"), "DDP202", "no_sync open"),
        ({"last": "none", "synced": 0}, "DDP202", "gradients set without a backward"),
        (
            {"last": "unfinished", "synced": 0, "waiting": [2]},
            "DDP202",
            "reduction unfinished: no gradient arrived for head.weight",
        ),
        ({"moved": True}, "DDP205", "gradients were written to between backward and step"),
        ({}, "DDP203", "the reduction did not give all ranks the same result"),
    ],
)
def test_each_cause(tmp_path: Path, fields: dict[str, Any], code: str, cause: str) -> None:
    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0).step(0)
    finding = build.apply(1, outliers=OWN, **fields).step(1, outliers=OWN).end().only(code)
    # The AllReduce was not verified at this step, which some causes mention.
    assert finding.step == 1
    assert finding.cause.startswith(cause)


def test_only_the_ranks_at_fault_are_named(tmp_path: Path) -> None:
    build = start(tmp_path, 4).apply(0, outliers={2: NAMES}, on={2: unsynced()}).step(0, outliers={2: NAMES})
    finding = build.end().only("DDP202")
    assert finding.ranks == (2,)
    assert finding.evidence["last_backward"] == {"0": "synced", "1": "synced", "2": "unsynced", "3": "synced"}
    assert "on rank 2 (wrapper bypassed)" in finding.message


def test_unsynced_gradients_that_agree_raise_nothing(tmp_path: Path) -> None:
    assert start(tmp_path).apply(0, **unsynced()).step(0).end().findings() == []


def test_written_on_some_ranks_only(tmp_path: Path) -> None:
    build = start(tmp_path, 3).apply(0, outliers=HEAD, on={1: {"moved": True}}).step(0, outliers=HEAD)
    finding = build.end().only("DDP205")
    assert finding.ranks == (1,)
    assert finding.cause.endswith(" on rank 1 only")
    assert finding.evidence["written_after_backward_on_ranks"] == [1]


def test_clipping_does_not_hide_a_wrong_reduction(tmp_path: Path) -> None:
    build = start(tmp_path).backward(1, LOCAL, MEAN, reduced_on={1: [2.0, 3.5, 4.0]})
    build.apply(0, outliers=OWN, moved=True).step(0, outliers=OWN).end().only("DDP203")


def test_a_reduction_that_diverges_between_two_sketches(tmp_path: Path) -> None:
    """Sketched at steps 20 and 30, diverged at 25: the next sketch shows it."""
    build = start(tmp_path).backward(21, LOCAL, MEAN).apply(20).step(20)
    build.apply(25, outliers=OWN, moved=True).step(25, outliers=OWN)
    build.backward(31, LOCAL, MEAN, reduced_on={1: [2.0, 3.5, 4.0]}).apply(30, outliers=OWN).step(
        30, outliers=OWN
    )
    assert build.end().only("DDP203").step == 25


def test_a_reduction_that_still_agrees_at_the_next_sketch(tmp_path: Path) -> None:
    build = start(tmp_path).backward(21, LOCAL, MEAN).apply(20).step(20)
    build.apply(25, outliers=OWN, moved=True).step(25, outliers=OWN)
    build.backward(31, LOCAL, MEAN).apply(30, outliers=OWN, moved=True).step(30, outliers=OWN)
    assert build.end().only("DDP205").step == 25


@pytest.mark.parametrize("number", [2, 9])
def test_hooks_that_are_lost(tmp_path: Path, number: int) -> None:
    """Detected at the same step, or at the next sketched one."""
    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0).step(0)
    build.apply(1, outliers=OWN).step(1, outliers=OWN)
    build.backward(number, LOCAL, MEAN, reduced_on=LOCAL)
    finding = build.end().only("DDP202")
    assert (finding.step, finding.cause) == (1, "DDP's hooks are lost")
    assert "wrap again" in finding.fix


def test_hooks_that_are_lost_later_explain_nothing_earlier(tmp_path: Path) -> None:
    build = start(tmp_path).apply(1, outliers=OWN).step(1, outliers=OWN)
    build.backward(2, LOCAL, MEAN).backward(9, LOCAL, MEAN, reduced_on=LOCAL)
    assert build.end().only("DDP205").step == 1


def test_a_write_without_a_version_counter(tmp_path: Path) -> None:
    """For example through .data: the reduction produced the same on all ranks, and they applied something else."""
    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0, outliers=OWN).step(0, outliers=OWN)
    finding = build.end().only("DDP205")
    assert (finding.step, finding.cause) == (0, "gradients were written to between backward and step")


def test_a_reduction_between_two_sketches_is_not_known(tmp_path: Path) -> None:
    build = start(tmp_path).backward(1, LOCAL, MEAN).apply(0).step(0)
    build.apply(5, outliers=OWN).step(5, outliers=OWN).backward(21, LOCAL, MEAN)
    assert build.end().only("DDP203").step == 5


def test_a_change_of_structure_takes_precedence(tmp_path: Path) -> None:
    build = start(tmp_path).apply(0).step(0)
    for rank in build.ranks:
        build.add(rank, StructureRecord(0, "unfrozen", "head.weight", 1, 2))
    build.apply(1, outliers=HEAD).step(1, outliers=HEAD)
    assert build.end().only("DDP104").parameter == "head.weight"


def test_a_change_of_structure_is_not_a_wrong_reduction(tmp_path: Path) -> None:
    """Gradients of a parameter that the reducer does not know differ as expected, at any learning rate."""
    build = start(tmp_path).apply(0).step(0)
    for rank in build.ranks:
        build.add(rank, StructureRecord(0, "unfrozen", "head.weight", 1, 2))
    build.apply(1, outliers=HEAD).step(1).end()
    assert not {"DDP202", "DDP203", "DDP205"} & {finding.code for finding in build.findings()}


def test_a_later_change_of_structure_does_not_take_precedence(tmp_path: Path) -> None:
    build = start(tmp_path).apply(0, outliers=OWN, **unsynced()).step(0, outliers=OWN)
    for rank in build.ranks:
        build.add(rank, StructureRecord(0, "unfrozen", "head.weight", 1, 2))
    assert "DDP202" in [finding.code for finding in build.end().findings()]


def test_another_scale_takes_precedence_over_gradients(tmp_path: Path) -> None:
    build = start(tmp_path).hyper(0, {0: {"GradScaler.scale": 256.0}, 1: {"GradScaler.scale": 512.0}})
    build.apply(0, outliers=OWN, moved=True).step(0, outliers=OWN, hyper={0: "x", 1: "y"})
    assert build.end().only("DDP206").cause == "hyperparameters differ: GradScaler.scale"


def test_another_learning_rate_does_not(tmp_path: Path) -> None:
    build = start(tmp_path).hyper(0, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    build.apply(0, outliers=OWN, **unsynced()).step(0, outliers=OWN, hyper={0: "x", 1: "y"})
    assert next(f.code for f in build.end().findings() if f.severity.value == "error") == "DDP202"


def test_a_skipped_step_takes_precedence_over_gradients(tmp_path: Path) -> None:
    """The rank that skipped a step applies the gradients of another backward at the same step."""
    build = start(tmp_path, 3).apply(0).step(0)
    build.apply(1, outliers={1: NAMES}).step(1, outliers={1: NAMES}, forward={0: 2, 1: 3, 2: 2})
    finding = build.end().only("DDP207")
    assert (finding.step, finding.ranks) == (1, (1,))


def test_an_earlier_rewrite_takes_precedence_over_gradients(tmp_path: Path) -> None:
    """Different weights give different gradients; the rewrite shows in the parameters later."""
    build = start(tmp_path).apply(0).step(0)
    build.rewrite(1, [1], outliers={1: NAMES}).apply(1).step(1, outliers=OWN)
    build.apply(2, outliers=OWN, **unsynced()).step(2, outliers=OWN)
    finding = build.end().only("DDP208")
    assert finding.step == 1


def test_an_earlier_rewrite_takes_precedence_even_if_not_compared(tmp_path: Path) -> None:
    """With --every 2 parameters and gradients both diverge at step 2; the rewrite was at step 1."""
    build = start(tmp_path).apply(0).step(0).rewrite(1, [1], outliers={1: NAMES})
    build.apply(2, outliers=OWN).step(2, outliers=OWN).end().only("DDP208")


def test_gradients_that_diverge_before_a_rewrite_take_precedence(tmp_path: Path) -> None:
    build = start(tmp_path).apply(0, outliers=OWN, **unsynced()).step(0)
    build.rewrite(1, [1], outliers={1: NAMES}).apply(1, outliers=OWN, **unsynced()).step(1, outliers=OWN)
    codes = [finding.code for finding in build.end().findings() if finding.severity.value == "error"]
    assert codes[0] == "DDP202"
    assert "DDP201" not in codes


def test_parameters_that_diverged_before_are_reported_instead(tmp_path: Path) -> None:
    """Gradients written to on a rank whose parameters already differ: only the first divergence counts."""
    build = start(tmp_path).hyper(0, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    build.apply(0).step(0, outliers=OWN, hyper={0: "x", 1: "y"})
    build.apply(1, outliers=OWN, moved=True).step(1, outliers=OWN, hyper={0: "x", 1: "y"})
    assert build.end().only("DDP206").step == 0


def test_replicas_that_are_meant_to_differ(tmp_path: Path) -> None:
    from ddpcheck.records.kinds.modules import LOCAL_SGD_HOOK, CommHookRecord

    build = start(tmp_path)
    for rank in build.ranks:
        build.add(rank, CommHookRecord(0, LOCAL_SGD_HOOK, 0))
    assert build.apply(0, outliers=OWN, **unsynced()).step(0, outliers=OWN).end().findings("DDP202") == []
