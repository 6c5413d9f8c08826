"""DDP211: parameters that an optimizer trains outside of DDP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.records.codecs import pack
from ddpcheck.records.kinds.data import LoaderRecord
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.gradients import ManualReductionRecord
from ddpcheck.records.kinds.modules import COPIED, COPIED_IN_PARTS, ModuleRecord, ModuleUseRecord, UseEvidence
from ddpcheck.records.reasons import UnwrappedReason
from ddpcheck.reports.finding_text import script_line
from tests.helpers.run_builder import RunBuilder, sketch_of
from tests.helpers.unwrapped_run import BESIDE, HEAD, apply_beside, beside, step_beside

SHARED = UnwrappedReason.SHARED_BACKWARD.value
OWN = UnwrappedReason.OWN_BACKWARD.value
# Every rank has its own values.
ALL = {0: HEAD, 1: HEAD, 2: HEAD}


def wrapped(folder: Path, ranks: int = 3) -> RunBuilder:
    return RunBuilder(folder, ranks).wrap().optimizer()


def diverging(build: RunBuilder, reason: str, steps: int = 3) -> RunBuilder:
    for step in range(steps):
        build.step(step)
        apply_beside(build, step, reason if step else "", ["a", "b", "c"])
        step_beside(build, step, outliers=ALL)
    return build


def test_a_head_that_shares_the_backward_of_a_ddp_module(tmp_path: Path) -> None:
    build = diverging(beside(wrapped(tmp_path)), SHARED).end()
    finding = build.only("DDP211")
    assert finding.severity is Severity.ERROR
    assert (finding.step, finding.stage, finding.parameter) == (0, "params", "Head.bias")
    assert finding.ranks == (0, 1, 2)
    assert "trained outside DDP" in finding.cause
    assert script_line(build.report(), finding) == ("/home/me/train.py", 12)


def test_the_wrapped_replicas_are_compared_apart_from_it(tmp_path: Path) -> None:
    report = diverging(beside(wrapped(tmp_path)), SHARED).end().report()
    checks = {check.name: check for check in report.checks}
    assert checks["parameters after each step"].outcome == "agree"
    assert checks["parameters after each step"].compared == 3
    assert report.steps == 3


def test_a_backward_of_its_own_is_not_judged(tmp_path: Path) -> None:
    finding = diverging(beside(wrapped(tmp_path)), OWN).end().findings("DDP211")[0]
    assert finding.severity is Severity.NOTE
    assert "not judged" in finding.message


def test_exchanged_activations_are_not_judged(tmp_path: Path) -> None:
    build = diverging(beside(wrapped(tmp_path), outliers=ALL), UnwrappedReason.EXCHANGED.value)
    assert build.end().findings("DDP211")[0].severity is Severity.NOTE


def test_parameters_that_no_backward_reaches_are_left_out(tmp_path: Path) -> None:
    assert diverging(beside(wrapped(tmp_path)), "").end().findings("DDP211") == []


def test_parameters_of_one_rank_alone(tmp_path: Path) -> None:
    build = beside(wrapped(tmp_path), ranks=[0])
    build.step(0).snapshot(Stage.PARAMS, 0, HEAD, module=BESIDE, optimizer=0, ranks=[0])
    assert build.end().findings("DDP211") == []


def test_values_that_agree_again_are_fine(tmp_path: Path) -> None:
    build = diverging(beside(wrapped(tmp_path)), SHARED)
    assert step_beside(build, 3).end().findings("DDP211") == []


def test_values_that_the_job_averages_between_steps_are_fine(tmp_path: Path) -> None:
    build = diverging(beside(wrapped(tmp_path)), SHARED)
    step_beside(build, 3, stage=Stage.REWRITTEN)
    step_beside(build, 3, outliers=ALL)
    assert build.end().findings("DDP211") == []


def test_different_values_before_equal_gradients(tmp_path: Path) -> None:
    build = beside(wrapped(tmp_path, 2), outliers={1: ["Head.weight"]})
    for step in range(3):
        build.step(step)
        apply_beside(build, step, SHARED, ["a", "a"])
        step_beside(build, step, outliers={1: ["Head.weight"]})
    finding = build.end().only("DDP211")
    assert "different values before the first step" in finding.cause
    assert finding.parameter == "Head.weight"


@pytest.mark.parametrize("reason", [OWN, SHARED])
def test_one_gradient_that_the_job_forgets_to_reduce(tmp_path: Path, reason: str) -> None:
    """Without DDP: the other parameter changes and stays equal, so the job reduces gradients itself."""
    build = beside(RunBuilder(tmp_path, 3))
    for step in range(3):
        apply_beside(build, step, reason if step else "", ["a", "b", "c"])
        step_beside(build, step, outliers={rank: ["Head.weight"] for rank in range(3)})
    finding = build.end().only("DDP211")
    assert (finding.step, finding.parameter) == (0, "Head.weight")
    assert "those of other parameters are" in finding.cause


def pairs(folder: Path, steps: int) -> RunBuilder:
    """Ranks 0 and 1 have the same values after each step, and ranks 2 and 3 others."""
    build = beside(RunBuilder(folder, 4))
    other = {
        rank: RunBuilder(folder, 4).snapshot(Stage.PARAMS, 99, HEAD).records[rank][-1] for rank in (2, 3)
    }
    for step in range(steps):
        apply_beside(build, step, OWN if step else "", ["a", "a", "b", "b"])
        build.snapshot(Stage.PARAMS, step, HEAD, module=BESIDE, optimizer=0, ranks=[0, 1])
        for rank, record in other.items():
            fields = {**vars(record), "module": BESIDE, "step": step, "optimizer": 0}
            build.add(rank, type(record)(**fields))
    return build.end()


def test_a_reduction_within_pairs(tmp_path: Path) -> None:
    finding = pairs(tmp_path, 4).only("DDP211")
    assert finding.severity is Severity.ERROR
    assert finding.cause == "gradients are reduced within ranks 0-1 and within ranks 2-3, not over all ranks"


def test_pairs_after_few_steps_may_be_chance(tmp_path: Path) -> None:
    assert pairs(tmp_path, 2).findings("DDP211")[0].severity is Severity.NOTE


def test_a_parameter_that_agrees_by_chance_at_first(tmp_path: Path) -> None:
    """The first step of Adam depends on the signs of the gradients alone."""
    build = beside(wrapped(tmp_path))
    for step in range(4):
        build.step(step)
        apply_beside(build, step, OWN if step else "", ["a", "b", "c"])
        step_beside(build, step, outliers=ALL if step else {rank: ["Head.weight"] for rank in range(3)})
    assert build.end().findings("DDP211")[0].severity is Severity.NOTE


def test_ranks_that_reduce_in_part_of_the_steps_only(tmp_path: Path) -> None:
    """Without DDP, a module whose gradients agreed is a replica: the general rules examine it."""
    build = beside(RunBuilder(tmp_path, 4))
    for step in range(4):
        together = step < 2
        apply_beside(build, step, OWN if step else "", ["a"] * 4 if together else ["a", "a", "b", "b"])
        step_beside(build, step, outliers=None if together else {2: HEAD, 3: HEAD})
    finding = build.end().only("DDP202")
    assert (finding.step, finding.ranks) == (2, (0, 1, 2, 3))
    assert finding.cause == "reduced within ranks 0-1 and within ranks 2-3, not over all ranks"


def reduced(folder: Path, applied: float, own_mean: bool = True) -> RunBuilder:
    build = beside(RunBuilder(folder, 2), names=("Head.weight",), shape=(4,))
    for step in range(2):
        apply_beside(build, step, OWN if step else "", ["a", "a"])
        step_beside(build, step, names=("Head.weight",))
        for rank, local in enumerate((1.0, 3.0)):
            build.add(
                rank,
                ManualReductionRecord(
                    module=BESIDE,
                    optimizer=0,
                    step=step,
                    local=pack([sketch_of(local)]),
                    applied=pack([sketch_of(applied)]),
                    own_mean=own_mean,
                ),
            )
    return build.end()


def test_a_sum_that_is_not_divided(tmp_path: Path) -> None:
    finding = reduced(tmp_path, 4.0).only("DDP204")
    assert (finding.severity, finding.step, finding.stage) == (Severity.WARNING, 0, "applied")
    assert "the sum over ranks" in finding.cause


def test_a_sum_of_a_loss_that_the_job_scales_is_a_note(tmp_path: Path) -> None:
    assert reduced(tmp_path, 4.0, own_mean=False).findings("DDP204")[0].severity is Severity.NOTE


@pytest.mark.parametrize("applied", [2.0, 0.3])
def test_a_mean_or_a_clipped_gradient(tmp_path: Path, applied: float) -> None:
    assert reduced(tmp_path, applied).findings("DDP204") == []


def split(build: RunBuilder, replicas: int | None = 3, wrong_share: int | None = None) -> RunBuilder:
    """Loaders whose samplers draw a part of one dataset on each rank."""
    for rank in build.ranks:
        share = wrong_share if wrong_share is not None else rank
        build.add(rank, LoaderRecord(0, 96, "DistributedSampler", replicas=replicas, share=share))
    return build


def unwrapped(folder: Path, steps: int = 3) -> RunBuilder:
    return diverging(beside(RunBuilder(folder, 3)).covered(steps), OWN, steps)


def test_a_model_that_is_never_wrapped(tmp_path: Path) -> None:
    build = split(unwrapped(tmp_path)).end()
    finding = build.only("DDP211")
    assert (finding.severity, finding.step, finding.ranks) == (Severity.ERROR, 0, (0, 1, 2))
    assert "not wrapped in DDP" in finding.cause
    assert build.report().verdict.value == "findings"


@pytest.mark.parametrize(("replicas", "share"), [(None, None), (2, None), (3, 0)])
def test_without_a_split_of_the_data_the_report_is_incomplete(
    tmp_path: Path, replicas: int | None, share: int | None
) -> None:
    build = split(unwrapped(tmp_path), replicas, share).end()
    assert build.findings("DDP211")[0].severity is Severity.NOTE
    report = build.report()
    assert (report.verdict.value, report.coverage and report.coverage.gap) == ("incomplete", "no_replica")
    assert build.findings("DDP606")[0].ranks == (0, 1, 2)


@pytest.mark.parametrize("stage", [Stage.REWRITTEN, Stage.USED])
@pytest.mark.parametrize("outliers", [{}, {rank: ["Head.bias"] for rank in range(3)}])
def test_models_that_the_job_averages_are_replicas(
    tmp_path: Path, stage: Stage, outliers: dict[int, list[str]]
) -> None:
    """The whole model, or all of it but a personal layer."""
    build = unwrapped(tmp_path)
    step_beside(build, 3, outliers=outliers, stage=stage)
    report = split(build).end().report()
    assert [finding for finding in report.findings if finding.severity is not Severity.NOTE] == []
    assert report.verdict.value == "ok"


def test_parts_of_a_layer_beside_a_layer_that_is_equal(tmp_path: Path) -> None:
    build = beside(RunBuilder(tmp_path, 3)).covered(3)
    for step in range(3):
        apply_beside(build, step, OWN if step else "", ["a", "b", "c"])
        step_beside(build, step, outliers={rank: ["Head.weight"] for rank in range(3)})
    assert "DDP606" not in {finding.code for finding in build.end().report().findings}


def copied(folder: Path, kind: str, agreeing: int) -> RunBuilder:
    """An optimizer steps copies of a model, which differs from some step on."""
    build = beside(RunBuilder(folder, 3), names=HEAD)
    for records in build.records.values():
        records[:] = [
            replace(record, mesh={"kind": kind}) if isinstance(record, ModuleRecord) else record
            for record in records
        ]
    for step in range(agreeing + 3):
        step_beside(build, step, outliers={} if step < agreeing else ALL)
    return build.end()


@pytest.mark.parametrize(
    ("kind", "agreeing", "cause"),
    [
        (COPIED_IN_PARTS, 2, "a part of a copy"),
        (COPIED_IN_PARTS, 0, "a part of a copy"),
        (COPIED, 2, "a copy"),
    ],
)
def test_a_model_whose_copies_are_stepped(tmp_path: Path, kind: str, agreeing: int, cause: str) -> None:
    [finding] = copied(tmp_path, kind, agreeing).findings("DDP211")
    assert (finding.severity, finding.step) == (Severity.ERROR, agreeing)
    assert f"steps {cause} of them" in finding.cause


def test_models_of_the_ranks_own_with_copies_are_not_judged(tmp_path: Path) -> None:
    assert copied(tmp_path, COPIED, 0).findings("DDP211") == []


def test_parameters_that_are_made_anew_for_each_batch_are_no_finding(tmp_path: Path) -> None:
    build = diverging(beside(wrapped(tmp_path)), SHARED)
    for rank in build.ranks:
        build.add(rank, ModuleUseRecord(BESIDE, [UseEvidence.RECREATED.value]))
    assert build.end().findings("DDP211") == []
