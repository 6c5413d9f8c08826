"""Runs `ddpcheck links` and `ddpcheck doctor` on the ranks that the user's launcher starts, or on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath

from ddpcheck.config import Config
from ddpcheck.doctor.facts.injection import ENV_TRIAL, injection_in_child, run_in_child
from ddpcheck.doctor.facts.machine import collect
from ddpcheck.doctor.model import DoctorContext, DoctorReport
from ddpcheck.errors import CommandNotStarted, LauncherFailed
from ddpcheck.launcher.process.command import BOOTSTRAP, command_environment
from ddpcheck.links.model import LinksReport, render_links
from ddpcheck.links.options import failure_file

SLOW_LINK_STATUS = 10
# Launchers that start Python themselves.
_PYTHON_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}


def measure_links(command: Sequence[str], arguments: Sequence[str], out: Path, backend: str) -> int:
    """Measure links with the user's launcher; the exit status of `ddpcheck links`."""
    # The result of an earlier measurement must not be taken for this one.
    out.unlink(missing_ok=True)
    failure = failure_file(out)
    failure.unlink(missing_ok=True)
    options = [*arguments, "--json", str(out), "--quiet", "--exit-zero"]
    options += ["--backend", backend] if backend else []
    try:
        status = subprocess.run(rank_command(command, options), check=False).returncode
    except OSError as error:
        raise CommandNotStarted(
            f"cannot start {command[0]}: {error.strerror}; check its name", 127
        ) from error
    if failure.exists():
        reason = failure.read_text()
        failure.unlink(missing_ok=True)
        raise LauncherFailed(reason, 2)
    if status:
        return status if status > 0 else 128 - status
    try:
        report = LinksReport.from_json(out.read_text())
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(
            f"ddpcheck: no rank of this node has written {out} ({error}); check the launcher's output\n"
        )
        return 1
    encoding = (sys.stdout.encoding or "").lower()
    sys.stdout.write(render_links(report, ascii_only=not encoding.startswith("utf")))
    return SLOW_LINK_STATUS if report.slow else 0


def rank_command(command: Sequence[str], arguments: Sequence[str], name: str = "ddpcheck.links") -> list[str]:
    """The launcher followed by our module. Launchers that do not start Python get the interpreter first."""
    module = ["-m", name, *arguments]
    if any(PurePath(word).name in _PYTHON_LAUNCHERS for word in command):
        return [*command, *module]
    return [*command, sys.executable, *module]


def check_machine(python: str, out: Path) -> DoctorReport:
    """Check this machine with `python`, the interpreter that ranks would use."""
    with tempfile.TemporaryDirectory(prefix="ddpcheck-doctor-") as folder:
        facts = collect(
            out,
            torch=lambda: run_in_child(python, "torch_build.py"),
            injection=lambda: injection_in_child(python, _environment(folder)),
            python=lambda: run_in_child(python, "interpreter.py"),
        )
    return DoctorReport.of(DoctorContext((facts,)))


def check_job(command: Sequence[str], out: Path, wait: float) -> DoctorReport:
    """Check all ranks that the launcher starts; the report that the first rank of this machine writes."""
    with ExitStack() as stack:
        folder = _shared_folder(stack)
        result = Path(folder, "report.json")
        options = ["--result", str(result), "--wait", f"{wait:g}", "--folder", str(out.absolute())]
        try:
            status = subprocess.run(
                rank_command(command, options, "ddpcheck.doctor"), env=_environment(folder), check=False
            ).returncode
        except OSError as error:
            raise CommandNotStarted(
                f"cannot start {command[0]}: {error.strerror}; check its name", 127
            ) from error
        if status:
            raise LauncherFailed(
                f"{command[0]} exited with status {status} before all ranks had reported; check its output above",
                status if status > 0 else 128 - status,
            )
        try:
            return DoctorReport.from_json(result.read_text())
        except (OSError, ValueError, KeyError) as error:
            raise LauncherFailed(
                f"no rank has written its report to {folder} ({error}). If the ranks run on machines that do not share "
                f"this folder, run `{command[0]} ... python -m ddpcheck.doctor`: it prints the report itself",
                1,
            ) from error


def _environment(folder: str) -> dict[str, str]:
    """The environment that `ddpcheck run` would set, without a run."""
    environ = command_environment(Config(run_dir=folder, run_id="doctor"))
    return {**environ, ENV_TRIAL: BOOTSTRAP}


def _shared_folder(stack: ExitStack) -> str:
    """Prefer the working folder to /tmp: ranks on other machines often share it."""
    for parent in (os.getcwd(), None):
        try:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix=".ddpcheck-doctor-", dir=parent))
        except OSError:
            continue
    raise LauncherFailed("neither the working folder nor the temporary folder is writable", 1)
