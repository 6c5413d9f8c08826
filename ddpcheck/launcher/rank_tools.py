"""Asks this machine, or the ranks that the user's launcher starts, for their facts."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ddpcheck.config import Config
from ddpcheck.doctor.context import Scene
from ddpcheck.doctor.facts.child import ask_child
from ddpcheck.doctor.facts.injection import ENV_TRIAL, in_a_child
from ddpcheck.doctor.facts.machine import collect
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.errors import CommandNotStarted, LauncherFailed
from ddpcheck.launcher.environment import BOOTSTRAP, command_environment
from ddpcheck.launcher.links import rank_command


def look_at_machine(python: str, out: Path) -> DoctorReport:
    """`python` is the one that ranks would run with."""
    with tempfile.TemporaryDirectory(prefix="ddpcheck-doctor-") as folder:
        facts = collect(
            out,
            ask_torch=lambda: ask_child(python, "torch_build.py"),
            injection=lambda: in_a_child(python, _environment(folder)),
            python=lambda: ask_child(python, "interpreter.py"),
        )
    return DoctorReport.of(Scene((facts,)))


def look_at_job(command: Sequence[str], out: Path, wait: float) -> DoctorReport:
    """What the first rank of this machine wrote."""
    with ExitStack() as stack:
        folder = _shared_folder(stack)
        result = Path(folder, "report.json")
        asked = ["--result", str(result), "--wait", f"{wait:g}", "--folder", str(out.absolute())]
        try:
            status = subprocess.run(
                rank_command(command, asked, "ddpcheck.doctor"), env=_environment(folder), check=False
            ).returncode
        except OSError as error:
            raise CommandNotStarted(f"{command[0]} could not be started: {error.strerror}", 127) from error
        if status:
            raise LauncherFailed(
                f"{command[0]} ended with status {status} before the ranks had reported: see what it printed",
                status if status > 0 else 128 - status,
            )
        try:
            return DoctorReport.from_json(result.read_text())
        except (OSError, ValueError, KeyError) as error:
            raise LauncherFailed(
                f"no rank has left its report in {folder}: if they ran on other machines that do not share this "
                f"folder, start `{command[0]} ... python -m ddpcheck.doctor`, which prints by itself ({error})",
                1,
            ) from error


def _environment(folder: str) -> dict[str, str]:
    """As `ddpcheck run` would set it, for a run that is never made."""
    environ = command_environment(Config(run_dir=folder, run_id="doctor"))
    return {**environ, ENV_TRIAL: BOOTSTRAP}


def _shared_folder(stack: ExitStack) -> str:
    """Here rather than in /tmp: ranks that a scheduler starts elsewhere often share the working folder."""
    for place in (os.getcwd(), None):
        try:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix=".ddpcheck-doctor-", dir=place))
        except OSError:
            continue
    raise LauncherFailed("neither the working folder nor the temporary one can be written", 1)
