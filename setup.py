"""Builds the one part of ddpcheck that is compiled, and lists the packages; pyproject.toml holds everything else.

The library is plain C that ctypes loads, so one wheel serves every version of Python.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """Names the library without the version of Python."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"


class AnyPythonWheel(bdist_wheel):
    """A wheel for any Python on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def packages() -> list[str]:
    """Each folder with a Python file. The symlinks to probes/ and reports/ need not exist."""
    names: set[str] = set()
    for top, package in (
        ("ddpcheck", "ddpcheck"),
        ("probes", "ddpcheck.probes"),
        ("reports", "ddpcheck.reports"),
    ):
        # `rglob` does not follow symlinks to folders.
        folders = {file.parent for file in Path(top).rglob("*.py")}
        names.update(".".join((package, *folder.relative_to(top).parts)) for folder in folders)
    return sorted(names)


setup(
    packages=packages(),
    ext_modules=[
        Extension(
            "ddpcheck.probes.scan._native",
            ["probes/scan/kernels.c", "probes/scan/scan.c"],
            # The order of additions is part of the result, so the compiler may not change it.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            # Without a compiler ddpcheck installs all the same, and sketches with torch's own kernels.
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
)
