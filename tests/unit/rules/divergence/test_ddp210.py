"""DDP210: buffers differ after synchronisation, or are mapped to different names."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import ModuleRecord
from tests.helpers.run_builder import NAMES, RunBuilder

BUFFERS = ["norm.mean", "norm.var"]


def synced(build: RunBuilder, forward: int, outliers: dict[int, list[str]] | None = None) -> RunBuilder:
    return build.snapshot(Stage.BUFFERS, forward, BUFFERS, of=TensorKind.BUFFERS, outliers=outliers, width=1)


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (3,))])
def test_buffers_that_differ(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap(buffers=BUFFERS)
    synced(synced(build, 0), 1, {world_size - 1: ["norm.var"]})
    finding = build.end().only("DDP210")
    assert (finding.ranks, finding.step, finding.stage) == (outliers, 1, "buffers")
    assert finding.parameter == "norm.var"


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (1,))])
def test_another_order(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap(buffers=BUFFERS, buffers_on={1: BUFFERS[::-1]})
    finding = build.end().only("DDP210")
    assert (finding.ranks, finding.parameter, finding.evidence["position"]) == (outliers, "norm.mean", 0)
    assert finding.cause == "buffers mapped to different names"


@pytest.mark.parametrize("others", [[*BUFFERS, "extra"], BUFFERS[:1], []])
def test_one_rank_has_others(tmp_path: Path, others: list[str]) -> None:
    build = RunBuilder(tmp_path, 4).wrap(buffers=BUFFERS, buffers_on={2: others})
    finding = build.end().only("DDP210")
    index = min(len(others), 2)
    assert (finding.ranks, finding.evidence["position"]) == ((2,), index)
    assert finding.parameter == [*BUFFERS, "extra"][index]
    assert "missing" in finding.message


def test_three_lists_of_different_lengths(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(
        buffers=[*BUFFERS, "x"], buffers_on={1: [*BUFFERS, "y"], 2: ["norm.mean"]}
    )
    finding = build.end().only("DDP210")
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.evidence["position"] == 2


def test_equal_buffers(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(buffers=BUFFERS)
    assert synced(synced(build, 0), 1).end().findings() == []


STATISTICS = ["norm.running_mean", "norm.running_var"]


def at_the_end(
    build: RunBuilder, names: list[str], ranks: list[int], outliers: dict[int, list[str]]
) -> RunBuilder:
    build.wrap(buffers=names).optimizer().train(3)
    return build.snapshot(
        Stage.BUFFERS_END, -1, names, of=TensorKind.BUFFERS, outliers=outliers, width=8, ranks=ranks
    ).end()


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (3, (1,))])
def test_statistics_recomputed_on_each_rank(
    tmp_path: Path, world_size: int, outliers: tuple[int, ...]
) -> None:
    build = RunBuilder(tmp_path, world_size)
    finding = at_the_end(build, STATISTICS, list(build.ranks), {1: STATISTICS[1:]}).only("DDP210")
    assert (finding.severity.value, finding.stage, finding.step) == ("warning", "buffers.end", None)
    assert (finding.ranks, finding.parameter) == (outliers, "norm.running_var")
    assert "after the last training step" in finding.cause


def test_only_rank_0_recomputes_them(tmp_path: Path) -> None:
    assert at_the_end(RunBuilder(tmp_path, 2), STATISTICS, [0], {0: STATISTICS}).findings() == []


def test_the_same_checkpoint_loaded_by_all(tmp_path: Path) -> None:
    assert at_the_end(RunBuilder(tmp_path, 2), STATISTICS, [0, 1], {}).findings() == []


def test_notes_of_a_rank_do_not_change_the_verdict(tmp_path: Path) -> None:
    (finding,) = at_the_end(RunBuilder(tmp_path, 2), ["seen"], [0, 1], {1: ["seen"]}).findings()
    assert (finding.code, finding.severity.value) == ("DDP210", "note")


def test_diverged_models_measure_different_statistics(tmp_path: Path) -> None:
    """Their parameters differ, and another rule reports that."""
    build = RunBuilder(tmp_path, 2).wrap(buffers=STATISTICS).optimizer().train(2).train(1, 2, {1: [NAMES[0]]})
    build.snapshot(
        Stage.BUFFERS_END, -1, STATISTICS, of=TensorKind.BUFFERS, outliers={1: STATISTICS}, width=8
    ).end()
    assert [finding.code for finding in build.findings()] == ["DDP201"]


@pytest.mark.parametrize(
    ("forwards", "row", "severities"),
    [
        ((3, 3), ["codes", "float32", [4], 1], ["warning"]),
        ((3, 3), ["codes", "float32", [], 1], ["note"]),
        ((3, 3), ["codes", "int64", [4], 1], ["note"]),
        ((3, 2), ["codes", "float32", [4], 1], []),
    ],
)
def test_buffers_that_ddp_does_not_synchronise(
    tmp_path: Path, forwards: tuple[int, int], row: list[Any], severities: list[str]
) -> None:
    build = RunBuilder(tmp_path, 2).wrap(buffers=["codes"]).optimizer().train(3)
    for rank, records in build.records.items():
        build.records[rank] = [
            replace(record, buffers=[row]) if isinstance(record, ModuleRecord) else record
            for record in records
        ]
    for rank in build.ranks:
        build.add(
            rank,
            DigestRecord(
                module=0,
                stage=Stage.BUFFERS_END.value,
                of=TensorKind.BUFFERS.value,
                step=-1,
                root=f"{rank:032x}",
                leaves=base64.b64encode(bytes([rank] * 8)).decode(),
                width=8,
                forward=forwards[rank],
                how="left alone",
            ),
        )
    findings = build.end().findings()
    assert [finding.severity.value for finding in findings] == severities
    if severities:
        assert (findings[0].parameter, findings[0].ranks) == ("codes", (0, 1))
        assert "broadcast_buffers=False" in findings[0].cause
