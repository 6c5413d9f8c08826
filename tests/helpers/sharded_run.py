"""Runs of four ranks on a mesh of two replicas and two shards, for the rules about shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.modules import FIRST_SHARDED, FIRST_WITHOUT_REPLICA, ModuleRecord, ModuleRole
from tests.helpers.run_builder import NAMES, RunBuilder

GROUPS = ((0, 2), (1, 3))
_MESH = {"kind": "dtensor", "dims": ["replicas", "shards"], "shape": [2, 2]}


def replicated_shards(build: RunBuilder, outliers: Mapping[int, Collection[str]] | None = None) -> RunBuilder:
    """Ranks 0 and 2 hold the same shards, and ranks 1 and 3. Both sets have the same number on their ranks."""
    for group in GROUPS:
        for rank in group:
            coordinates = {str(other): [index, group[0]] for index, other in enumerate(group)}
            build.add(
                rank,
                ModuleRecord(
                    module=0,
                    name="SGD",
                    group=list(group),
                    ordinal=FIRST_SHARDED + 7,
                    parameters=build.rows(NAMES),
                    buffers=[],
                    role=ModuleRole.SHARDED.value,
                    mesh={**_MESH, "coordinates": coordinates},
                ),
            )
    return build.snapshot(Stage.INIT_AFTER, -1, outliers=outliers, width=8).optimizer()


def single_shards(
    build: RunBuilder,
    names_on: Mapping[int, Sequence[str]] | None = None,
    dtype_on: Mapping[int, str] | None = None,
) -> RunBuilder:
    """Each rank holds another part of the same parameters."""
    for rank in build.ranks:
        names = (names_on or {}).get(rank, NAMES)
        dtype = (dtype_on or {}).get(rank, "float32")
        build.add(
            rank,
            ModuleRecord(
                module=0,
                name="SGD",
                group=list(build.ranks),
                ordinal=FIRST_WITHOUT_REPLICA + 7,
                parameters=[[name, dtype, [8, 4], 1] for name in names],
                buffers=[],
                role=ModuleRole.SHARDED.value,
                mesh={"kind": "dtensor", "dims": ["shards"], "shape": [len(build.ranks)], "coordinates": {}},
            ),
        )
    return build.optimizer(groups=((-1, -1, -1),))
