"""NVML without a GPU: compiles `libnvidia-ml.c`, whose GPUs are described by a script of the test."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("libnvidia-ml.c")


def compiled_into(folder: Path) -> Path:
    """Build libnvidia-ml.so.1 in a folder for LD_LIBRARY_PATH."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", library, SOURCE], check=True)
    return folder


def environment(folder: Path, script: str) -> dict[str, str]:
    """Variables that make a process use the library, with the GPUs that `script` describes."""
    path = folder / "script"
    path.write_text(script)
    return {"LD_LIBRARY_PATH": str(folder), "DDPCHECK_TEST_NVML": str(path)}
