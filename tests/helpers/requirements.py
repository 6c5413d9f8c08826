"""What some tests need from the machine. Mark such a test with `@pytest.mark.needs("chromium")`.

A test whose need is not met is skipped, with the command that installs what is missing. With DDPCHECK_REQUIRE_ALL=1,
as in .ci/run, it fails instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache

from tests.helpers.chromium import browser
from tests.lab.lab import missing as missing_for_lab

REQUIRE_ALL = "DDPCHECK_REQUIRE_ALL"


def _chromium() -> str:
    return "" if browser() else "needs Chromium: apt-get install chromium"


def _gcc() -> str:
    return "" if shutil.which("gcc") else "needs a C compiler: apt-get install gcc"


def _gxx() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    return "" if found else "needs a C++ compiler: apt-get install g++"


def _tmpfs() -> str:
    if os.geteuid() != 0:
        return "needs root to mount a small file system: run the tests as root"
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
            return (
                "needs a small file system, which cannot be mounted here (a container without CAP_SYS_ADMIN?)"
            )
        subprocess.run(["umount", folder], check=True)
    return ""


def _library() -> str:
    from ddpcheck.probes.scan.library import scan_library

    return "" if scan_library() else "needs the compiled part: apt-get install gcc; rm -r .venv; make test"


def _prometheus() -> str:
    return "" if shutil.which("prometheus") else "needs Prometheus: apt-get install prometheus"


_CHECKS: dict[str, Callable[[], str]] = {
    "chromium": _chromium,
    "gcc": _gcc,
    "prometheus": _prometheus,
    # For the simulated accelerator.
    "g++": _gxx,
    # The compiled part of ddpcheck, which is optional for users.
    "library": _library,
    # A file system of limited size.
    "tmpfs": _tmpfs,
    # Hosts made of network namespaces, by `ip` and `tc`.
    "lab": missing_for_lab,
}


@cache
def missing(need: str) -> str:
    """Why a need is not met, and the command that helps; empty where it is met."""
    return _CHECKS[need]()


def all_required() -> bool:
    return os.environ.get(REQUIRE_ALL, "") not in ("", "0")
