"""Compiles the native part of the simulated accelerator, once per version of torch and of the sources."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

NATIVE = Path(__file__).parent / "native"
BUILDS = Path(__file__).parents[2] / "build" / "accelerator"
MODULE = "_sim"
_FLAGS = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-DUSE_C10D_GLOO",
    f"-DTORCH_EXTENSION_NAME={MODULE}",
]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def library() -> Path:
    """The compiled module; compiles it if there is none yet. Several processes may ask at the same time."""
    sources = sorted(NATIVE.glob("*.cpp"))
    folder = BUILDS / _key([*sources, *NATIVE.glob("*.h")])
    target = folder / f"{MODULE}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(sources, folder, target)
    return target


def _key(files: list[Path]) -> str:
    content = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        content.update(file.read_bytes())
    content.update(" ".join(_FLAGS).encode())
    version = f"{torch.__version__}-python{sys.version_info.major}.{sys.version_info.minor}"
    return f"{version}-{content.hexdigest()}"


def _compile(sources: list[Path], folder: Path, target: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("the simulated accelerator needs a C++ compiler: install g++, or set CXX")
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    # System folders: torch's headers have warnings of their own.
    command = [found, *_FLAGS, *(part for path in includes for part in ("-isystem", path))]
    # One translation unit: nearly all of the time goes to torch's headers, which are then read once.
    unit = folder / f"{MODULE}.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
    libraries = [
        part for path in cpp_extension.library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    names = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-lpthread"]
    unfinished = target.with_suffix(".part")
    _run([*command, "-shared", str(unit), *libraries, *names, "-o", str(unfinished)])
    unfinished.rename(target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(library())
