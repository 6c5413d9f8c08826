"""Installs the schedulers: Debian's packages of Slurm, OpenMPI and podman, and Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec

PACKAGES = {
    "slurmctld": ("slurmctld", "slurmd", "slurm-client", "munge"),
    "mpirun": ("openmpi-bin",),
    "podman": ("podman", "crun"),
}
RAY = "ray[train]==2.60.0"


def main() -> int:
    """Installs what is missing. What cannot be installed is named; its tests are skipped."""
    failed = []
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    wanted = {name: packages for name, packages in PACKAGES.items() if shutil.which(name, path=path) is None}
    if wanted and _failed("apt-get", "update", "-qq"):
        failed.append("the list of packages")
    apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-yqq", "--no-install-recommends")
    failed += [name for name, packages in wanted.items() if _failed(*apt, *packages)]
    if find_spec("ray") is None and _failed(sys.executable, "-m", "pip", "install", "--quiet", RAY):
        failed.append("Ray")
    if failed:
        print(f"not installed: {', '.join(failed)}")
    return 0


def _failed(*command: str) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
