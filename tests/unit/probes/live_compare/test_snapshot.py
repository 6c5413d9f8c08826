"""Snapshots: all ranks make the same keys, and memory does not grow with steps."""

from __future__ import annotations

from torch import nn

from ddpcheck.probes.live_compare.node import RecentSnapshots, SnapshotKey
from ddpcheck.records.kinds.digests import Stage, TensorKind
from tests.helpers.fake_context import watch


def test_key_hashes_are_unique_and_the_same_on_all_ranks() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    other = watch(two, index=1)
    keys = [
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 3, 0),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 4, 0),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 3, 1),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 3, None),
        SnapshotKey(watch(one), Stage.REWRITTEN, TensorKind.PARAMETERS, 3, 0),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.BUFFERS, 3, 0),
        SnapshotKey(other, Stage.PARAMS, TensorKind.PARAMETERS, 3, 0),
    ]
    hashes = {key.hash("a") for key in keys} | {keys[0].hash("b")}
    assert len(hashes) == len(keys) + 1
    same = SnapshotKey(watch(nn.Linear(1, 1)), Stage.PARAMS, TensorKind.PARAMETERS, 3, 0)
    assert same.hash("a") == keys[0].hash("a")


def test_the_oldest_are_dropped() -> None:
    recent: RecentSnapshots[int] = RecentSnapshots(3)
    for number in range(10):
        recent.put(bytes((number,)), number)
    assert [recent.get(bytes((number,))) for number in range(6, 10)] == [None, 7, 8, 9]
    assert len(recent._items) == 3
