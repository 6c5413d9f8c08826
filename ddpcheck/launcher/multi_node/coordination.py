"""Several launchers in one run folder: which of them are done, and which one is to report.

The launcher of rank 0 reports, when all others have said that their part of the job is over. The others wait for
its report, so that every node leaves by the same verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.records.node_log import NodeLog

FILE = "reporting"
SECONDS = 5.0


@contextlib.contextmanager
def beating(folder: Path) -> Iterator[None]:
    """While the report is made; the file is gone afterwards. A full disk costs only this."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(folder / FILE, over), name="ddpcheck-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SECONDS)
        with contextlib.suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)


def _beat(path: Path, over: threading.Event) -> None:
    number = 0
    while True:
        with contextlib.suppress(OSError):
            path.write_text(f"{number}\n")
        number += 1
        if over.wait(SECONDS):
            return


def claim(folder: Path) -> bool:
    """Whether this node is the one to step in for the one that should have reported: of hundreds only one is to."""
    try:
        with (folder / FILE).open("x") as file:
            file.write(f"{os.uname().nodename} {os.getpid()}\n")
    except FileExistsError:
        return False
    except OSError:
        return True  # where nothing can be written nobody else can tell either
    return True


class HeartbeatFile:
    """Seen from another node, whose clock may be another one: what counts is that it changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._last = self._read()

    def has_moved(self) -> bool:
        """Since it was last asked."""
        before, self._last = self._last, self._read()
        return bool(self._last) and self._last != before

    def give_up(self) -> None:
        """It stood still: whoever left it there is gone."""
        with contextlib.suppress(OSError):
            if self._last and self._read() == self._last:
                self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return ""


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


class Launchers:
    """Follows the logs of all nodes: of hundreds, each is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._found: dict[Launcher, NodeEnd | None] = {}

    def all(self) -> dict[Launcher, NodeEnd | None]:
        """All launchers that work in this folder; None for one that is not done."""
        for path in sorted(self._folder.glob("node-*.jsonl")):
            for line in self._new_lines(path):
                self._note(line)
        return self._found

    def others(self) -> dict[Launcher, NodeEnd | None]:
        """All but this one."""
        me = (os.uname().nodename, os.getpid())
        return {launcher: end for launcher, end in self.all().items() if launcher != me}

    def _note(self, line: bytes) -> None:
        match _parsed(line):
            case {"kind": "node", "host": str(host), "pid": int(pid)}:
                self._found.setdefault((host, pid), None)
            case {"kind": "node_done", "host": str(host), "pid": int(pid), "status": int(status)} as raw:
                self._found[host, pid] = NodeEnd(status, str(raw.get("stopped") or ""))

    def _new_lines(self, path: Path) -> list[bytes]:
        """Those that may be of interest: most are samples."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
        except OSError:
            return []
        whole, _, torn = data.rpartition(b"\n")
        self._read[path] = self._read.get(path, 0) + len(data) - len(torn)
        return [line for line in whole.split(b"\n") if line.startswith(b'{"kind":"node')]


def launchers(folder: Path) -> dict[Launcher, NodeEnd | None]:
    return Launchers(folder).all()


def others(folder: Path) -> dict[Launcher, NodeEnd | None]:
    return Launchers(folder).others()


def is_shared(folder: Path) -> bool:
    """Whether another launcher works there too; told by the beginnings of the logs, where each names itself."""
    me = (os.uname().nodename, os.getpid())
    for path in folder.glob("node-*.jsonl"):
        if path != NodeLog(folder).path:
            return True
        with contextlib.suppress(OSError), path.open("rb") as file:
            for line in file:
                match _parsed(line) if line.startswith(b'{"kind":"node"') else None:
                    case {"host": str(host), "pid": int(pid)} if (host, pid) != me:
                        return True
    return False


def reports(run: RunReader, made_the_run: bool, own_ranks: set[int]) -> bool:
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
    logs = Launchers(folder)
    _wait(lambda: all(logs.others().values()), seconds)
    return sorted({host for (host, _), end in logs.others().items() if end is None})


def wait_for_report(folder: Path, seconds: float) -> dict[str, Any] | None:
    """The report of the node that makes it; None where it does not come."""
    path = folder / REPORT_FILE
    pulse = HeartbeatFile(folder)
    # Reading what thousands of ranks wrote takes minutes: whoever is at it shows that now and then.
    while not _wait(path.exists, seconds + _REPORT_SECONDS):
        if not pulse.has_moved():
            pulse.give_up()
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


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
