"""A virtual environment with one version of torch, without the CUDA libraries, and with ddpcheck from this checkout."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import requires
from pathlib import Path

from tests.compat.cuda_stubs import add_stubs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"
CONSTRAINTS = ROOT / "constraints.txt"
# What corpus and promise tests import beside ddpcheck.
_FOR_TESTS = (
    "pytest>=8",
    "hypothesis>=6.100",
    "expecttest>=0.2",
    "psutil>=5.9",
    "pyte>=0.8.2",
    "setuptools>=77",
)
# Installed separately or not at all: torch asks for the CUDA libraries and Triton by exact versions.
_NOT_WITH_TORCH = ("nvidia", "cuda", "triton", "pytorch-triton")
_READY = "ready.json"
# With the "t" of a free-threaded build.
_VERSION = "import sys, sysconfig; print(sysconfig.get_python_version() + sys.abiflags)"


def make_environment(torch: str, python: str) -> Path:
    """The folder of an environment with this version of torch; it is made where it does not exist."""
    version = _output(python, "-c", _VERSION)
    folder = FOLDER / f"torch-{torch}-python{version}"
    if (folder / _READY).exists():
        return folder
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", f"torch=={torch}"], check=True)
    [library] = folder.glob("lib/python*/site-packages/torch/lib")
    stubs = add_stubs(library)
    wanted = [*_requirements_of_torch(folder), *_requirements_of_ddpcheck(), *_FOR_TESTS]
    subprocess.run([*pip, "--constraint", _constraints(folder), *wanted], check=True)
    editable = ["--no-deps", "--no-build-isolation", "--editable", ROOT]
    subprocess.run([*pip, *editable], check=True)
    (folder / _READY).write_text(json.dumps({"torch": torch, "stubs": stubs}))
    return folder


def _requirements_of_torch(folder: Path) -> list[str]:
    """Those in Python."""
    program = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch') or []))"
    listed: list[str] = json.loads(_output(folder / "bin" / "python", "-c", program))
    return [each for each in listed if "extra ==" not in each and not each.startswith(_NOT_WITH_TORCH)]


def _requirements_of_ddpcheck() -> list[str]:
    return [each for each in requires("ddpcheck") or [] if "extra ==" not in each]


def _constraints(folder: Path) -> Path:
    """The versions that ddpcheck is tested with; torch is the one given, and numpy may have to be older for it."""
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    path = folder / "constraints.txt"
    path.write_text(
        "".join(line for line in lines if not line.startswith(("torch==", "numpy==", "setuptools==")))
    )
    return path


def _output(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout.strip()
