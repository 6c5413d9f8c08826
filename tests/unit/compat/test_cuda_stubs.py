"""Replacements of libraries that another one is linked with."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from tests.compat.cuda_stubs import add_stubs

NEEDED = """
int cudaThing(void);
int cudaOther(void);
int answer(void) { return cudaThing() + cudaOther(); }
"""
VERSIONS = "libcudathing.so.7 { global: cudaThing; };\n"


def compiled(path: Path, source: str, *options: str) -> None:
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "-",
        f"-Wl,-soname={path.name}",
        "-o",
        str(path),
        *options,
    ]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.mark.needs("gcc")
def test_a_library_is_replaced_with_all_its_functions(tmp_path: Path) -> None:
    """With and without symbol versions."""
    real, folder = tmp_path / "real", tmp_path / "lib"
    real.mkdir()
    folder.mkdir()
    script = tmp_path / "versions"
    script.write_text(VERSIONS)
    compiled(
        real / "libcudathing.so.7", "int cudaThing(void) { return 1; }", f"-Wl,--version-script={script}"
    )
    compiled(real / "libnvother.so.1", "int cudaOther(void) { return 2; }")
    linked = [
        str(real / "libcudathing.so.7"),
        str(real / "libnvother.so.1"),
        "-x",
        "none",
        "-Wl,-rpath,$ORIGIN",
    ]
    # Sources come before libraries.
    source = tmp_path / "torch.c"
    source.write_text(NEEDED)
    target = folder / "libtorch.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(target), str(source), *linked[:2], linked[-1]]
    subprocess.run(command, check=True)
    with pytest.raises(OSError, match=r"libcudathing\.so\.7"):
        ctypes.CDLL(str(target))
    assert add_stubs(folder) == ["libcudathing.so.7", "libnvother.so.1"]
    assert ctypes.CDLL(str(target)).answer() == 200
    assert add_stubs(folder) == []
