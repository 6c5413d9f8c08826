"""Program lookup, environment, exit status and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.config import ENV_CONFIG, Config
from ddpcheck.errors import CommandNotStarted
from ddpcheck.launcher.process.command import (
    BOOTSTRAP,
    ExitStatus,
    command_environment,
    find_program,
    prefixed_python_path,
)
from ddpcheck.launcher.process.signals import GroupSignalDetector, SignalInbox, signal_name
from tests.helpers.paths import ROOT


def test_status_from_wait() -> None:
    assert ExitStatus.from_wait(3 << 8) == ExitStatus(3)
    assert ExitStatus.from_wait(9, interrupted=True) == ExitStatus(137, 9, True)


def test_program_lookup_matches_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (first / "tool").write_text("not executable")
    (first / "folder").mkdir()
    (second / "tool").write_text("#!/bin/sh\n")
    (second / "tool").chmod(0o755)
    path = f"{first}:{second}"
    assert find_program("tool", path) == str(second / "tool")
    for name, status in (("folder", 127), ("nothing", 127), ("", 127), (str(first), 126), ("a/b", 127)):
        with pytest.raises(CommandNotStarted) as caught:
            find_program(name, path)
        assert caught.value.exit_status == status
    with pytest.raises(CommandNotStarted, match=r"chmod \+x") as caught:
        find_program("tool", str(first))
    assert caught.value.exit_status == 126
    (tmp_path / "train.py").write_text("")
    with pytest.raises(CommandNotStarted, match=r"command not found; did you mean `python train.py`"):
        find_program("train.py", path)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("", "/b"),
        ("/x", "/b:/x"),
        ("/x:", "/b:/x:"),
        (":/x", "/b::/x"),
        ("/b:/x", "/b:/x"),
        ("/x:/b", "/b:/x"),
    ],
)
def test_python_path(given: str, made: str) -> None:
    assert prefixed_python_path(given, "/b") == made


def test_environment_adds_two_variables() -> None:
    config = Config(run_dir="/r", run_id="i")
    made = command_environment(config, {"A": "1", "PYTHONPATH": "/x"})
    assert set(made) == {"A", "PYTHONPATH", ENV_CONFIG}
    assert made["PYTHONPATH"] == f"{BOOTSTRAP}:/x"
    assert Config.from_environment(made) == config
    assert os.listdir(BOOTSTRAP)[0].startswith(("sitecustomize", "__pycache__"))


def test_inbox_keeps_the_order_and_restores_handlers() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)]
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            assert inbox.wait(0.01) == []
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
            assert inbox.wait(60) == [signal.SIGUSR1, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, ignored)
    after = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)]
    assert after == before
    assert signal_name(15) == "SIGTERM"
    assert signal_name(40) == "SIG40"


def test_group_signals_are_detected() -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from ddpcheck.launcher.process.signals import GroupSignalDetector\n"
        "for number in (signal.SIGTERM, signal.SIGWINCH): signal.signal(number, lambda *_: None)\n"
        "w = GroupSignalDetector(); first = w.pid; received = w.group_received\n"
        "os.kill(os.getpid(), signal.SIGTERM); print(received(signal.SIGTERM), w.pid == first)\n"
        "os.killpg(0, signal.SIGTERM); print(received(signal.SIGTERM), w.pid == first, received(signal.SIGTERM))\n"
        "os.killpg(0, signal.SIGWINCH); print(received(signal.SIGWINCH))\n"
        "w.close()"
    )
    root = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code, root],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == ["False True", "True False False", "True"], done.stderr


def test_group_signal_detector_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    witness = GroupSignalDetector()
    assert witness.pid == 0
    assert not witness.group_received(signal.SIGTERM)
    witness.close()
