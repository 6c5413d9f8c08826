"""A copy of this machine's file system in which packages can be installed: an overlay, seen by this process only.

Nothing is copied and nothing of the machine changes. What is installed stays in the overlay's folder, so the next start
is fast. Processes inside have a namespace of process ids, so all daemons end with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# In the copy as they are on the machine.
_BOUND = ("/dev", "/sys")
INSIDE = "DDPCHECK_MACHINE_COPY"


class CannotCopy(Exception):
    """No overlay can be mounted here; the message says why."""


def enter_namespaces(arguments: Sequence[str]) -> None:
    """Replace this process by one with namespaces of its own for mounts and process ids, once."""
    if os.environ.get(INSIDE) == "1":
        return
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotCopy("a copy of the machine needs Linux and root")
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, *arguments]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})


@dataclass(frozen=True)
class MachineCopy:
    """The overlay. `root` is its mount point."""

    root: Path

    def run(self, command: Sequence[object], cwd: str | Path = "/") -> subprocess.CompletedProcess[bytes]:
        """Run a command inside, with this process's output."""
        inside = ["chroot", self.root, "env", f"--chdir={cwd}", *command]
        return subprocess.run(list(map(str, inside)), check=False)


def copy_machine(folder: Path, checkout: Path) -> MachineCopy:
    """The copy whose changes are in `folder`. The caller has namespaces of its own."""
    if os.stat(checkout).st_dev != os.stat("/").st_dev:
        raise CannotCopy(f"{checkout} is not on the file system of /, of which a copy is made")
    paths = {name: folder / name for name in ("upper", "work", "root")}
    for path in paths.values():
        path.mkdir(parents=True, exist_ok=True)
    root = paths["root"]
    try:
        layers = f"lowerdir=/,upperdir={paths['upper']},workdir={paths['work']}"
        _mount("-t", "overlay", "-o", layers, "overlay", root)
        for each in _BOUND:
            _mount("--rbind", each, root / each.lstrip("/"))
        _mount("-t", "proc", "proc", root / "proc")
        for each in ("tmp", "run"):
            _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / each)
    except subprocess.CalledProcessError as error:
        raise CannotCopy(f"no overlay can be mounted here: {error.stderr.decode().strip()}") from error
    # Packages must not start their services.
    policy = root / "usr" / "sbin" / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    return MachineCopy(root)


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)
