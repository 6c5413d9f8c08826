"""NVML without a GPU: the library of `libnvidia-ml.c`, compiled for a test and scripted by it."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("libnvidia-ml.c")


def compiled_into(folder: Path) -> Path:
    """Make libnvidia-ml.so.1 in a folder that goes on LD_LIBRARY_PATH."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", library, SOURCE], check=True)
    return folder


def environment(folder: Path, script: str) -> dict[str, str]:
    """What a process needs to meet the GPUs that the script tells of."""
    path = folder / "script"
    path.write_text(script)
    return {"LD_LIBRARY_PATH": str(folder), "DDPCHECK_TEST_NVML": str(path)}
