"""Identity of the machine and of the namespaces that this process is in: ranks and launcher may be in containers.

Standard library only: ranks import this module.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
_MOUNTS_FILE = "/proc/self/mountinfo"
# File systems of this machine alone: on others, access to a shared mapping can kill the process.
_LOCAL_FILE_SYSTEMS = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)


def boot_id() -> str:
    """Equal for all processes of one machine, in any container; empty if the kernel does not show it."""
    try:
        return Path(_BOOT_ID_FILE).read_text().strip()
    except OSError:
        return ""


def host_name(launcher_host: str, launcher_boot: str) -> str:
    """The host of this rank: that of its launcher if both run on one machine, whatever its container is called."""
    here = bool(launcher_boot) and boot_id() == launcher_boot
    return launcher_host if here else socket.gethostname()


def pid_namespace() -> str:
    """The namespace in which the process ids of this process count; empty if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_on_this_machine(folder: Path, mounts: str = _MOUNTS_FILE) -> bool:
    """Whether a folder is on a file system that no other machine uses. False if that is not known."""
    try:
        status = os.stat(folder)
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
    kinds = {line.partition(" - ")[2].split(" ", 1)[0] for line in lines if line.split(" ", 3)[2] == device}
    return bool(kinds) and kinds <= _LOCAL_FILE_SYSTEMS
