"""AMD GPUs by a package with the names, units and "N/A" values of `amdsmi`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.sampling import amd, nvml
from tests.helpers.paths import ROOT

PACKAGE = ROOT / "tests" / "helpers" / "amdsmi_package"
# The package is configured when it is imported, so each case has its own process.
READ = """
import json
from ddpcheck.sampling.nvml import open_gpus
gpus = open_gpus()
reads = [gpus.read() for _ in range(4)]
facts = gpus.describe()
gpus.close()
print(json.dumps({"type": type(gpus).__name__, "reads": reads, "facts": facts, "note": gpus.note}))
"""


def read(package: bool = True, **script: Any) -> dict[str, Any]:
    environment = {**os.environ, "DDPCHECK_TEST_AMDSMI": json.dumps(script)}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE)] if package else [])
    done = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


def test_all_readings_of_a_gpu() -> None:
    answer = read()
    assert answer["type"] == "AmdGpus"
    assert answer["reads"][0][1] == {
        "memory": 20 << 30,
        "busy": 71,
        "memory_busy": 12,
        "clock": 1900,
        "memory_clock": 1200,
        "temperature": 58,
        "power": 512_000,
        # Counted from the first reading.
        "ecc": [0, 0],
        "pcie_link": [4, 8],
        "processes": {"4001": 18 << 30},
    }
    facts = answer["facts"]
    gpu = facts["gpus"][1]
    assert (gpu["name"], gpu["bus"], gpu["memory"], gpu["clock"], gpu["pcie"]) == (
        "AMD Instinct MI300X",
        "0000:1c:00.0",
        192 << 30,
        2100,
        [5, 16],
    )
    assert (facts["driver"], facts["topology"]) == ("amdgpu 6.12.12", [["X", "XGMI"], ["XGMI", "X"]])
    assert facts["p2p"] == [[True, True], [True, True]]


def test_what_the_library_lacks_is_left_out_and_listed() -> None:
    answer = read(
        without=["amdsmi_get_power_info", "amdsmi_topo_get_link_type"], fail={"amdsmi_get_gpu_activity": 2}
    )
    last = answer["reads"][-1][0]
    assert not {"power", "busy", "memory_busy"} & set(last)
    assert last["memory"] == 20 << 30
    assert {"power", "utilisation"} <= set(answer["facts"]["gpus"][0]["unsupported"])
    assert answer["facts"]["topology"][0] == ["X", "?"]


def test_a_library_that_does_not_answer() -> None:
    answer = read(fail={"amdsmi_init": 34})
    # No driver here: the package alone does not make this an AMD machine.
    assert (answer["type"], answer["facts"]) == ("Gpus", {"note": nvml.NO_DRIVER})


def test_without_the_package_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "kfd"
    driver.touch()
    monkeypatch.setattr(amd, "DRIVER_FILE", driver)
    monkeypatch.setattr(nvml, "_LIBRARY", "libnvidia-ml-of-no-machine.so")
    gpus = nvml.open_gpus()
    assert gpus.describe() == {"note": amd.NOT_INSTALLED}
    assert gpus.read() == []
    assert amd.NOT_INSTALLED.startswith("AMD GPUs: install amdsmi")


def test_the_driver_answers_no_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "kfd"
    driver.touch()
    monkeypatch.setattr(amd, "DRIVER_FILE", driver)
    monkeypatch.setenv("DDPCHECK_TEST_AMDSMI", json.dumps({"fail": {"amdsmi_init": 34}}))
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    gpus = nvml.open_gpus()
    assert gpus.note.startswith("amdsmi does not answer: ")
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)


@pytest.mark.parametrize(
    ("speed", "generation"),
    [(32000, 5), (32, 5), (2.5, 1), (2500, 1), (16000, 4), ("N/A", None), (0, None), (7, None)],
)
def test_the_generation_of_pcie(speed: Any, generation: int | None) -> None:
    assert amd._generation(speed) == generation
