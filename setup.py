"""Builds the one part of ddpcheck that is compiled; pyproject.toml holds everything else.

The library is plain C that ctypes loads, so one wheel serves every version of Python.
"""

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


setup(
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
