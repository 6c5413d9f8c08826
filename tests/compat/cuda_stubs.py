"""Replaces the CUDA libraries that a build of torch is linked with, which take gigabytes and which no job here uses.

Only torch itself is downloaded. `import torch` needs each library by its name, with all functions that torch calls. The
replacements have these functions, and each returns `cudaErrorNoDevice`, so torch runs as on a machine without a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# cudaErrorNoDevice. An error for the other libraries too: 0 is success everywhere.
_RESULT = 100
_OF_CUDA = ("libcu", "libnccl", "libnv")
_FILE_OF_VERSIONS = re.compile(r"\bFile: (\S+)")
_VERSION = re.compile(r"\bName: (\S+)\s+Flags:")


@dataclass
class _Library:
    """Symbols by their version; those without one by an empty string."""

    symbols: dict[str, set[str]] = field(default_factory=dict)


def add_stubs(folder: Path) -> list[str]:
    """Create the libraries of CUDA that those in `folder` need and that are not there; returns their names."""
    libraries = sorted(path for path in folder.glob("*.so*") if path.is_file())
    needed = {name for path in libraries for name in _needed(path) if name.startswith(_OF_CUDA)}
    missing = {name: _Library() for name in sorted(needed - {path.name for path in libraries})}
    if missing:
        # A reference without a version is satisfied by any library.
        _collect(libraries, missing, next(iter(missing)))
    for name, library in missing.items():
        _compile(folder / name, library.symbols)
    return list(missing)


def _needed(path: Path) -> list[str]:
    lines = _output("readelf", "--dynamic", "--wide", path).splitlines()
    return [line.partition("[")[2].rstrip("] ") for line in lines if "(NEEDED)" in line]


def _collect(libraries: Iterable[Path], missing: Mapping[str, _Library], first: str) -> None:
    defined: set[str] = set()
    others: set[str] = set()
    for path in libraries:
        files = _files_by_version(path)
        for line in _output("nm", "--dynamic", path).splitlines():
            # The address, which undefined symbols do not have, the kind and the name.
            kind, _, symbol = line[17:].partition(" ")
            name, _, version = symbol.partition("@")
            if kind != "U":
                defined.add(name)
            elif not version:
                others.add(name)
            elif files.get(version) in missing:
                missing[files[version]].symbols.setdefault(version, set()).add(name)
    missing[first].symbols[""] = others - defined


def _files_by_version(path: Path) -> dict[str, str]:
    """From each version of symbols that a library refers to, to the library that has to define it."""
    files: dict[str, str] = {}
    file = ""
    for line in _output("readelf", "--version-info", "--wide", path).splitlines():
        if found := _FILE_OF_VERSIONS.search(line):
            file = found[1]
        elif found := _VERSION.search(line):
            files[found[1]] = file
    return files


def _compile(path: Path, symbols: Mapping[str, set[str]]) -> None:
    names = sorted(set().union(*symbols.values()))
    lines = [f"int stub(void) {{ return {_RESULT}; }}\n"]
    lines += [
        f'int stub_{number}(void) __asm__("{name}") __attribute__((alias("stub")));\n'
        for number, name in enumerate(names)
    ]
    versions = [
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(of_version))} }};\n"
        for version, of_version in symbols.items()
        if version
    ]
    script = path.with_suffix(".map")
    script.write_text("".join(versions))
    options = ["-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname={path.name}"]
    options += [f"-Wl,--version-script={script}"] if versions else []
    command = ["gcc", *options, "-o", str(path)]
    subprocess.run(command, input="".join(lines), text=True, check=True, capture_output=True)
    script.unlink()


def _output(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
