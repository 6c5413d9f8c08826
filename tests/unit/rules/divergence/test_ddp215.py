"""DDP215: parameters never change although optimizers step."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from ddpcheck.records.kinds.coverage import TrainingRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import FIRST_UNWRAPPED, ModuleRecord, ModuleRole, OptimizerRecord
from tests.helpers.run_builder import NAMES, RunBuilder

ALL = (0, 1, 2)
RATES = {"0.lr": 0.1}


def digest(step: int, changing: Collection[int], module: int = 0) -> DigestRecord:
    """Only some of three parameters change from step to step."""
    leaves = [
        hashlib.blake2b(f"{index} {step if index in changing else -1}".encode(), digest_size=16).digest()
        for index in ALL
    ]
    root = hashlib.blake2b(b"".join(leaves), digest_size=16).hexdigest()
    packed = base64.b64encode(b"".join(leaf[:2] for leaf in leaves)).decode()
    stage = Stage.PARAMS if step >= 0 else Stage.INIT_AFTER
    optimizer = 0 if step >= 0 else None
    return DigestRecord(module, stage.value, step, root, packed, 2, optimizer=optimizer, forward=step + 1)


def describe(module: int, trainable: int = 1, unwrapped: bool = False) -> ModuleRecord:
    return ModuleRecord(
        module=module,
        name="Net",
        group=[0, 1],
        ordinal=FIRST_UNWRAPPED + 7 if unwrapped else 0,
        parameters=[[name, "float32", [4], trainable] for name in NAMES],
        buffers=[],
        role=(ModuleRole.STEPPED if unwrapped else ModuleRole.DDP).value,
    )


def backwards(build: RunBuilder, absent: Sequence[int] = (), count: int = 6) -> None:
    for rank in build.ranks:
        for number in range(1, count + 1):
            build.add(rank, BackwardRecord(number, number - 1, "", "", f"{number}", absent=list(absent)))


def run(
    folder: Path,
    changing: Collection[int],
    steps: int = 6,
    trainable: int = 1,
    hyper: Mapping[int, Mapping[str, float]] | None = None,
    owned: Sequence[int] = ALL,
    absent: Sequence[int] = (),
) -> RunBuilder:
    build = RunBuilder(folder, 2)
    for rank in build.ranks:
        build.add(rank, describe(0, trainable))
        build.add(rank, digest(-1, ()))
        build.add(rank, OptimizerRecord(0, "SGD", 0, [list(owned)]))
    for step, values in (hyper or {0: RATES}).items():
        build.hyper(step, dict.fromkeys(build.ranks, values))
    backwards(build, absent)
    for step in range(steps):
        for rank in build.ranks:
            build.add(rank, digest(step, changing))
    return build


def test_everything_changes(tmp_path: Path) -> None:
    assert run(tmp_path, ALL).end().findings("DDP215") == []


def test_most_never_change_without_gradient(tmp_path: Path) -> None:
    finding = run(tmp_path, [2], absent=[0, 1]).end().only("DDP215")
    assert (finding.severity.value, finding.step, finding.parameter) == ("warning", None, NAMES[0])
    assert finding.evidence["without_gradient"] is True
    assert (finding.evidence["count"], finding.evidence["of"]) == (2, 3)
    assert finding.cause.startswith("no gradient reaches")


def test_gradients_arrive_and_change_nothing(tmp_path: Path) -> None:
    [finding] = run(tmp_path, []).end().findings()
    assert (finding.code, finding.severity.value) == ("DDP215", "note")
    assert finding.evidence["without_gradient"] is False


@pytest.mark.parametrize(
    "healthy",
    [
        {"changing": [0, 1]},
        {"changing": [], "steps": 3},
        {"changing": [], "trainable": 0},
        {"changing": [], "hyper": {0: {"0.lr": 0.0}}},
        {"changing": [], "hyper": {0: {"0.lr": 0.0}, 4: RATES}},
        {"changing": [2], "owned": [2]},
    ],
    ids=["unused head", "few steps", "frozen", "no rate", "warm-up", "not in the optimizer"],
)
def test_parameters_that_rightly_stay(tmp_path: Path, healthy: dict[str, object]) -> None:
    assert run(tmp_path, **healthy).end().findings("DDP215") == []  # type: ignore[arg-type]


def orphans(folder: Path, changing: Collection[int] = (), steps: int = 6, reduced: int = 6) -> RunBuilder:
    """An optimizer steps parameters outside of the DDP module, and none steps those of the module."""
    build = RunBuilder(folder, 2)
    for rank in build.ranks:
        build.add(rank, describe(0))
        build.add(rank, digest(-1, ()))
        build.add(rank, describe(1, unwrapped=True))
        build.add(rank, digest(-1, (), module=1))
        build.add(rank, OptimizerRecord(0, "AdamW", 1, [list(ALL)], "/home/me/train.py:40"))
    build.hyper(0, dict.fromkeys(build.ranks, RATES))
    backwards(build, count=reduced)
    for step in range(steps):
        for rank in build.ranks:
            build.add(rank, digest(step, changing, module=1))
    return build


def test_the_optimizer_has_other_parameters(tmp_path: Path) -> None:
    (finding,) = orphans(tmp_path).end().findings("DDP215")
    assert (finding.parameter, finding.ranks, finding.evidence["count"]) == (NAMES[0], (0, 1), 3)
    assert finding.evidence["optimizer_at"] == "/home/me/train.py:40"
    assert "in no module that runs" in finding.cause


def test_a_probe_beside_a_module_that_is_only_measured(tmp_path: Path) -> None:
    assert orphans(tmp_path, changing=ALL).end().findings("DDP215") == []


def test_too_little_is_known(tmp_path: Path) -> None:
    assert orphans(tmp_path / "steps", steps=3).end().findings("DDP215") == []
    assert orphans(tmp_path / "backwards", reduced=2).end().findings("DDP215") == []


def without_ddp(
    folder: Path, changing: Collection[int] = (), steps: int = 6, rate: float = 0.1, seen: Sequence[str] = ()
) -> RunBuilder:
    """No module is wrapped in DDP; an optimizer steps parameters all the same."""
    build = RunBuilder(folder, 2)
    for rank in build.ranks:
        build.add(rank, describe(0, unwrapped=True))
        build.add(rank, digest(-1, ()))
        build.add(rank, OptimizerRecord(0, "Adam", 0, [list(ALL)], "/home/me/train.py:40"))
        build.add(rank, TrainingRecord(6, list(seen)))
    build.hyper(0, {rank: {"0.lr": rate} for rank in build.ranks})
    for step in range(steps):
        for rank in build.ranks:
            build.add(rank, digest(step, changing))
    return build


@pytest.mark.parametrize(("seen", "cause"), [(["fsdp"], "FSDP"), (["fsdp2"], "FSDP"), ([], "the loss")])
def test_nothing_is_trained(tmp_path: Path, seen: list[str], cause: str) -> None:
    [finding] = without_ddp(tmp_path, seen=seen).end().findings("DDP215")
    assert (finding.severity.value, finding.step, finding.ranks) == ("warning", 0, (0, 1))
    assert cause in finding.cause
    assert finding.evidence["count"] == 3


@pytest.mark.parametrize(
    "healthy", [{"changing": [2]}, {"steps": 3}, {"rate": 0.0}], ids=["one changes", "few steps", "no rate"]
)
def test_a_job_without_ddp_that_may_be_right(tmp_path: Path, healthy: dict[str, object]) -> None:
    assert without_ddp(tmp_path, **healthy).end().findings("DDP215") == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "found"), [(12, 1), (6, 0)])
def test_a_learning_rate_of_zero_at_every_step(tmp_path: Path, steps: int, found: int) -> None:
    """A few steps may be a warm-up."""
    findings = run(tmp_path, (), steps, hyper={0: {"0.lr": 0.0}}).end().findings("DDP215")
    assert [finding.cause for finding in findings] == ["the learning rate is zero at every step"] * found
