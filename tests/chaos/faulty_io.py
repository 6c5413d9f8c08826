"""Compiles the library that makes writes late or fail, and steps the clock; see faulty_io.c."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


@contextmanager
def preloaded() -> Iterator[None]:
    """All processes that are started meanwhile load the library. Without a compiler, none does.

    The fork server of the tests has to be among them: a job whose LD_PRELOAD differs imports torch by itself.
    """
    if not shutil.which("gcc"):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="chaos-library-") as folder:
        library = Path(folder) / "faulty_io.so"
        command = ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        os.environ["LD_PRELOAD"] = str(library)
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"]


def missing() -> str:
    return "" if "faulty_io" in os.environ.get("LD_PRELOAD", "") else "needs gcc"
