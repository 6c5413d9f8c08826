"""The sampling thread: its lines, its limits, and that nothing it meets reaches the job."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.sampling import gpu_source, host, infiniband, interfaces, nvml
from ddpcheck.sampling import host as cpu
from ddpcheck.sampling import interfaces as interface_facts
from ddpcheck.sampling import sampler as module
from ddpcheck.sampling.sampler import Sampler


def lines(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.glob("node-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample_for(folder: Path, seconds: float, **options: Any) -> list[dict[str, Any]]:
    sampler = Sampler(folder, **options)
    sampler.start()
    sampler.add_rank(3, os.getpid())
    time.sleep(seconds)
    sampler.close()
    return lines(folder)


def test_facts_then_samples_then_the_effort(tmp_path: Path) -> None:
    found = sample_for(tmp_path, 0.5, hz=20)
    assert found[0]["kind"] == "hardware"
    assert found[-1]["kind"] == "sampled"
    samples = found[1:-1]
    assert {line["kind"] for line in samples} == {"sample"}
    assert len(samples) == found[-1]["samples"] >= 3
    assert 0 < found[-1]["cpu_seconds"] < found[-1]["seconds"]
    assert all(line["pid"] == os.getpid() for line in found)
    assert [row["name"] for row in found[0]["interfaces"]] == list(samples[0]["interfaces"])
    assert samples[-1]["ranks"]["3"][0] == os.getpid()
    assert [line["time"] for line in samples] == sorted(line["time"] for line in samples)


def test_a_long_job_takes_few_lines_and_loses_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CPU_SHARE", 1.0)
    found = sample_for(tmp_path, 1.5, hz=200, lines=4)
    samples = [line for line in found if line["kind"] == "sample"]
    taken = found[-1]["samples"]
    assert taken > 40
    # Four lines of one sample each, four of two, four of four, …
    assert len(samples) <= 4 * (taken.bit_length() + 1)
    assert samples[-1]["interfaces"]["lo"][0] >= samples[-2]["interfaces"]["lo"][0]


def test_costly_samples_come_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def burn(self: object) -> list[dict[str, Any]]:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return [{"memory": 1}]

    monkeypatch.setattr(nvml.Gpus, "read", burn)
    # 20 ms at 20 Hz would be 40 % of a core; 1 % leaves room for one in two seconds.
    assert sample_for(tmp_path, 1.0, hz=20)[-1]["samples"] <= 3


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as asked, however busy the machine is."""
    monkeypatch.setattr(module, "MAX_CPU_SHARE", 1.0)


# What may fail, by what it is called in the log; and the keys that the samples then lack.
SOURCES: dict[str, tuple[object, str]] = {
    "interfaces": (interfaces.Interfaces, "read"),
    "cpu": (cpu.Cpu, "read"),
    "memory": (cpu, "memory_used"),
    "ranks": (host.RankProcesses, "read"),
    "infiniband": (infiniband.InfinibandPorts, "read"),
    "gpus": (nvml.Gpus, "read"),
}


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_fails_is_left_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It answers twice, so that it is known, and never again."""
    (place, name), calls = SOURCES[source], []

    def fail(*arguments: object) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("no such luck")
        return KNOWN[source]

    monkeypatch.setattr(place, name, fail)
    found = sample_for(tmp_path, 0.6, hz=20)
    faults = [line for line in found if line["kind"] == "fault"]
    assert [(line["probe"], line["entry"], line["error"]) for line in faults] == [
        ("sampler", source, "RuntimeError: no such luck")
    ]
    assert len(calls) == 3
    samples = [line for line in found if line["kind"] == "sample"]
    assert (found[0]["kind"], found[-1]["kind"]) == ("hardware", "sampled")
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


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("place", "name", "source"),
    [
        (interface_facts, "describe", "interfaces described"),
        (infiniband.InfinibandPorts, "__init__", "infiniband"),
        (nvml.Gpus, "open", "gpus"),
        (nvml.Gpus, "describe", "gpus"),
        (cpu.Cpu, "__init__", "cpu"),
    ],
)
def test_what_fails_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, source: str
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError(name)

    monkeypatch.setattr(place, name, fail)
    found = sample_for(tmp_path, 0.3, hz=20)
    assert [(line["entry"], line["error"]) for line in found if line["kind"] == "fault"] == [
        (source, f"KeyError: '{name}'")
    ]
    assert found[-1]["samples"] >= 2


@pytest.mark.usefixtures("unhurried")
def test_a_rank_whose_process_vanishes(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    child = subprocess.Popen(["sleep", "0.3"])
    sampler.add_rank(5, child.pid)
    sampler.add_rank(3, os.getpid())
    time.sleep(0.2)
    child.wait()
    time.sleep(0.3)
    sampler.close()
    found = lines(tmp_path)
    ranks = [set(line["ranks"]) for line in found if line["kind"] == "sample"]
    assert {"3", "5"} in ranks
    assert ranks[-1] == {"3"}
    assert not [line for line in found if line["kind"] == "fault"]


@pytest.mark.usefixtures("unhurried")
def test_a_driver_that_stops_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is sampled on, and what it tells after all counts again."""
    monkeypatch.setattr(gpu_source, "ANSWER_SECONDS", 0.05)
    silent = threading.Event()
    calls = []

    def read(self: object) -> list[dict[str, int]]:
        calls.append(1)
        if len(calls) == 4:
            silent.wait(0.5)
        return [{"memory": len(calls)}]

    monkeypatch.setattr(nvml.Gpus, "read", read)
    monkeypatch.setattr(nvml.Gpus, "describe", lambda self: {"gpus": [{}]})
    found = sample_for(tmp_path, 1.2, hz=20)
    told = [bool(line.get("gpus")) for line in found if line["kind"] == "sample"]
    assert told[0]
    assert told[-1]
    assert told.count(False) >= 3
    assert not [line for line in found if line["kind"] == "fault"]


@pytest.mark.usefixtures("unhurried")
def test_a_driver_that_never_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_source, "ANSWER_SECONDS", 0.05)
    hung = threading.Event()
    calls = []

    def read(self: object) -> list[dict[str, int]]:
        calls.append(1)
        if len(calls) == 3:
            hung.wait(20)
        return [{"memory": 1}]

    monkeypatch.setattr(nvml.Gpus, "read", read)
    monkeypatch.setattr(nvml.Gpus, "describe", lambda self: {"gpus": [{}]})
    began = time.monotonic()
    found = sample_for(tmp_path, 0.8, hz=20)
    assert time.monotonic() - began < 5
    hung.set()
    [fault] = [line for line in found if line["kind"] == "fault"]
    assert (fault["entry"], fault["error"][:26]) == ("gpus", "NVML has not answered for ")
    samples = [line for line in found if line["kind"] == "sample"]
    assert [bool(line.get("gpus")) for line in samples][:2] == [True, True]
    assert len(samples) > 5
    assert found[-1]["kind"] == "sampled"


@pytest.mark.usefixtures("unhurried")
def test_a_driver_that_takes_its_time_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_source, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(nvml.Gpus, "open", lambda self: time.sleep(0.3))
    monkeypatch.setattr(nvml.Gpus, "read", lambda self: [{"memory": 1}])
    monkeypatch.setattr(nvml.Gpus, "describe", lambda self: {"gpus": [{"index": 0}]})
    found = sample_for(tmp_path, 1.0, hz=20)
    facts = [line["nvml"] for line in found if line["kind"] == "hardware"]
    assert facts == [{"note": "NVML has not answered"}, {"gpus": [{"index": 0}]}]
    told = [bool(line.get("gpus")) for line in found if line["kind"] == "sample"]
    assert (told[0], told[-1]) == (False, True)
    assert not [line for line in found if line["kind"] == "fault"]


def test_a_driver_that_hangs_does_not_hold_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(nvml.Gpus, "open", lambda self: hung.wait(20))
    began = time.monotonic()
    found = sample_for(tmp_path, 0.1, hz=2.0)
    assert time.monotonic() - began < 2.5
    hung.set()
    # What else there is to know is known, and of the driver what there is to say.
    assert found[0]["nvml"] == {"note": "NVML has not answered"}
    assert found[-1]["kind"] == "sampled"


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / f"node-{os.uname().nodename}.jsonl").mkdir()
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    time.sleep(0.3)
    sampler.close()
    assert sampler.unwritten >= 4


def test_what_is_left_of_a_full_disk_is_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 1 << 60)
    sampler = Sampler(tmp_path, 20)
    sampler.start()
    time.sleep(0.2)
    sampler.close()
    assert list(tmp_path.iterdir()) == []
    assert sampler.unwritten >= 3


def test_no_room_for_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
