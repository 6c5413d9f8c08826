"""`ddpcheck view` and `--tensorboard`: errors are one sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ddpcheck.__main__ import main
from ddpcheck.cli.view import _events_folder
from ddpcheck.errors import PortInUse, ViewerFailed
from ddpcheck.launcher import viewer
from ddpcheck.launcher.viewer import free_port, run_tensorboard
from tests.helpers.run_builder import RunBuilder


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return leaving.value.code, capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RunBuilder(tmp_path / "run", 2).wrap().train(3).end().save()


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in these tests must not start a real server."""
    monkeypatch.setattr("ddpcheck.launcher.viewer.run_tensorboard", _never)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("TensorBoard would have been started")


@pytest.fixture
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "tensorboard" else ModuleSpec(name, None)

    monkeypatch.setattr("ddpcheck.reports.outputs.find_spec", find)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.usefixtures("without_tensorboard")
def test_without_tensorboard_no_job_starts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = (
        1,
        "ddpcheck: TensorBoard is not installed: install it with `pip install 'ddpcheck[tensorboard]'`\n",
    )
    out = tmp_path / "job"
    assert printed(capsys, "view", run) == message
    assert printed(capsys, "report", run, "--tensorboard") == message
    assert printed(capsys, "run", "--out", out, "--tensorboard", "--", "touch", tmp_path / "ran") == message
    assert not out.exists()
    assert not (tmp_path / "ran").exists()


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = printed(capsys, "view", tmp_path)
    assert status == 1
    assert "is not a run folder" in message
    assert message.count("\n") == 1


def test_a_truncated_run_is_shown(run: Path, tmp_path: Path) -> None:
    (run / "run.json").write_bytes(b"")
    first = run / "rank-00000.jsonl"
    first.write_bytes(first.read_bytes()[:-40])
    events = _events_folder(run, tmp_path / "spare")
    assert events == run / "tensorboard"
    assert sorted(path.name for path in events.iterdir()) == [
        "ddpcheck.json",
        "job",
        "rank-0000",
        "rank-0001",
    ]


def test_an_unreadable_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{")
    status, message = printed(capsys, "view", tmp_path)
    assert status == 1
    assert "damaged" in message
    assert message.count("\n") == 1


def test_a_current_folder_is_not_written_again(run: Path, tmp_path: Path) -> None:
    made = _events_folder(run, tmp_path).stat().st_ino
    assert _events_folder(run, tmp_path).stat().st_ino == made
    os.utime(run / "rank-00000.jsonl", (2e9, 2e9))
    assert _events_folder(run, tmp_path).stat().st_ino != made


def test_a_run_folder_that_cannot_be_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ddpcheck.reports.tensorboard import folder

    real = folder.write_tensorboard

    def write(report: object, where: Path, out: Path) -> None:
        if out.parent == run:
            raise PermissionError(13, "Permission denied")
        real(report, where, out)  # type: ignore[arg-type]

    monkeypatch.setattr(folder, "write_tensorboard", write)
    assert _events_folder(run, tmp_path) == tmp_path / "tensorboard"
    assert "(Permission denied); using" in capsys.readouterr().err


def test_a_port_in_use(run: Path, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = printed(capsys, "view", run, "--port", taken)
    assert (status, message) == (
        1,
        f"ddpcheck: port {taken} is in use; choose another one with --port, or omit the option\n",
    )
    assert not (run / "tensorboard").exists()


def test_the_first_free_port_is_used(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "FIRST_PORT", taken)
    assert taken < free_port(None) < taken + 100
    monkeypatch.setattr(viewer, "_PORTS_TRIED", 1)
    with pytest.raises(PortInUse, match="are all in use"):
        free_port(None)


def test_a_tensorboard_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: no such thing' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(viewer.sys, "executable", str(broken))
    monkeypatch.setattr(viewer, "_answers", lambda port: False)
    with pytest.raises(ViewerFailed, match="exited with status 3: ImportError: no such thing"):
        run_tensorboard(tmp_path, "run", taken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    """A fake server that waits for a signal replaces TensorBoard."""
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\nimport os, signal, socket, sys\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        f"signal.signal({int(number)}, lambda *_: (open({str(tmp_path / 'received')!r}, 'w'), os._exit(0)))\n"
        "listening = socket.create_server(('127.0.0.1', port))\n"
        "while True: listening.accept()\n"
    )
    fake.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from ddpcheck.launcher.viewer import *\n"
        f"sys.executable = {str(fake)!r}\n"
        f"sys.exit(run_tensorboard(Path({str(tmp_path)!r}), 'mine', free_port(None)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline().startswith("TensorBoard shows mine at http://localhost:")
        process.send_signal(number)
        assert process.wait(120) == 0
    assert (tmp_path / "received").exists()


def test_out_belongs_to_one_option(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = printed(capsys, "report", run, "x", "--trace", "--tensorboard")
    assert status == 2
    assert "give only one of --trace and --tensorboard" in message
    status, message = printed(capsys, "report", run, "x")
    assert status == 2
    assert "give --trace or --tensorboard" in message


def test_a_foreign_folder_is_not_overwritten(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    status, message = printed(capsys, "report", run, tmp_path / "mine", "--tensorboard")
    assert status == 1
    assert message.endswith("was not created by ddpcheck: name a folder that does not exist\n")
    status, _ = printed(capsys, "report", run, tmp_path / "new", "--tensorboard")
    assert status == 0
    assert (tmp_path / "new" / "job").is_dir()
