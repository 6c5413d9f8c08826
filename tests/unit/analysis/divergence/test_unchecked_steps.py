"""Divergence at steps of which the budget left something out: no false alarm, no invented cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.timing import CostRecord
from tests.helpers.run_builder import RunBuilder

OWN = {1: ("body.bias",)}
LOCAL = {0: (1.0, 2.0, 3.0), 1: (3.0, 4.0, 5.0)}
MEAN = (2.0, 3.0, 4.0)
BYPASSED = {"last": "unsynced", "synced": 0, "unsynced": 1, "reason": "wrapper_bypassed"}


class ThinnedRun(RunBuilder):
    """Steps 0 to 63 are complete; then sketches, applied gradients and parameters come at every N-th step."""

    def __init__(self, folder: Path, applied: int = 64, params: int = 1, sketch: int = 64) -> None:
        super().__init__(folder, 2)
        self.every = {"applied": applied, "params": params, "sketch": sketch}
        self.wrap().optimizer()

    def healthy(self, first: int, end: int, windows: bool = True, **fields: Any) -> ThinnedRun:
        for step in range(first, end):
            self.one(step, windows=windows, **fields)
        return self

    def one(
        self,
        step: int,
        *,
        outliers: dict[int, Any] | None = None,
        applied_outliers: dict[int, Any] | None = None,
        windows: bool = True,
        digest: bool | None = None,
        params: bool | None = None,
        forward: dict[int, int] | None = None,
        **fields: Any,
    ) -> ThinnedRun:
        due = {check: step < 64 or step % every == 0 for check, every in self.every.items()}
        if due["sketch"]:
            self.backward(step + 1, LOCAL, MEAN)
        if due["applied"] if digest is None else digest:
            self.apply(step, outliers=applied_outliers, **fields)
        elif windows:
            on = {rank: {**values, "root": ""} for rank, values in (fields.pop("on", None) or {}).items()}
            self._windows(step, on, **fields)
        if due["params"] if params is None else params:
            self.step(step, outliers, forward=forward)
        return self

    def _windows(self, step: int, on: dict[int, dict[str, Any]], **fields: Any) -> None:
        for rank in self.ranks:
            self.add(rank, AppliedRecord(step=step, **{"root": "", **fields, **on.get(rank, {})}))


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize(("applied", "params"), [(1, 1), (64, 1), (64, 2), (64, 16), (4, 1)])
def test_a_healthy_run_has_no_findings(tmp_path: Path, applied: int, params: int, windows: bool) -> None:
    report = ThinnedRun(tmp_path, applied, params).healthy(0, 200, windows).end().report()
    assert report.findings == ()
    compared = {check.name: check.compared for check in report.checks}
    assert compared["gradients as applied"] == len([s for s in range(200) if s < 64 or s % applied == 0])
    assert compared["parameters after each step"] == len([s for s in range(200) if s < 64 or s % params == 0])


def test_empty_roots_are_not_compared_with_digests(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path).healthy(0, 70)
    build.apply(70, ranks=[0])
    build.add(1, AppliedRecord(step=70, root=""))
    report = build.step(70).end().report()
    assert report.findings == ()
    assert {check.outcome for check in report.checks if check.name == "gradients as applied"} == {"agree"}


def test_a_window_without_a_reduction_explains_a_divergence(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path).healthy(0, 70).one(70, outliers=OWN, **BYPASSED)
    finding = build.healthy(71, 80).end().only("DDP202")
    assert (finding.step, finding.stage, finding.ranks) == (70, "applied", (0, 1))
    assert finding.cause == "wrapper bypassed"
    assert finding.parameter == "body.bias"
    assert finding.evidence["gradients_compared"] is False
    assert all(group["digest"] for group in finding.evidence["groups"])


def test_the_window_is_found_between_two_comparisons_of_parameters(tmp_path: Path) -> None:
    """Parameters agree at step 64, the gradients of step 70 are not reduced on rank 1, parameters differ at step 80."""
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).one(70, on={1: BYPASSED}).healthy(71, 80)
    finding = build.one(80, outliers=OWN).end().only("DDP202")
    assert (finding.step, finding.ranks) == (70, (1,))
    assert finding.evidence["parameters_differ_after_step"] == 80


def test_a_window_without_a_reduction_alone_is_no_finding(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).one(70, **BYPASSED).healthy(71, 100)
    assert build.end().report().findings == ()


def test_a_job_that_reduces_gradients_itself_is_not_blamed_for_it(tmp_path: Path) -> None:
    """Its gradients agreed at every compared step although DDP never reduced them."""
    build = ThinnedRun(tmp_path).healthy(0, 70, **BYPASSED).one(70, outliers=OWN, **BYPASSED)
    finding = build.end().only("DDP201")
    assert finding.cause.startswith("not known: the gradients that the optimizer applied at step 70 were not")


@pytest.mark.parametrize("windows", [True, False])
def test_without_evidence_the_cause_says_that_gradients_were_not_compared(
    tmp_path: Path, windows: bool
) -> None:
    build = ThinnedRun(tmp_path).healthy(0, 70, windows).one(70, outliers=OWN, windows=windows)
    finding = build.end().only("DDP201")
    assert (finding.step, finding.stage) == (70, "params")
    assert "were not all compared" in finding.cause
    assert "--budget off" in finding.fix


def test_compared_gradients_are_named_as_equal(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, applied=64).healthy(0, 128).one(128, outliers=OWN)
    assert "all applied the same gradients" in build.end().only("DDP201").cause


def test_equal_gradients_at_some_of_the_steps_prove_nothing(tmp_path: Path) -> None:
    """Parameters agree at step 112 and differ at step 128; of these steps only 128 has compared gradients."""
    build = ThinnedRun(tmp_path, applied=64, params=16).healthy(0, 128).one(128, outliers=OWN)
    finding = build.end().only("DDP201")
    assert "at steps 113 to 128 were not all compared" in finding.cause
    assert finding.evidence["last_equal_step"] == 112
    assert "between steps 113 and 128" in finding.message


def test_gradients_that_differ_after_the_divergence_are_mentioned(tmp_path: Path) -> None:
    """After the first mismatch everything is compared again."""
    build = ThinnedRun(tmp_path).healthy(0, 70).one(70, outliers=OWN)
    build.one(71, outliers=OWN, applied_outliers=OWN, digest=True, moved=True)
    finding = build.end().only("DDP201")
    assert finding.step == 70
    assert "At step 71 they were compared and differ: gradients were written to" in finding.cause


def test_a_skipped_step_between_two_comparisons(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).one(70, on={1: {"synced": 2}}).healthy(71, 80)
    finding = build.one(80, outliers=OWN, forward={0: 81, 1: 82}).end().only("DDP207")
    assert (finding.cause, finding.ranks) == ("a step was skipped on rank 1", (1,))
    assert "between steps 65 and 80" in finding.message


def test_an_extra_step_is_reported_once(tmp_path: Path) -> None:
    """The window of the extra step has no reduction: the step is the cause, not the gradients."""
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70)
    build.one(70, on={1: {"last": "none", "synced": 0}}).healthy(71, 80)
    finding = build.one(80, outliers=OWN, forward={0: 81, 1: 80}).end().only("DDP207")
    assert (finding.cause, finding.ranks) == ("a step was added on rank 1", (1,))


def test_hyperparameters_that_differ_between_two_comparisons(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).hyper(70, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    build.healthy(70, 80).step(80, OWN, hyper={0: "a", 1: "b"})
    finding = build.end().only("DDP206")
    assert finding.cause == "hyperparameters differ: lr"
    assert "between steps 65 and 80" in finding.message


def test_a_write_by_one_rank_between_two_comparisons(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).rewrite(70, [0], OWN).healthy(70, 80)
    finding = build.one(80, outliers=OWN).end().only("DDP208")
    assert finding.step == 70


def test_the_same_write_by_all_ranks_between_two_comparisons(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).rewrite(70, [0, 1]).healthy(70, 100)
    assert build.end().report().findings == ()


def test_writes_that_differ_may_be_a_consequence(tmp_path: Path) -> None:
    """All ranks clip their weights before every step; a learning rate makes them diverge before that."""
    build = ThinnedRun(tmp_path, params=16).healthy(0, 70).hyper(70, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    build.rewrite(72, [0, 1], OWN).healthy(70, 80).step(80, OWN, hyper={0: "a", 1: "b"})
    assert build.end().only("DDP206").cause == "hyperparameters differ: lr"


def test_writes_that_differ_without_another_cause(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 72).rewrite(72, [0, 1], OWN).healthy(72, 80)
    finding = build.one(80, outliers=OWN).end().only("DDP208")
    assert "may have differed already" in finding.cause


@pytest.mark.parametrize(("moved", "code"), [(True, "DDP205"), (False, "DDP203")])
def test_gradients_that_differ_where_the_allreduce_was_not_verified(
    tmp_path: Path, moved: bool, code: str
) -> None:
    """Nothing is claimed about the result of the reduction."""
    build = ThinnedRun(tmp_path, applied=1).healthy(0, 70)
    finding = build.one(70, outliers=OWN, applied_outliers=OWN, moved=moved).end().only(code)
    assert finding.step == 70
    assert "not verified at this step" in finding.cause
    assert finding.evidence["allreduce_verified"] is False
    assert "although the reduction gave" not in finding.message


def test_gradients_that_one_rank_wrote_to(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, applied=1).healthy(0, 70)
    build.one(70, outliers=OWN, applied_outliers=OWN, on={1: {"moved": True}})
    assert build.end().only("DDP205").cause.endswith("between backward and step on rank 1 only")


def test_a_wrong_mean_at_a_later_verified_step(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path).healthy(0, 128)
    finding = build.backward(129, LOCAL, (4.0, 6.0, 8.0)).apply(128).step(128).end().only("DDP204")
    assert finding.step == 128


def test_a_nan_is_only_said_to_have_been_seen(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path).healthy(0, 128)
    for rank in build.ranks:
        build.add(rank, CostRecord(step=64, steps=65, wall=1000, sketch_every=64))
    build.backward(129, {0: (float("nan"), 1.0, 1.0), 1: (1.0, 1.0, 1.0)}, (float("nan"), 1.0, 1.0))
    last = build.records[0][-1]
    assert isinstance(last, BackwardRecord)
    build.records[0][-1] = replace(last, local_nonfinite={"0": 1})
    build.apply(128, nonfinite={"0": 1}).step(128)
    (finding,) = build.end().findings("DDP209")
    assert "first seen at step 128 on rank 0" in finding.message


def sparse_second_node(folder: Path, every: int = 16) -> ThinnedRun:
    """Rank 0 compares parameters at every step, rank 1 at every 16th; both digest applied gradients accordingly."""
    build = ThinnedRun(folder, applied=1, sketch=1).healthy(0, 64)
    for step in range(64, 100):
        build.one(step, params=False, digest=False)
        build.step(step, ranks=[0, 1] if step % every == 0 else [0])
    for rank, interval in enumerate((1, every)):
        build.add(rank, CostRecord(step=64, steps=36, wall=1000, params_every=interval))
    return build


def test_nodes_that_compare_different_steps(tmp_path: Path) -> None:
    report = sparse_second_node(tmp_path).end().report()
    assert report.findings == ()
    assert not any(stretch.absent or stretch.odd for stretch in report.agreement[0].stretches)
    (check,) = [check for check in report.checks if check.name == "parameters after each step"]
    assert check.compared == 64 + 3


def test_nodes_that_took_different_numbers_of_steps(tmp_path: Path) -> None:
    build = sparse_second_node(tmp_path).step(100, ranks=[0])
    assert build.end().only("DDP207").evidence["steps"] == {"0": 101, "1": 100}


def test_the_last_common_step_counts(tmp_path: Path) -> None:
    finding = sparse_second_node(tmp_path).healthy(100, 112, params=False).one(112, outliers=OWN, params=True)
    (diverged,) = finding.end().findings("DDP201")
    assert (diverged.step, diverged.evidence["last_equal_step"]) == (112, 96)


def test_a_rank_inside_join_whose_node_leaves_out_the_allreduce(tmp_path: Path) -> None:
    """Its gradients are part of the mean although it has no record."""
    build = ThinnedRun(tmp_path).healthy(0, 70)
    for rank in build.ranks:
        build.add(rank, JoinRecord(0, 64))
    build.add(0, CostRecord(step=64, steps=64, wall=1000))
    build.add(1, CostRecord(step=64, steps=64, wall=1000, sketch_every=64))
    build.backward(71, {0: LOCAL[0]}, MEAN)
    assert build.one(70).end().report().findings == ()


def test_ranks_write_a_window_only_when_it_changes(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 80, windows=False)
    build.add(1, AppliedRecord(step=70, root="", **BYPASSED))
    build.add(1, AppliedRecord(step=71, root=""))
    finding = build.one(80, outliers=OWN, windows=False).end().only("DDP202")
    assert (finding.step, finding.ranks) == (70, (1,))
    assert finding.evidence["last_backward"] == {"0": "synced", "1": "unsynced"}


def test_a_skipped_step_that_only_one_rank_recorded(tmp_path: Path) -> None:
    build = ThinnedRun(tmp_path, params=16).healthy(0, 80, windows=False)
    build.add(1, AppliedRecord(step=70, root="", synced=2))
    finding = build.one(80, outliers=OWN, windows=False, forward={0: 81, 1: 82}).end().only("DDP207")
    assert finding.cause == "a step was skipped on rank 1"
