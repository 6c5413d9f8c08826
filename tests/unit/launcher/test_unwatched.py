"""Why a process that uses torch is not watched, by a copy of its folder in /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.config import Config
from ddpcheck.launcher.process.command import BOOTSTRAP, command_environment
from ddpcheck.launcher.process.process_table import descendants
from ddpcheck.launcher.unwatched import UnwatchedProcesses, isolates, why_unwatched
from ddpcheck.records.reasons import Unwatched

RUN = "/runs/job"


def process(proc: Path, *words: str, torch: bool = True, environ: dict[str, str] | None = None) -> Path:
    folder = proc / "7"
    folder.mkdir(parents=True)
    given = command_environment(Config(run_dir=RUN), {}) if environ is None else environ
    (folder / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    (folder / "maps").write_text("7f00-7f01 r-xp /lib/libtorch_cpu.so\n" if torch else "")
    (folder / "environ").write_bytes("\0".join(f"{k}={v}" for k, v in given.items()).encode())
    own = f"{os.getuid()}\t" * 4
    (folder / "status").write_text(f"Name:\tpython\nUid:\t{own}\nGid:\t0\t0\t0\t0\nGroups:\t\n")
    for path in (BOOTSTRAP, RUN):
        (folder / "root" / path.lstrip("/")).mkdir(parents=True)
    return folder / "root"


def reason(proc: Path) -> Unwatched | None:
    return why_unwatched(7, RUN, proc)


def test_a_process_that_is_watched(tmp_path: Path) -> None:
    process(tmp_path, "/usr/bin/python3", "train.py")
    assert reason(tmp_path) is None


def test_a_process_without_torch(tmp_path: Path) -> None:
    process(tmp_path, "python3", "-I", "tool.py", torch=False, environ={})
    assert reason(tmp_path) is None


def test_an_environment_that_was_reset(tmp_path: Path) -> None:
    process(tmp_path, "python3", "train.py", environ={"PATH": "/bin"})
    assert reason(tmp_path) is Unwatched.ENVIRONMENT


def test_options(tmp_path: Path) -> None:
    process(tmp_path, "python3", "-uI", "train.py")
    assert reason(tmp_path) is Unwatched.OPTIONS


def test_another_root_without_ddpcheck(tmp_path: Path) -> None:
    root = process(tmp_path, "python3", "train.py")
    (root / BOOTSTRAP.lstrip("/")).rmdir()
    assert reason(tmp_path) is Unwatched.NOT_INSTALLED


def test_another_root_without_the_run_folder(tmp_path: Path) -> None:
    root = process(tmp_path, "python3", "train.py")
    (root / RUN.lstrip("/")).rmdir()
    assert reason(tmp_path) is Unwatched.NO_FOLDER


@pytest.mark.parametrize(
    ("mode", "groups", "why"),
    [
        (0o700, "77", Unwatched.OTHER_USER),
        (0o755, "77", Unwatched.OTHER_USER),
        (0o1777, "77", None),
        (0o770, "77", Unwatched.OTHER_USER),
        (0o770, f"77 {os.getgid()}", None),
    ],
)
def test_another_user(tmp_path: Path, mode: int, groups: str, why: Unwatched | None) -> None:
    root = process(tmp_path, "python3", "train.py")
    (root / RUN.lstrip("/")).chmod(mode)
    other = "\t".join(["65534"] * 4)
    (tmp_path / "7" / "status").write_text(f"Uid:\t{other}\nGid:\t{other}\nGroups:\t{groups} \n")
    assert reason(tmp_path) is why


@pytest.mark.parametrize(
    ("name", "why"), [("podman", Unwatched.CONTAINER), ("/usr/bin/srun", Unwatched.REMOTE)]
)
def test_programs_that_start_processes_elsewhere(tmp_path: Path, name: str, why: Unwatched) -> None:
    process(tmp_path, name, "run", torch=False)
    assert reason(tmp_path) is why


def test_a_process_that_has_gone(tmp_path: Path) -> None:
    assert reason(tmp_path) is None


@pytest.mark.parametrize(
    ("words", "isolated"),
    [
        (["python"], False),
        (["python", "-I", "a.py"], True),
        (["python", "-X", "dev", "-E", "a.py"], True),
        (["python", "-W", "error", "a.py", "-I"], False),
        (["python", "-WError::S", "a.py"], False),
        (["python", "-m", "pkg", "-S"], False),
        (["python", "-c", "pass", "-I"], False),
        (["python", "--check-hash-based-pycs", "a.py"], False),
    ],
)
def test_options_of_an_interpreter(words: list[str], isolated: bool) -> None:
    assert isolates(words) is isolated


def test_each_reason_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two children that are named like a client, and one that is not."""
    client = tmp_path / "srun"
    client.symlink_to(sys.executable)
    sleep = ["-c", "import time; print(flush=True); time.sleep(60)"]
    children = [
        subprocess.Popen([str(path), *sleep], stdout=subprocess.PIPE)
        for path in (client, client, Path(sys.executable))
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        logged: list[Unwatched] = []
        # The process of the tests has further children.
        started = {child.pid for child in children}
        monkeypatch.setattr(
            "ddpcheck.launcher.unwatched.descendants",
            lambda pid: [process for process in descendants(pid) if process.pid in started],
        )
        monkeypatch.setattr("ddpcheck.launcher.unwatched.LOOK_SECONDS", (0.0,))
        processes = UnwatchedProcesses(str(tmp_path), lambda why, name: logged.append(why))
        processes.tick()
        processes.tick()
        assert logged == [Unwatched.REMOTE]
    finally:
        for child in children:
            os.kill(child.pid, 9)
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
