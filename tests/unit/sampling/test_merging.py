"""Several samples made one: nothing that was notable is lost."""

from __future__ import annotations

from ddpcheck.sampling.sampler import merge_samples


def test_totals_are_the_latest_and_gauges_the_worst() -> None:
    early = {
        "time": 1.0,
        "cpu": 90.0,
        "memory": 7,
        "interfaces": {"lo": [1, 1]},
        "ranks": {"0": [5, 900, 1, 1]},
    }
    late = {
        "time": 2.0,
        "cpu": 10.0,
        "memory": 9,
        "interfaces": {"lo": [4, 4]},
        "ranks": {"0": [5, 800, 2, 2]},
    }
    assert merge_samples(early, late) == {**late, "cpu": 90.0, "ranks": {"0": [5, 900, 2, 2]}}


def test_gpus() -> None:
    early = {"gpus": [{"clock": 900, "temperature": 80, "throttled": 4, "pcie": [1, 1], "power": 5}]}
    late = {"gpus": [{"clock": 1400, "temperature": 60, "throttled": 8, "pcie": [9, 9]}]}
    expected = {"clock": 900, "temperature": 80, "throttled": 12, "pcie": [9, 9]}
    assert merge_samples(early, late) == {"gpus": [expected]}
    assert merge_samples(early, {"gpus": [{"lost": "gone"}]}) == {"gpus": [{"lost": "gone"}]}


def test_what_is_not_told_stays() -> None:
    early = {"time": 1.0, "cpu": 5.0, "gpus": [{"clock": 900}]}
    assert merge_samples(early, {"time": 2.0}) == {**early, "time": 2.0}


def test_a_rank_that_started_again_is_another_process() -> None:
    early, late = {"ranks": {"0": [5, 900, 1, 1]}}, {"ranks": {"0": [6, 100, 0, 0], "1": [7, 1, 0, 0]}}
    assert merge_samples(early, late) == late
