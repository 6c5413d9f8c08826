"""What rules find in forwards and buffers of sharded modules, whose parameters have no replica."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.records.codecs import pack
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import FIRST_ROOT, ModuleRecord, ModuleRole
from ddpcheck.records.kinds.shards import ReducedShardsRecord, ShardReductionRecord
from ddpcheck.records.kinds.state import StateRecord
from ddpcheck.records.reasons import BufferState
from tests.helpers.run_builder import RunBuilder, sketch_of
from tests.helpers.sharded_run import single_shards

ROOT = 1
BUFFERS = [["positions", "float32", [8], 0], ["queue", "float32", [4, 8], 0], ["seen", "int64", [], 0]]


def root(folder: Path, ranks: int = 2) -> RunBuilder:
    build = single_shards(RunBuilder(folder, ranks))
    for rank in build.ranks:
        build.add(
            rank,
            ModuleRecord(
                module=ROOT,
                name="Network",
                group=list(build.ranks),
                ordinal=FIRST_ROOT + 5,
                parameters=[],
                buffers=BUFFERS,
                role=ModuleRole.ROOT.value,
                mesh={
                    "kind": "dtensor",
                    "dims": ["shards"],
                    "shape": [ranks],
                    "coordinates": {str(each): [each] for each in build.ranks},
                },
            ),
        )
    return build


def buffers(build: RunBuilder, stage: Stage, leaves: Sequence[Sequence[int]]) -> RunBuilder:
    """`leaves`: by rank, a number for each buffer."""
    for rank, numbers in enumerate(leaves):
        data = b"".join(number.to_bytes(8, "big") for number in numbers)
        build.add(
            rank,
            DigestRecord(
                module=ROOT,
                stage=stage.value,
                step=-1,
                root=data.hex(),
                leaves=base64.b64encode(data).decode(),
                width=8,
                of=TensorKind.BUFFERS.value,
                time=1.0,
                optimizer=None,
                forward=4 if stage is Stage.BUFFERS_END else 0,
                how=BufferState.NOT_SYNCED.value if stage is Stage.BUFFERS_END else "",
            ),
        )
    return build


def of_training(build: RunBuilder) -> list[str]:
    """The codes of findings but for the note that parameters without replica are not compared."""
    return [finding.code for finding in build.findings() if finding.code != "DDP606"]


def test_constant_buffers_that_differ(tmp_path: Path) -> None:
    build = buffers(root(tmp_path), Stage.INIT_AFTER, [(1, 2, 3), (9, 2, 3)])
    [finding] = buffers(build, Stage.BUFFERS_END, [(1, 5, 0), (9, 5, 0)]).end().findings("DDP210")
    assert (finding.severity, finding.stage, finding.ranks) == (Severity.WARNING, "init.after", (0, 1))
    assert (finding.parameter, finding.module) == ("positions", None)
    assert "FSDP does not synchronise buffers" in finding.cause
    assert "rank 1 at shards 1" in finding.message


def test_buffers_that_differ_and_change_are_a_rank_s_own(tmp_path: Path) -> None:
    build = buffers(root(tmp_path), Stage.INIT_AFTER, [(1, 2, 3), (1, 8, 3)])
    found = buffers(build, Stage.BUFFERS_END, [(1, 4, 0), (1, 5, 0)]).end().findings("DDP210")
    assert [finding.severity for finding in found] == [Severity.NOTE]


def test_numbers_of_a_rank_are_no_table(tmp_path: Path) -> None:
    build = buffers(root(tmp_path), Stage.INIT_AFTER, [(1, 2, 3), (1, 2, 4)])
    found = buffers(build, Stage.BUFFERS_END, [(1, 2, 3), (1, 2, 4)]).end().findings("DDP210")
    assert [finding.severity for finding in found] == [Severity.NOTE]


def test_buffers_that_drift_apart(tmp_path: Path) -> None:
    build = buffers(root(tmp_path), Stage.INIT_AFTER, [(1, 2, 3)] * 2)
    [finding] = buffers(build, Stage.BUFFERS_END, [(1, 4, 0), (1, 5, 0)]).end().findings("DDP210")
    assert (finding.severity, finding.stage, finding.parameter) == (Severity.WARNING, "buffers.end", "queue")
    assert finding.cause.startswith("FSDP, and buffers that each rank updates")


def test_equal_buffers(tmp_path: Path) -> None:
    build = buffers(root(tmp_path), Stage.INIT_AFTER, [(1, 2, 3)] * 2)
    assert of_training(buffers(build, Stage.BUFFERS_END, [(1, 2, 3)] * 2).end()) == []


def forwards(build: RunBuilder, digests: Sequence[Sequence[str]], drew: str = "") -> RunBuilder:
    for forward, by_rank in enumerate(digests):
        for rank, digest in enumerate(by_rank):
            build.add(
                rank, BatchRecord(forward, ROOT, digest=digest, variety=64, rows=4, drew=f"{drew}{forward}")
            )
    return build


def reductions(build: RunBuilder, local: Mapping[int, float], steps: int) -> RunBuilder:
    ranks = list(build.ranks)
    for rank in ranks:
        build.add(
            rank, ReducedShardsRecord(0, "weight", ["float32"], 8, len(ranks), rank, ranks, float(len(ranks)))
        )
        for step in range(steps):
            own, shard = pack([sketch_of(local[rank] + step)]), pack([sketch_of(0.0)])
            build.add(rank, ShardReductionRecord(step=step, indices=[0], local=own, reduced=shard))
    return build


SAME = [(f"a{step}",) * 2 for step in range(6)]


@pytest.mark.parametrize(
    ("local", "severity"), [({0: 1.0, 1: 1.0}, Severity.ERROR), ({0: 1.0, 1: 2.0}, Severity.NOTE)]
)
def test_the_same_batches_are_a_fault_where_the_gradients_are_the_same(
    tmp_path: Path, local: Mapping[int, float], severity: Severity
) -> None:
    """Ranks may also divide a batch among themselves, as with sequence parallelism."""
    build = reductions(forwards(root(tmp_path), SAME), local, 6).end()
    [finding] = build.findings("DDP301")
    assert (finding.severity, finding.module, finding.ranks) == (severity, None, (0, 1))


def test_the_same_batches_are_a_note_where_no_gradient_is_known(tmp_path: Path) -> None:
    [finding] = forwards(root(tmp_path), SAME).end().findings("DDP301")
    assert finding.severity is Severity.NOTE


def test_other_batches(tmp_path: Path) -> None:
    digests = [(f"a{step}", f"b{step}") for step in range(6)]
    assert forwards(root(tmp_path), digests).end().findings("DDP301") == []


def test_the_same_random_numbers(tmp_path: Path) -> None:
    digests = [(f"a{step}", f"b{step}") for step in range(6)]
    [finding] = forwards(root(tmp_path), digests, drew="d").end().findings("DDP306")
    assert (finding.ranks, finding.module) == ((0, 1), None)


def test_a_rank_in_evaluation_mode(tmp_path: Path) -> None:
    build = root(tmp_path, 3)
    for rank in build.ranks:
        build.add(rank, StateRecord(ROOT, 0, {":training": rank != 1}, "train.py:3", 1))
    [finding] = build.end().findings("DDP213")
    assert (finding.severity, finding.ranks, finding.module) == (Severity.ERROR, (1,), None)


def test_the_report_says_what_was_compared(tmp_path: Path) -> None:
    build = forwards(buffers(root(tmp_path), Stage.INIT_AFTER, [(1, 2, 3)] * 2), [("a", "b")])
    report = buffers(build, Stage.BUFFERS_END, [(1, 2, 3)] * 2).end().report()
    checks = {check.name: check for check in report.checks}
    assert checks["buffers of sharded modules"].outcome == "agree"
    assert checks["forwards of sharded modules"].compared == 1
    assert checks["buffers after wrapping"].outcome == "not checked"
