"""The node log: records of the launchers, one append-only file per node. `node_kinds` decodes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Version of node-*.jsonl. 1 (2026-11): first version.
NODE_SCHEMA = 1
# Records that are kept in memory where they cannot be written, so that the report of this launcher contains them.
MAX_UNWRITTEN = 1024


class NodeLog:
    """Appends each record in one write, so that launchers of one host can share a file."""

    def __init__(self, run_dir: str | Path, host: str | None = None) -> None:
        self.host = host or os.uname().nodename
        self.path = Path(run_dir) / f"node-{re.sub(r'[^A-Za-z0-9._-]', '_', self.host)}.jsonl"
        self.lost = 0  # records that could not be written
        self.unwritten: list[bytes] = []  # the first of them
        self._descriptor: int | None = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record. If that fails the record is kept in memory and counted; the job is not affected."""
        record = {"kind": kind, "time": time.time(), **fields}
        try:
            line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        except ValueError:
            self.lost += 1
            return
        try:
            complete = self._append(line)
        except OSError:
            complete = False
        if not complete:
            self.lost += 1
            if len(self.unwritten) < MAX_UNWRITTEN:
                self.unwritten.append(line)

    def write_node(self, command_pid: int) -> None:
        self.write("node", schema=NODE_SCHEMA, host=self.host, pid=os.getpid(), command_pid=command_pid)

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> bool:
        """Whether the whole line is written."""
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
            os.fchmod(self._descriptor, 0o600)
        written = os.write(self._descriptor, line)
        if written < len(line):
            # End the incomplete line, so that the next record starts on a new one.
            os.write(self._descriptor, b"\n")
        return written == len(line)


def node_lines(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of all node logs, each with the name of its file. Files that cannot be read are skipped."""
    for path in sorted(folder.glob("node-*.jsonl")):
        try:
            with path.open("rb") as file:
                for line in file:
                    yield path.name, line
        except OSError:
            continue
