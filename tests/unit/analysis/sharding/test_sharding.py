"""Shards: comparison of replicas, settings without replicas, mesh coordinates, steps without gradients."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.analysis.report import Report
from ddpcheck.records.kinds.shards import PendingGradientsRecord, PendingReason
from tests.helpers.run_builder import NAMES, RunBuilder
from tests.helpers.sharded_run import replicated_shards, single_shards


def hybrid(folder: Path) -> RunBuilder:
    return replicated_shards(RunBuilder(folder, 4))


def sharded(folder: Path) -> RunBuilder:
    return single_shards(RunBuilder(folder, 2)).covered(0, seen=["fsdp2"], sharded=3)


def found(report: Report) -> list[str]:
    return sorted(finding.code for finding in report.findings if finding.severity.value != "note")


def test_replicas_of_shards_are_compared(tmp_path: Path) -> None:
    report = hybrid(tmp_path).train(5).covered().end().report()
    assert (report.verdict.value, report.findings) == ("ok", ())
    assert report.coverage is not None
    assert (report.coverage.trained, report.coverage.compared, report.run["parameters"]) == (3, 3, 3)
    [check] = [check for check in report.checks if check.name == "parameters after each step"]
    assert (check.outcome, check.compared) == ("agree", 10)
    [check] = [check for check in report.checks if check.name == "reduction of sharded gradients"]
    assert check.outcome == "not checked"


def test_a_replica_that_diverges_is_named_with_its_place_on_the_mesh(tmp_path: Path) -> None:
    build = hybrid(tmp_path).train(2).train(3, first=2, outliers={3: NAMES[:1]})
    finding = build.covered().end().only("DDP201")
    assert (finding.step, finding.parameter, finding.ranks) == (2, NAMES[0], (1, 3))
    assert finding.evidence["mesh"] == {
        "1": {"replicas": 0, "shards": 1},
        "3": {"replicas": 1, "shards": 1},
    }
    assert "rank 3 at replicas 1, shards 1" in finding.message


def test_all_sets_of_shards_that_diverge_alike_are_one_finding(tmp_path: Path) -> None:
    build = hybrid(tmp_path).train(2).train(3, first=2, outliers={2: NAMES, 3: NAMES})
    finding = build.covered().end().only("DDP201")
    assert finding.ranks == (0, 1, 2, 3)
    assert sorted(finding.evidence["mesh"]) == ["0", "1", "2", "3"]


def test_replicas_that_differ_from_the_start(tmp_path: Path) -> None:
    build = replicated_shards(RunBuilder(tmp_path, 4), outliers={1: NAMES})
    build.train(3, outliers={1: NAMES}).covered().end()
    finding = build.only("DDP101")
    assert (finding.ranks, finding.stage) == ((1, 3), "init.after")
    assert "fully_shard" in finding.cause


def test_without_replicas_the_verdict_is_incomplete(tmp_path: Path) -> None:
    report = sharded(tmp_path).end().report()
    assert (report.verdict.value, found(report)) == ("incomplete", ["DDP606"])
    assert report.coverage is not None
    assert (report.coverage.compared, report.coverage.not_compared) == (0, {"sharded": 3})
    [finding] = report.findings
    assert finding.cause.startswith("FSDP2 (fully_shard)")
    [check] = [check for check in report.checks if check.name == "settings of optimizers that step shards"]
    assert check.outcome == "agree"


def test_hyperparameters_that_differ_where_there_is_no_replica(tmp_path: Path) -> None:
    build = sharded(tmp_path).hyper(0, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.1}}).hyper(3, {1: {"0.lr": 0.2}})
    report = build.end().report()
    assert found(report) == ["DDP206", "DDP606"]
    [finding] = [finding for finding in report.findings if finding.code == "DDP206"]
    assert (finding.step, finding.ranks) == (3, (0, 1))
    [row] = finding.evidence["hyperparameters"]
    assert (row["name"], row["by_rank"]) == ("lr", {"0": 0.1, "1": 0.2})


def test_a_schedule_is_no_difference(tmp_path: Path) -> None:
    build = sharded(tmp_path)
    for step in range(4):
        build.hyper(step, {rank: {"0.lr": 0.1 / (step + 1)} for rank in range(2)})
    # A rank that ended earlier has no value for later steps.
    assert found(build.hyper(5, {0: {"0.lr": 0.5}}).end().report()) == ["DDP606"]


def test_a_step_left_out_is_no_difference_of_a_schedule(tmp_path: Path) -> None:
    build = single_shards(RunBuilder(tmp_path, 2)).covered(0, 5, [0], sharded=3).covered(0, 4, [1], sharded=3)
    build.hyper(0, {rank: {"0.lr": 0.1} for rank in range(2)})
    build.hyper(2, {0: {"0.lr": 0.05}, 1: {"0.lr": 0.03}}).end()
    report = build.report()
    assert found(report) == ["DDP207", "DDP606"]
    [finding] = [finding for finding in report.findings if finding.code == "DDP207"]
    assert finding.evidence["steps"] == {"0": 5, "1": 4}


def test_parameters_that_one_rank_has_in_another_dtype(tmp_path: Path) -> None:
    build = single_shards(RunBuilder(tmp_path, 3), dtype_on={1: "bfloat16"}).covered(0, sharded=3)
    [finding] = [finding for finding in build.end().report().findings if finding.code == "DDP206"]
    assert (finding.ranks, finding.parameter) == ((1,), sorted(NAMES)[0])


def test_steps_without_gradients(tmp_path: Path) -> None:
    build = hybrid(tmp_path).train(5).covered()
    for rank in build.ranks:
        for steps in (1, 2):
            record = PendingGradientsRecord(
                0, 0, 3, steps, PendingReason.SYNC_OFF.value, [NAMES[0]], 3, "/home/me/train.py:9"
            )
            build.add(rank, record)
    finding = build.end().only("DDP212")
    assert (finding.step, finding.ranks, finding.parameter) == (3, (0, 1, 2, 3), NAMES[0])
    assert finding.evidence["steps_without_gradient"] == 2
    assert finding.cause.startswith("set_requires_gradient_sync(False)")
