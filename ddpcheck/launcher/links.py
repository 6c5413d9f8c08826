"""Starts the ranks of `ddpcheck links` with the user's launcher and shows what they measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

from ddpcheck.errors import CommandNotStarted
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
