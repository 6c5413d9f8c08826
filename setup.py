"""Builds the one part of ddpcheck that is compiled; pyproject.toml holds everything else."""

from setuptools import Extension, setup

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
    ]
)
