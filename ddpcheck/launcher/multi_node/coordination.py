"""Coordinates several launchers that use one run folder: which have ended, and which one reports.

The launcher of rank 0 reports after all others have logged the end of their part of the job. The others wait for its
report, so that all nodes exit with the status of the same verdict.
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
from ddpcheck.records.reader import REPORT_FILE

# Rewritten regularly by the node that reports.
HEARTBEAT_FILE = "reporting"
HEARTBEAT_SECONDS = 5.0
DONE = "node_done"
_POLL_SECONDS = 0.2
# Time that the reporting node needs to read and write after its own deadline.
_REPORT_SECONDS = 30.0

LauncherId = tuple[str, int]  # host and process id


@contextlib.contextmanager
def reporting_heartbeat(folder: Path) -> Iterator[None]:
    """Update the heartbeat file while this node reports, and remove it at the end. Write errors are ignored."""
    finished = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(folder / HEARTBEAT_FILE, finished), name="ddpcheck-heartbeat", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join(HEARTBEAT_SECONDS)
        with contextlib.suppress(OSError):
            (folder / HEARTBEAT_FILE).unlink(missing_ok=True)


def _beat(path: Path, finished: threading.Event) -> None:
    count = 0
    while True:
        with contextlib.suppress(OSError):
            path.write_text(f"{count}\n")
        count += 1
        if finished.wait(HEARTBEAT_SECONDS):
            return


def claim_reporting(folder: Path) -> bool:
    """Whether this node replaces the node that should have reported. Only one node gets True."""
    try:
        with (folder / HEARTBEAT_FILE).open("x") as file:
            file.write(f"{os.uname().nodename} {os.getpid()}\n")
    except FileExistsError:
        return False
    except OSError:
        return True  # if this node cannot write, no claim of another node can be trusted either
    return True


class ReporterHeartbeat:
    """The heartbeat file as read by another node. Clocks may differ, so only changes of its content count."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEARTBEAT_FILE
        self._last = self._read()

    def has_changed(self) -> bool:
        """Whether the content has changed since the last call."""
        before, self._last = self._last, self._read()
        return bool(self._last) and self._last != before

    def remove_if_unchanged(self) -> None:
        """Remove a heartbeat file whose owner no longer exists."""
        with contextlib.suppress(OSError):
            if self._last and self._read() == self._last:
                self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return ""


@dataclass(frozen=True)
class NodeEnd:
    """How the job ended on one node."""

    status: int
    stopped: str = ""


def log_done(folder: Path, status: int, stopped: str) -> None:
    """Log that the job has ended on this node and all its records are written."""
    log = NodeLog(folder)
    log.write(DONE, host=log.host, pid=os.getpid(), status=status, stopped=stopped)
    log.close()


class LauncherLogs:
    """Reads the logs of all nodes incrementally: each line once, also with hundreds of nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._launchers: dict[LauncherId, NodeEnd | None] = {}

    def all(self) -> dict[LauncherId, NodeEnd | None]:
        """All launchers that use this folder; None for one that has not ended."""
        for path in sorted(self._folder.glob("node-*.jsonl")):
            for line in self._new_lines(path):
                self._add(line)
        return self._launchers

    def others(self) -> dict[LauncherId, NodeEnd | None]:
        """All launchers except this one."""
        return {launcher: end for launcher, end in self.all().items() if launcher != _own_id()}

    def _add(self, line: bytes) -> None:
        match _parse(line):
            case {"kind": "node", "host": str(host), "pid": int(pid)}:
                self._launchers.setdefault((host, pid), None)
            case {"kind": "node_done", "host": str(host), "pid": int(pid), "status": int(status)} as record:
                self._launchers[host, pid] = NodeEnd(status, str(record.get("stopped") or ""))

    def _new_lines(self, path: Path) -> list[bytes]:
        """New complete lines about launchers. Most lines of a log are samples and are skipped."""
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
        except OSError:
            return []
        complete, _, incomplete = data.rpartition(b"\n")
        self._offsets[path] = self._offsets.get(path, 0) + len(data) - len(incomplete)
        return [line for line in complete.split(b"\n") if line.startswith(b'{"kind":"node')]


def all_launchers(folder: Path) -> dict[LauncherId, NodeEnd | None]:
    return LauncherLogs(folder).all()


def other_launchers(folder: Path) -> dict[LauncherId, NodeEnd | None]:
    return LauncherLogs(folder).others()


def is_shared(folder: Path) -> bool:
    """Whether another launcher uses the folder too. Each launcher logs its identity first."""
    for path in folder.glob("node-*.jsonl"):
        if path != NodeLog(folder).path:
            return True
        with contextlib.suppress(OSError), path.open("rb") as file:
            for line in file:
                match _parse(line) if line.startswith(b'{"kind":"node"') else None:
                    case {"host": str(host), "pid": int(pid)} if (host, pid) != _own_id():
                        return True
    return False


def is_reporter(run: RunReader, *, created_run: bool, own_pids: set[int]) -> bool:
    """Whether this launcher reports. `own_pids`: the processes of the ranks that it monitors."""
    attempts = run.ordered()
    first = attempts[-1].ranks.get(0) if attempts else None
    if first is None:
        return created_run
    if first.header.host != os.uname().nodename:
        return False
    return first.header.pid in own_pids or (not own_pids and created_run)


def wait_for_peers(folder: Path, seconds: float) -> list[str]:
    """Wait up to `seconds` until all other launchers have ended; the hosts of those that have not."""
    logs = LauncherLogs(folder)
    _wait(lambda: all(logs.others().values()), seconds)
    return sorted({host for (host, _), end in logs.others().items() if end is None})


def wait_for_report(folder: Path, seconds: float) -> dict[str, Any] | None:
    """The report that another node writes; None if that node has stopped without one."""
    path = folder / REPORT_FILE
    heartbeat = ReporterHeartbeat(folder)
    # Reading the records of thousands of ranks takes minutes; meanwhile the heartbeat file changes.
    while not _wait(path.exists, seconds + _REPORT_SECONDS):
        if not heartbeat.has_changed():
            heartbeat.remove_if_unchanged()
            return None
    record = _parse(path.read_bytes())
    return record if isinstance(record, dict) else None


def wait_for_reporter(folder: Path) -> None:
    """Wait until the node that reports has shown its report and written its files.

    If this task failed now, mpirun or `srun --kill-on-bad-exit` would end the one that reports in the middle.
    """
    path, heartbeat = folder / HEARTBEAT_FILE, ReporterHeartbeat(folder)
    while not _wait(lambda: not path.exists(), 2 * HEARTBEAT_SECONDS):
        if not heartbeat.has_changed():
            return


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _own_id() -> LauncherId:
    return os.uname().nodename, os.getpid()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
