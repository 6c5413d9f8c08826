"""Runs with parameters outside of DDP, for the rules about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.kinds.modules import FIRST_UNWRAPPED, ModuleRecord, ModuleRole
from tests.helpers.run_builder import RunBuilder

HEAD = ("Head.bias", "Head.weight")
# The number of the unwrapped module in the records of a rank.
BESIDE = 1


def beside(
    build: RunBuilder,
    role: ModuleRole = ModuleRole.STEPPED,
    names: Sequence[str] = HEAD,
    outliers: Mapping[int, Collection[str]] | None = None,
    ranks: Collection[int] | None = None,
    shape: Sequence[int] = (4, 4),
) -> RunBuilder:
    """Parameters beside a DDP module, as they are when they are found."""
    for rank in build.ranks if ranks is None else ranks:
        record = ModuleRecord(
            module=BESIDE,
            name="Head" if role is ModuleRole.USED else "SGD",
            group=list(build.ranks),
            ordinal=FIRST_UNWRAPPED + 7,
            parameters=[[name, "float32", list(shape), 1] for name in names],
            buffers=[],
            where="/home/me/train.py:12",
            role=role.value,
        )
        build.add(rank, record)
    return build.snapshot(Stage.INIT_AFTER, -1, names, outliers=outliers, width=8, module=BESIDE, ranks=ranks)


def step_beside(
    build: RunBuilder,
    step: int,
    outliers: Mapping[int, Collection[str]] | None = None,
    names: Sequence[str] = HEAD,
    stage: Stage = Stage.PARAMS,
    optimizer: int | None = 0,
) -> RunBuilder:
    return build.snapshot(stage, step, names, outliers=outliers, module=BESIDE, optimizer=optimizer)


def apply_beside(build: RunBuilder, step: int, reason: str, roots: Sequence[str]) -> RunBuilder:
    """The gradients that each rank applies: equal roots are equal gradients."""
    for rank, root in zip(build.ranks, roots, strict=True):
        record = AppliedRecord(
            step=step, root=root, module=BESIDE, last="unsynced", synced=0, unsynced=1, reason=reason
        )
        build.add(rank, record)
    return build
