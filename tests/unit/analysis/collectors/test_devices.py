"""Steps inside graphs and checks that a device lacks are never agreement."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.records.kinds.rank import DeviceRecord, GraphRecord
from tests.helpers.run_builder import RunBuilder


def checks(run: RunBuilder) -> dict[str, tuple[str, str]]:
    return {check.name: (check.outcome, check.detail) for check in run.report().checks}


def test_a_step_that_was_only_captured_is_not_checked(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path, 2).wrap()
    for rank in run.ranks:
        run.add(rank, GraphRecord(1, 1, 1, 1, replays=40, replayed_backwards=40, replayed_steps=40))
    states = checks(run.end())
    assert states["parameters after each step"] == ("not checked", "captured in a graph")
    assert states["reduced gradients against the mean"] == ("not checked", "captured in a graph")
    assert states["steps inside graphs"][0] == "not checked"
    assert "40 steps" in states["steps inside graphs"][1]


def test_eager_steps_beside_a_graph_are_checked_and_the_rest_is_named(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path, 2).wrap().optimizer().train(3)
    run.add(0, GraphRecord(1, 1, 1, 1, replays=40, replayed_backwards=40, replayed_steps=40))
    states = checks(run.end())
    assert states["parameters after each step"][0] == "agree"
    assert "outside of graphs only" in states["parameters after each step"][1]
    assert states["steps inside graphs"][0] == "not checked"


def test_what_a_device_lacks_is_not_checked(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path, 2).wrap().optimizer().train(2)
    assert "writes through .data between steps" not in checks(run.end())
    run.add(0, DeviceRecord(0, "hpu:0", missing=["memory"]))
    states = checks(run)
    assert states["writes through .data between steps"][0] == "not checked"
    assert states["memory on the device"][0] == "not checked"
    assert "device time of each step" not in states
