"""Asks this machine, or the ranks that the user's launcher starts, for their facts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath

from ddpcheck.config import Config
from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.facts.injection import ENV_TRIAL, injection_in_child, run_in_child
from ddpcheck.doctor.facts.machine import collect
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.errors import CommandNotStarted, LauncherFailed
from ddpcheck.launcher.environment import BOOTSTRAP, command_environment
from ddpcheck.links.heat_map import render_links
from ddpcheck.links.model import LinksReport

SLOW = 10
# Launchers that start Python by themselves.
_PYTHON_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}


def measure_links(command: Sequence[str], arguments: Sequence[str], out: Path, backend: str) -> int:
    """The exit status of `ddpcheck links`."""
    # What an earlier measurement left must not be taken for this one's.
    out.unlink(missing_ok=True)
    asked = [*arguments, "--json", str(out), "--quiet", "--exit-zero"]
    asked += ["--backend", backend] if backend else []
    try:
        status = subprocess.run(rank_command(command, asked), check=False).returncode
    except OSError as error:
        raise CommandNotStarted(f"{command[0]} could not be started: {error.strerror}", 127) from error
    if status:
        return status if status > 0 else 128 - status
    try:
        report = LinksReport.from_json(out.read_text())
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"ddpcheck: no rank of this node has written {out} ({error})\n")
        return 1
    encoding = (sys.stdout.encoding or "").lower()
    sys.stdout.write(render_links(report, ascii_only=not encoding.startswith("utf")))
    return SLOW if report.slow else 0


def rank_command(command: Sequence[str], arguments: Sequence[str], name: str = "ddpcheck.links") -> list[str]:
    """The launcher with our module behind it, in the way that kind of launcher wants it."""
    module = ["-m", name, *arguments]
    if any(PurePath(word).name in _PYTHON_LAUNCHERS for word in command):
        return [*command, *module]
    return [*command, sys.executable, *module]


def look_at_machine(python: str, out: Path) -> DoctorReport:
    """`python` is the one that ranks would run with."""
    with tempfile.TemporaryDirectory(prefix="ddpcheck-doctor-") as folder:
        facts = collect(
            out,
            torch=lambda: run_in_child(python, "torch_build.py"),
            injection=lambda: injection_in_child(python, _environment(folder)),
            python=lambda: run_in_child(python, "interpreter.py"),
        )
    return DoctorReport.of(DoctorContext((facts,)))


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
