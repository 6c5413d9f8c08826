"""Looks: ranks name a moment alike, and memory does not grow with steps."""

from __future__ import annotations

from torch import nn

from ddpcheck.probes.live_compare.snapshot import RecentSnapshots, SnapshotKey
from ddpcheck.records.kinds.digests import Stage, TensorKind
from tests.helpers.fake_context import watch


def test_ranks_name_a_moment_alike_and_no_two_moments_the_same() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    other = watch(two, index=1)
    moments = [
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 3, 0),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 4, 0),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 3, 1),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.PARAMETERS, 3, None),
        SnapshotKey(watch(one), Stage.REWRITTEN, TensorKind.PARAMETERS, 3, 0),
        SnapshotKey(watch(one), Stage.PARAMS, TensorKind.BUFFERS, 3, 0),
        SnapshotKey(other, Stage.PARAMS, TensorKind.PARAMETERS, 3, 0),
    ]
    keys = {moment.key("a") for moment in moments} | {moments[0].key("b")}
    assert len(keys) == len(moments) + 1
    assert SnapshotKey(watch(nn.Linear(1, 1)), Stage.PARAMS, TensorKind.PARAMETERS, 3, 0).key("a") == moments[
        0
    ].key("a")


def test_the_oldest_are_forgotten() -> None:
    recent: RecentSnapshots[int] = RecentSnapshots(3)
    for number in range(10):
        recent.put(bytes((number,)), number)
    assert [recent.get(bytes((number,))) for number in range(6, 10)] == [None, 7, 8, 9]
    assert len(recent._items) == 3
