"""Which hash is selected, what it imports, and how digests are copied from a device."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from ddpcheck.device_api import DeviceApi
from ddpcheck.probes.digest import make_digester
from ddpcheck.probes.digest.device_copy import DirectCopy, StreamCopy, copy_to_host
from tests.helpers.paths import ROOT


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPCHECK_HASH", raising=False)


def test_cpu_uses_xxh3_where_it_is_installed() -> None:
    xxhash = pytest.importorskip("xxhash")
    digester = make_digester("cpu")
    assert digester.algorithm == "xxh3-128"
    tensor = torch.arange(1000.0)
    assert len(digester.submit([tensor]).result()[0]) == xxhash.xxh3_128().digest_size


def test_cpu_falls_back_where_xxhash_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    digester = make_digester("cpu")
    assert digester.algorithm == "multilinear-128"
    ticket = digester.submit([torch.ones(3)])
    assert ticket.ready()
    assert len(ticket.result()[0]) == 16


def test_cpu_falls_back_where_xxhash_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", object())  # type: ignore[arg-type]
    assert make_digester("cpu").algorithm == "multilinear-128"


def test_the_environment_can_ask_for_the_gpus_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPCHECK_HASH", "multilinear")
    assert make_digester("cpu").algorithm == "multilinear-128"


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps", "hpu"])
def test_other_devices_use_multilinear(device_type: str) -> None:
    assert make_digester(device_type).algorithm == "multilinear-128"


def test_importing_the_room_imports_no_accelerator() -> None:
    script = """
import sys, torch
before = set(sys.modules)
import ddpcheck.probes.digest
ours = sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
assert ours == ["ddpcheck"], ours
assert "ddpcheck.probes.scan.triton_table" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True, timeout=300)


class Recorder:
    """A device module such as torch.cuda that records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.finished = False

    def Stream(self, device: torch.device) -> Recorder:
        self.calls.append("new side stream")
        return self

    def Event(self, enable_timing: bool = False) -> Recorder:
        return self

    def current_stream(self, device: torch.device) -> str:
        return "the user's"

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        self.calls.append("enter device")
        return contextlib.nullcontext()

    def stream(self, side: Any) -> contextlib.AbstractContextManager[None]:
        self.calls.append("enter side stream")
        return contextlib.nullcontext()

    def wait_stream(self, stream: str) -> None:
        self.calls.append(f"side waits for {stream}")

    def record(self, stream: Any) -> None:
        self.calls.append("record event")

    def query(self) -> bool:
        self.calls.append("query")
        return self.finished

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.finished = True


def test_a_copy_from_a_device_waits_only_when_its_result_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(tensor))
    streams = Recorder()
    api = DeviceApi("recorded", streams)
    lanes = torch.tensor([[1, -2], [3, 4]])
    copy = StreamCopy(lanes, api, pin_memory=False)
    assert streams.calls == [
        "new side stream",
        "side waits for the user's",
        "enter device",
        "enter side stream",
        "record event",
    ]
    assert kept[0] is lanes
    assert not copy.ready()
    assert "synchronize" not in streams.calls
    assert copy.rows() == [[1, -2], [3, 4]]
    assert copy.ready()
    StreamCopy(lanes, api, pin_memory=False)
    assert streams.calls.count("new side stream") == 1


def test_a_copy_that_is_complete_needs_no_further_call_into_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    streams = Recorder()
    copy = StreamCopy(torch.tensor([[1, 2]]), DeviceApi("recorded", streams), pin_memory=False)
    streams.finished = True
    assert copy.ready()
    streams.calls.clear()
    assert copy.ready()
    assert copy.rows() == [[1, 2]]
    assert streams.calls == []


def test_lanes_on_the_cpu_need_no_copy() -> None:
    copy = copy_to_host(torch.tensor([[5, 6]]))
    assert isinstance(copy, DirectCopy)
    assert copy.ready()
    assert copy.rows() == [[5, 6]]
