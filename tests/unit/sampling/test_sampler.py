"""The sampling thread: lines, limits and errors."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.node_log import NodeLog
from ddpcheck.sampling import host, interfaces, nvml
from ddpcheck.sampling import host as cpu
from ddpcheck.sampling import interfaces as interface_facts
from ddpcheck.sampling import sampler as module
from ddpcheck.sampling.sampler import Sampler, merge_samples


def lines(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of the node log."""
    return [
        json.loads(line) for path in folder.glob("node-*.jsonl") for line in path.read_text().split("\n")[:-1]
    ]


def samples_in(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "sample"]


def faults_in(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "fault"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sample_until(
    folder: Path, condition: Callable[[list[dict[str, Any]]], bool], **options: Any
) -> list[dict[str, Any]]:
    """The log of a sampler that is closed as soon as `condition` holds for the log."""
    sampler = Sampler(folder, **options)
    sampler.start()
    sampler.add_rank(3, os.getpid())
    wait_until(lambda: condition(lines(folder)))
    sampler.close()
    return lines(folder)


def test_log_has_facts_then_samples_then_cost(tmp_path: Path) -> None:
    logged = sample_until(tmp_path, lambda rows: len(samples_in(rows)) > 3, hz=20)
    assert logged[0]["kind"] == "hardware"
    assert logged[-1]["kind"] == "sampled"
    samples = logged[1:-1]
    assert {line["kind"] for line in samples} == {"sample"}
    assert len(samples) == logged[-1]["samples"] >= 3
    assert 0 < logged[-1]["cpu_seconds"] < logged[-1]["seconds"]
    assert all(line["pid"] == os.getpid() for line in logged)
    assert [row["name"] for row in logged[0]["interfaces"]] == list(samples[0]["interfaces"])
    assert samples[-1]["ranks"]["3"][0] == os.getpid()
    assert [line["time"] for line in samples] == sorted(line["time"] for line in samples)


def test_downsampling_keeps_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CPU_SHARE", 1.0)
    logged = sample_until(tmp_path, lambda rows: len(samples_in(rows)) >= 16, hz=200, lines=4)
    samples = samples_in(logged)
    taken = logged[-1]["samples"]
    assert taken > 40
    # Four lines of one sample each, four of two, four of four, …
    assert len(samples) <= 4 * (taken.bit_length() + 1)
    assert samples[-1]["interfaces"]["lo"][0] >= samples[-2]["interfaces"]["lo"][0]


def test_the_pause_after_an_expensive_sample_limits_the_cpu_share(tmp_path: Path) -> None:
    sampling = module._Sampling(NodeLog(tmp_path), 20.0, 10, host.RankProcesses(), threading.Event())
    assert sampling._pause(0.0) == 1 / 20
    assert sampling._pause(0.02) == pytest.approx(0.02 / module.MAX_CPU_SHARE)
    sampling._sources.close()


@pytest.fixture
def unlimited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples at the requested rate, however busy the machine is."""
    monkeypatch.setattr(module, "MAX_CPU_SHARE", 1.0)


# Sources that may fail, by their names in the log.
SOURCES: dict[str, tuple[object, str]] = {
    "interfaces": (interfaces.Interfaces, "read"),
    "cpu": (cpu.Cpu, "read"),
    "memory": (cpu, "memory_used"),
    "ranks": (host.RankProcesses, "read"),
    "infiniband": (interfaces.InfinibandPorts, "read"),
    "gpus": (nvml.Gpus, "read"),
}


@pytest.mark.usefixtures("unlimited_rate")
@pytest.mark.parametrize("source", SOURCES)
def test_a_failed_source_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It works twice and then fails."""
    (owner, name), calls = SOURCES[source], []

    def fail(*arguments: object) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("no such luck")
        return KNOWN[source]

    monkeypatch.setattr(owner, name, fail)
    logged = sample_until(tmp_path, lambda rows: bool(faults_in(rows)) and len(samples_in(rows)) > 4, hz=20)
    faults = faults_in(logged)
    assert [(line["probe"], line["entry"], line["error"]) for line in faults] == [
        ("sampler", source, "RuntimeError: no such luck")
    ]
    assert len(calls) == 3
    samples = samples_in(logged)
    assert (logged[0]["kind"], logged[-1]["kind"]) == ("hardware", "sampled")
    assert source in samples[1]
    assert len(samples) > 3
    others = {"interfaces", "cpu", "memory", "ranks"} - {source}
    assert all(others <= set(sample) and source not in sample for sample in samples[2:])


KNOWN = {
    "interfaces": {"lo": [1] * 6},
    "cpu": 1.0,
    "memory": 1,
    "ranks": {"3": [1, 1, 1, 1]},
    "infiniband": {"mlx5_0/1": [1, 1, 1]},
    "gpus": [{"memory": 1}],
}


@pytest.mark.usefixtures("unlimited_rate")
@pytest.mark.parametrize(
    ("owner", "name", "source"),
    [
        (interface_facts, "describe", "interfaces described"),
        (interfaces.InfinibandPorts, "__init__", "infiniband"),
        (nvml.Gpus, "open", "gpus"),
        (nvml.Gpus, "describe", "gpus"),
        (cpu.Cpu, "__init__", "cpu"),
    ],
)
def test_errors_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, source: str
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError(name)

    monkeypatch.setattr(owner, name, fail)
    logged = sample_until(tmp_path, lambda rows: bool(faults_in(rows)) and len(samples_in(rows)) >= 2, hz=20)
    assert [(line["entry"], line["error"]) for line in logged if line["kind"] == "fault"] == [
        (source, f"KeyError: '{name}'")
    ]
    assert logged[-1]["samples"] >= 2


@pytest.mark.usefixtures("unlimited_rate")
def test_a_rank_whose_process_exits(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    child = subprocess.Popen(["sleep", "600"])
    sampler.add_rank(5, child.pid)
    sampler.add_rank(3, os.getpid())
    wait_until(lambda: any({"3", "5"} == set(row["ranks"]) for row in samples_in(lines(tmp_path))))
    child.kill()
    child.wait()
    wait_until(lambda: set(samples_in(lines(tmp_path))[-1]["ranks"]) == {"3"})
    sampler.close()
    logged = lines(tmp_path)
    ranks = [set(line["ranks"]) for line in logged if line["kind"] == "sample"]
    assert {"3", "5"} in ranks
    assert ranks[-1] == {"3"}
    assert not faults_in(logged)


@pytest.mark.usefixtures("unlimited_rate")
def test_a_driver_that_stops_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sources are sampled meanwhile; GPUs are sampled again after the driver has recovered."""
    monkeypatch.setattr(nvml, "ANSWER_SECONDS", 0.05)
    silent = threading.Event()
    calls = []

    def read(self: object) -> list[dict[str, int]]:
        calls.append(1)
        if len(calls) == 4:
            silent.wait(60)
        return [{"memory": len(calls)}]

    monkeypatch.setattr(nvml.Gpus, "read", read)
    monkeypatch.setattr(nvml.Gpus, "describe", lambda self: {"gpus": [{}]})

    def has_recovered(rows: list[dict[str, Any]]) -> bool:
        reported = [bool(row.get("gpus")) for row in samples_in(rows)]
        if reported.count(False) >= 3:
            silent.set()
        return silent.is_set() and reported[-1]

    logged = sample_until(tmp_path, has_recovered, hz=20)
    reported = [bool(row.get("gpus")) for row in samples_in(logged)]
    assert reported[0]
    assert reported[-1]
    assert reported.count(False) >= 3
    assert not faults_in(logged)


@pytest.mark.usefixtures("unlimited_rate")
def test_a_driver_that_never_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "ANSWER_SECONDS", 0.05)
    hung = threading.Event()
    calls = []

    def read(self: object) -> list[dict[str, int]]:
        calls.append(1)
        if len(calls) == 3:
            hung.wait(120)
        return [{"memory": 1}]

    monkeypatch.setattr(nvml.Gpus, "read", read)
    monkeypatch.setattr(nvml.Gpus, "describe", lambda self: {"gpus": [{}]})
    # Closing does not wait for the call that hangs.
    logged = sample_until(tmp_path, lambda rows: len(samples_in(rows)) > 5, hz=20)
    hung.set()
    [fault] = faults_in(logged)
    assert (fault["entry"], fault["error"][:26]) == ("gpus", "NVML has not answered for ")
    samples = samples_in(logged)
    assert [bool(line.get("gpus")) for line in samples][:2] == [True, True]
    assert len(samples) > 5
    assert logged[-1]["kind"] == "sampled"


@pytest.mark.usefixtures("unlimited_rate")
def test_a_driver_that_starts_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "ANSWER_SECONDS", 0.05)
    started = threading.Event()
    monkeypatch.setattr(nvml.Gpus, "open", lambda self: started.wait(60))
    monkeypatch.setattr(nvml.Gpus, "read", lambda self: [{"memory": 1}])
    monkeypatch.setattr(nvml.Gpus, "describe", lambda self: {"gpus": [{"index": 0}]})

    def has_answered(rows: list[dict[str, Any]]) -> bool:
        if samples_in(rows):
            started.set()
        return any(row.get("gpus") for row in samples_in(rows)[-1:])

    logged = sample_until(tmp_path, has_answered, hz=20)
    facts = [line["nvml"] for line in logged if line["kind"] == "hardware"]
    assert facts == [{"note": "NVML has not answered"}, {"gpus": [{"index": 0}]}]
    reported = [bool(line.get("gpus")) for line in logged if line["kind"] == "sample"]
    assert (reported[0], reported[-1]) == (False, True)
    assert not faults_in(logged)


def test_a_hanging_driver_does_not_block_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(nvml.Gpus, "open", lambda self: hung.wait(120))
    logged = sample_until(tmp_path, lambda rows: bool(rows), hz=2.0)
    hung.set()
    assert logged[0]["nvml"] == {"note": "NVML has not answered"}
    assert logged[-1]["kind"] == "sampled"


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / f"node-{os.uname().nodename}.jsonl").mkdir()
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    wait_until(lambda: sampler.unwritten >= 4)
    sampler.close()


def test_no_samples_on_a_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 1 << 60)
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    wait_until(lambda: sampler.unwritten >= 3)
    sampler.close()
    assert list(tmp_path.iterdir()) == []


def test_thread_limit_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    sampler.start()
    sampler.close()
    assert [line["entry"] for line in lines(tmp_path)] == ["thread"]


@pytest.mark.parametrize("started", [True, False])
def test_nothing_is_sampled_at_0_hz(tmp_path: Path, started: bool) -> None:
    sampler = Sampler(tmp_path, 0.0)
    if started:
        sampler.start()
    sampler.close()
    assert list(tmp_path.iterdir()) == []


def test_merged_samples_keep_latest_totals_and_extremes() -> None:
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


def test_merged_gpu_samples() -> None:
    early = {"gpus": [{"clock": 900, "temperature": 80, "throttled": 4, "pcie": [1, 1], "power": 5}]}
    late = {"gpus": [{"clock": 1400, "temperature": 60, "throttled": 8, "pcie": [9, 9]}]}
    expected = {"clock": 900, "temperature": 80, "throttled": 12, "pcie": [9, 9]}
    assert merge_samples(early, late) == {"gpus": [expected]}
    assert merge_samples(early, {"gpus": [{"lost": "gone"}]}) == {"gpus": [{"lost": "gone"}]}


def test_missing_values_are_kept() -> None:
    early = {"time": 1.0, "cpu": 5.0, "gpus": [{"clock": 900}]}
    assert merge_samples(early, {"time": 2.0}) == {**early, "time": 2.0}


def test_a_restarted_rank_is_not_merged() -> None:
    early, late = {"ranks": {"0": [5, 900, 1, 1]}}, {"ranks": {"0": [6, 100, 0, 0], "1": [7, 1, 0, 0]}}
    assert merge_samples(early, late) == late
