"""The sampling thread: its lines, its limits, and that nothing it meets reaches the job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.sampling import sampler as module
from ddpcheck.sampling.sampler import Sampler


def lines(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.glob("node-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample_for(folder: Path, seconds: float, **options: Any) -> list[dict[str, Any]]:
    sampler = Sampler(folder, **options)
    sampler.start()
    sampler.meet(3, os.getpid())
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
    monkeypatch.setattr(module, "MOST_OF_A_CORE", 1.0)
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
        return []

    monkeypatch.setattr(module.Gpus, "read", burn)
    # 20 ms at 20 Hz would be 40 % of a core; 1 % leaves room for one in two seconds.
    assert sample_for(tmp_path, 1.0, hz=20)[-1]["samples"] <= 3


def test_a_failure_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> list[dict[str, Any]]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(module.Gpus, "read", fail)
    [fault] = sample_for(tmp_path, 0.1, hz=20)
    assert (fault["kind"], fault["probe"], fault["error"]) == (
        "fault",
        "sampler",
        "RuntimeError: no such luck",
    )


def test_a_driver_that_hangs_does_not_hold_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(module.Gpus, "open", lambda self: time.sleep(1.0))
    sampler = Sampler(tmp_path, 2.0)
    sampler.start()
    began = time.monotonic()
    sampler.close()
    assert time.monotonic() - began < 0.9


@pytest.mark.parametrize("started", [True, False])
def test_nothing_is_sampled_at_0_hz(tmp_path: Path, started: bool) -> None:
    sampler = Sampler(tmp_path, 0.0)
    if started:
        sampler.start()
    sampler.close()
    assert list(tmp_path.iterdir()) == []
