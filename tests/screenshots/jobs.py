"""The jobs in the images; each runs on this machine's CPU."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.commands import BIN, environment, run_command
from tests.lab.host import Host
from tests.lab.lab import Ended, make_lab

ROOT = Path(__file__).parents[2]
RANKS = 4
# Mbit/s of the links of the lab, and of the slow one.
USUAL, SLOW = 400, 100


def healthy(folder: Path) -> Path:
    return _watched(folder, 0, [], ["--epochs", "15"])


def profiled(folder: Path) -> Path:
    """A model with several buckets, some of which overlap with its backward."""
    return _watched(folder, 0, ["--profile"], ["--width", "768", "--layers", "8"])


def diverging(folder: Path) -> Path:
    return _watched(folder, 10, [], ["--mistake", "learning-rate"])


def straggling(folder: Path) -> Path:
    return _watched(folder, 0, [], ["--epochs", "15", "--mistake", "slow-rank"])


def slow_link(folder: Path) -> str:
    """Output of `ddpcheck links` on the first of four hosts, of which one has a slow link."""
    output = folder / "links.txt"
    if output.exists():
        return output.read_text()
    ended = _on_hosts(folder, 10, ["links"], [])
    output.write_text(ended[0].stdout)
    return ended[0].stdout


def held_up(folder: Path) -> Path:
    """A training job on the same hosts, in one shared run folder."""
    run = folder / "run"
    if not (run / "report.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples" / "train.py", folder)
        # Each host runs in its own subfolder.
        _on_hosts(
            folder,
            0,
            ["run", "--out", run, "--run-id", "lab"],
            ["../train.py", "--epochs", 15, "--width", 512],
        )
    return run


def _on_hosts(folder: Path, status: int, watched: Sequence[object], script: Sequence[object]) -> list[Ended]:
    """A ddpcheck command with torchrun on each of four hosts, of which one has a slow link."""
    with make_lab(4, folder) as lab:
        for host in lab.hosts:
            host.limit_link(USUAL)
        lab[2].limit_link(SLOW)

        def launch(number: int, host: Host) -> list[object]:
            static = [
                "--nnodes",
                4,
                "--node-rank",
                number,
                "--master-addr",
                lab[0].name,
                "--master-port",
                29417,
            ]
            return [BIN / "ddpcheck", *watched, "--", BIN / "torchrun", *static, *script]

        ended = lab.run_all(launch, env=lambda number, host: environment(), seconds=600)
    if [one.status for one in ended] != [status] * 4:
        sys.exit("\n".join(map(str, ended)))
    return ended


def _watched(folder: Path, status: int, options: Sequence[str], arguments: Sequence[str]) -> Path:
    """The run folder of the example, which must exit with `status`; an existing one is used as it is.

    The script is copied next to the run folder, so that no path of this checkout appears in an image.
    """
    if (folder / "report.json").exists():
        return folder
    shutil.copy(ROOT / "examples" / "train.py", folder.parent)
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(RANKS), "train.py"]
    command = [BIN / "ddpcheck", "run", "--out", folder, *options, "--", *launcher, *arguments]
    done = run_command(command, folder.parent, {}, timeout=300)
    if done.status != status:
        sys.exit(f"expected status {status}\n{done}")
    return folder
