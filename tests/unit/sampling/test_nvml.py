"""GPUs by the real pynvml, against a library with NVML's ABI that the test compiles and scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import nvml

# The library is loaded when a process starts, so each case has its own process.
READ = """
import json, sys, time
from ddpcheck.sampling.nvml import Gpus
gpus = Gpus()
gpus.open()
reads = [gpus.read()]
facts = gpus.describe()
for pause in map(float, sys.argv[1:]):
    time.sleep(pause)
    reads.append(gpus.read())
gpus.close()
print(json.dumps({"reads": reads, "facts": facts}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.compiled_into(tmp_path_factory.mktemp("nvml"))


def read(library: Path, script: str, *pauses: float) -> tuple[list[Any], dict[str, Any]]:
    """Several readings, and the description of the GPUs after the first."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, pauses)],
        env={**os.environ, **nvml.environment(library, script)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    return answer["reads"], answer["facts"]


def test_all_readings_of_a_gpu(library: Path) -> None:
    script = "devices 2\nlinks 4\nnvlink 1000 100000\npcie 500 1000000 64\nthrottle 4\nprocess 1 77 123456\n"
    reads, facts = read(library, script, 0.5)
    first, second = reads[0][1], reads[1][1]
    assert first["nvlink"] == [[0] * 4, [0] * 4]
    assert first["pcie"] == [0, 0]
    sent, received = second["nvlink"]
    # KiB become bytes, by link and direction; time passes between the readings of two links.
    assert all(0.5 <= bytes_ / (100_000 * 1024) < 1.5 for bytes_ in [*sent, *received])
    assert all(bytes_ % 1024 == 0 for bytes_ in sent)
    assert 0.5e6 <= second["pcie"][0] < 1.5e6
    assert (second["memory"], second["busy"], second["memory_busy"]) == (2 << 30, 51, 20)
    assert (second["clock"], second["memory_clock"]) == (1410, 1593)
    assert (second["throttled"], second["temperature"], second["power"]) == (4, 61, 300_000)
    assert second["pcie_link"] == [3, 8]
    assert second["processes"] == {"77": 123456}
    assert second["ecc"] == [0, 0]
    assert "lost" not in second
    gpu = facts["gpus"][1]
    assert (gpu["name"], gpu["uuid"], gpu["bus"]) == ("Test GPU", "GPU-0002", "00000000:02:00.0")
    assert (gpu["memory"], gpu["clock"], gpu["pcie"], gpu["nvlinks"]) == (
        80 << 30,
        1980,
        [5, 16],
        [0, 1, 2, 3],
    )
    assert gpu["unsupported"] == []
    assert facts["driver"] == "570.00.00"


def test_topology(library: Path) -> None:
    _, by_links = read(library, "devices 4\nlinks 4\n")
    # 0 and 1 are connected directly, 2 and 3 through a switch.
    assert by_links["topology"][0] == ["X", "NV4", "SYS", "SYS"]
    assert by_links["topology"][2] == ["SYS", "SYS", "X", "NV4"]
    _, by_bus = read(library, "devices 4\n")
    assert by_bus["topology"] == [
        ["X", "PIX", "SYS", "SYS"],
        ["PIX", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "PIX"],
        ["SYS", "SYS", "PIX", "X"],
    ]
    assert by_bus["p2p"][0] == [True, True, False, False]


def test_counters_wrap(library: Path) -> None:
    reads, _ = read(library, f"pcie {2**32 - 1000} 100000 32\n", 0.3, 0.3)
    totals = [gpus[0]["pcie"][0] for gpus in reads]
    assert totals[0] == 0
    assert 20_000 < totals[1] < totals[2] < 1_000_000


def test_counters_of_nvlink_5_are_in_bytes(library: Path) -> None:
    reads, _ = read(library, "links 1\nbytes_fields 1\nnvlink 1 1000\n", 0.4)
    [[sent], [received]] = reads[1][0]["nvlink"]
    assert 0.4 * 1024_000 <= sent < 4 * 1024_000
    assert sent % 1024 or received % 1024  # a byte's precision, not a KiB's


def test_unsupported_calls_are_not_repeated(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        f"devices 2\nlog {log}\nfail nvmlDeviceGetPowerUsage 3\nfail nvmlDeviceGetCurrentClocksEventReasons 13\n"
        "fail nvmlDeviceGetTotalEccErrors 4\nthrottle 8\n"
    )
    reads, facts = read(library, script, 0.0, 0.0, 0.0)
    asked = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert asked == {
        "nvmlDeviceGetPowerUsage": 2,
        "nvmlDeviceGetCurrentClocksEventReasons": 2,
        "nvmlDeviceGetTotalEccErrors": 2,
        "nvmlDeviceGetNvLinkState": 2,
        "field197": 2,
        "field198": 2,
    }
    assert {"ECC", "NVLink", "PCIe bytes", "power", "throttle reasons"} == set(
        facts["gpus"][0]["unsupported"]
    )
    # An older function for the reasons, and a measured rate instead of a counter.
    assert reads[3][0]["throttled"] == 8
    assert reads[3][0]["pcie_rate"] == [1_000_000, 2_000_000]
    assert "power" not in reads[3][0]


def test_a_temporary_error_is_retried(library: Path) -> None:
    reads, facts = read(library, "fail_until nvmlDeviceGetPowerUsage 10 2\n", 0.0, 0.0)
    assert [gpus[0].get("power") for gpus in reads] == [None, None, 300_000]
    assert "power" not in facts["gpus"][0]["unsupported"]


def test_a_persistent_error_is_not_retried(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    read(library, f"log {log}\npcie 0 0 64\nfail nvmlDeviceGetPowerUsage 10\n", *[0.0] * 8)
    assert log.read_text().count("nvmlDeviceGetPowerUsage") == 3


def test_a_gpu_is_lost(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    reads, _ = read(library, f"devices 3\nlog {log}\npcie 0 0 64\nlost 1 0.3\n", 0.4, 0.0, 0.0)
    assert reads[0][1]["memory"] == 2 << 30
    assert [gpus[1] for gpus in reads[1:]] == [{"lost": "GPU is lost"}] * 3
    assert all(gpus[other]["memory"] for gpus in reads for other in (0, 2))
    assert log.read_text().count(" 15\n") == 1


def test_mig_slices(library: Path) -> None:
    reads, facts = read(library, "devices 2\nmig 1 3\n")
    assert reads[0][1]["mig"] == [2 << 30] * 3
    assert "busy" not in reads[0][1]
    assert [each["uuid"] for each in facts["gpus"][1]["mig"]] == ["MIG-2001", "MIG-2002", "MIG-2003"]
    assert "mig" not in reads[0][0]


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("fail nvmlInitWithFlags 9\n", "NVML does not answer: Driver Not Loaded"),
        ("fail nvmlDeviceGetCount_v2 999\n", "NVML does not answer: Unknown Error"),
        ("devices 0\n", "no GPU"),
    ],
)
def test_a_driver_without_gpus(library: Path, script: str, note: str) -> None:
    reads, facts = read(library, script, 0.0)
    assert reads == [[], []]
    assert facts == {"note": note}


def test_an_unreachable_gpu_does_not_hide_others(library: Path) -> None:
    reads, facts = read(library, "devices 3\nfail_until nvmlDeviceGetHandleByIndex_v2 15 1\n")
    assert len(reads[0]) == len(facts["gpus"]) == 2
    assert facts["note"] == "GPU 0 cannot be reached: GPU is lost"


def test_no_driver() -> None:
    """As on most machines that run these tests."""
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, check=True, timeout=300
    )
    if json.loads(done.stdout)["facts"].get("driver"):
        pytest.skip("this machine has a driver")
    assert json.loads(done.stdout) == {"reads": [[]], "facts": {"note": "no NVIDIA driver on this node"}}
    loaded = "import sys\nsys.argv[1:] = []\n" + READ + "\nprint('pynvml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "False"
