"""Several launchers in one run folder: which of them are done, and which one is to report.

The launcher of rank 0 reports, when all others have said that their part of the job is over. The others wait for
its report, so that every node leaves by the same verdict.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run import Run
from ddpcheck.launcher.node_log import NodeLog

DONE = "node_done"
REPORT_FILE = "report.json"
_POLL_SECONDS = 0.2
# Past its own deadline the reporting node still has to read and write.
_REPORT_SECONDS = 30.0

Launcher = tuple[str, int]  # host and process


@dataclass(frozen=True)
class NodeEnd:
    """How one node's part of the job ended."""

    status: int
    stopped: str = ""


def say_done(folder: Path, status: int, stopped: str) -> None:
    """This node's part is over, and all its records are written."""
    log = NodeLog(folder)
    log.write(DONE, host=log.host, pid=os.getpid(), status=status, stopped=stopped)
    log.close()


def launchers(folder: Path) -> dict[Launcher, NodeEnd | None]:
    """All launchers that work in this folder; None for one that is not done."""
    found: dict[Launcher, NodeEnd | None] = {}
    for path in sorted(folder.glob("node-*.jsonl")):
        for line in _lines(path):
            match _parsed(line):
                case {"kind": "node", "host": str(host), "pid": int(pid)}:
                    found.setdefault((host, pid), None)
                case {"kind": "node_done", "host": str(host), "pid": int(pid), "status": int(status)} as raw:
                    found[host, pid] = NodeEnd(status, str(raw.get("stopped") or ""))
    return found


def others(folder: Path) -> dict[Launcher, NodeEnd | None]:
    """All but this one."""
    me = (os.uname().nodename, os.getpid())
    return {launcher: end for launcher, end in launchers(folder).items() if launcher != me}


def reports(run: Run, made_the_run: bool, own_ranks: set[int]) -> bool:
    """Whether this launcher is the one that reports; `own_ranks`: processes of ranks that it watches."""
    attempts = run.ordered()
    first = attempts[-1].ranks.get(0) if attempts else None
    if first is None:
        return made_the_run
    if first.header.host != os.uname().nodename:
        return False
    return first.header.pid in own_ranks or (not own_ranks and made_the_run)


def wait_for_others(folder: Path, seconds: float) -> list[str]:
    """Until all are done, or for so long; the hosts that are not done by then."""
    _wait(lambda: all(others(folder).values()), seconds)
    return sorted({host for (host, _), end in others(folder).items() if end is None})


def wait_for_report(folder: Path, seconds: float) -> dict[str, Any] | None:
    """The report of the node that makes it; None where it does not come."""
    path = folder / REPORT_FILE
    if not _wait(path.exists, seconds + _REPORT_SECONDS):
        return None
    raw = _parsed(path.read_bytes())
    return raw if isinstance(raw, dict) else None


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        # Listing the folder makes network file systems look at what others have put there.
        time.sleep(_POLL_SECONDS)
    return True


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
