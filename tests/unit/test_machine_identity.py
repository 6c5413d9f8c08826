"""Which machine a process runs on, and which file systems belong to it alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ddpcheck.machine_identity import boot_id, host_name, is_on_this_machine


def test_the_host_is_that_of_the_launcher_on_the_same_machine() -> None:
    assert host_name("node7", boot_id()) == "node7"
    assert host_name("node7", "another boot") == socket.gethostname()
    # `ddpcheck env`: there is no launcher.
    assert host_name("", "") == socket.gethostname()


@pytest.mark.parametrize(
    ("kind", "local"),
    [("ext4", True), ("overlay", True), ("nfs4", False), ("fuse.sshfs", False), ("lustre", False)],
)
def test_file_systems(tmp_path: Path, kind: str, local: bool) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    row = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime master:1 - {kind} /dev/x rw\n"
    mounts.write_text("21 35 999:1 / /other rw - nfs4 server:/x rw\n" + row)
    assert is_on_this_machine(tmp_path, str(mounts)) is local


def test_unknown_file_systems_are_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text("21 35 999:1 / /other rw - ext4 /dev/x rw\n")
    assert not is_on_this_machine(tmp_path, str(tmp_path / "mountinfo"))
    assert not is_on_this_machine(tmp_path / "missing")
