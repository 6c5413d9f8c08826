"""Reads the record files of a run folder into its attempts, at once or while the files grow."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.errors import RecordsFolded, RunNotFound, RunUnreadable
from ddpcheck.records.blocks import Block
from ddpcheck.records.folding import Fold, FoldList, further_files
from ddpcheck.records.kinds.rank import FaultRecord, RankHeader
from ddpcheck.records.reader import CHUNK, RecordFile
from ddpcheck.records.registry import RANK_FILES

# Called with the bytes that were read, and those of all files.
Progress = Callable[[int, int], None]
# Files are read in turns. Limits over all files, and the least and most for each: steps by which one rank may be ahead
# of the slowest, lines of one file per turn, and bytes to read at a time.
_AHEAD_OF_ALL, _FEWEST_AHEAD, MOST_AHEAD = 1 << 14, 4, 256
_LINES_OF_ALL, _FEWEST_LINES, MOST_LINES = 1 << 13, 8, 512
_BYTES_OF_ALL, _FEWEST_BYTES = 16 << 20, 16 << 10
# Of a new file only the first line is read, to identify the rank.
_FIRST_BYTES = 4 << 10
PATIENCE_SECONDS = 5.0
# A launcher folds steps at most every few seconds, far behind the ranks.
_MOST_RESTARTS = 8
# Jobs with this many files are large. Listing their folder loads the server of a shared file system: it may take at
# most this share of the time.
_MANY_FILES = 64
_LISTING_SHARE = 0.05


class _ListingTimer:
    """Measures how long listing the folder takes, and decides when to list it again."""

    def __init__(self) -> None:
        self._began = self._due = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._due = now + (now - self._began) / _LISTING_SHARE


class RunReader:
    """Reads a run. `poll` can be called repeatedly while the job runs.

    `host`: in a large job only the files of ranks on this host are read, until `follow_all` is called. Of other files
    only the first line is read: with a launcher on each of hundreds of nodes, each reads only its own ranks.
    `patience`: for how many seconds records of steps may wait for those of other ranks, which write blocks of seconds.
    """

    def __init__(self, path: Path, host: str = "", patience: float = PATIENCE_SECONDS) -> None:
        self.path = path
        self.patience = patience
        self._host = host
        self._listed = _ListingTimer()
        self.attempts: dict[str, Attempt] = {}
        self.unattributed_faults: list[FaultRecord] = []
        self.files_without_header = 0
        self._files: dict[Path, tuple[RecordFile, RankHeader | None]] = {}
        self.folds = FoldList(path)

    def follow_all(self) -> None:
        """Read the files of all hosts from now on."""
        self._host = ""

    def poll(self, seconds: float = math.inf, progress: Progress | None = None) -> bool:
        """Read new records from all files in turns, so that no rank gets far ahead. True if there were any.

        Stops after `seconds`; the next call continues. `progress` is called now and then.

        Steps that another process folds while some of the ranks have been read up to them: everything is read again.
        """
        if any(map(self._divides, self.folds.refresh())):
            self._restart()
        for _ in range(_MOST_RESTARTS):
            try:
                return self._poll(seconds, progress)
            except RecordsFolded:
                self.folds.refresh()
                self._restart()
        return self._poll(seconds, progress)

    def _divides(self, fold: Fold) -> bool:
        """Whether some ranks have been read beyond the first of these steps, and some are not beyond the last."""
        files = [
            file
            for file, header in self._files.values()
            if header is not None and header.session == fold.session and not self._is_remote(file.path)
        ]
        before = [file.first < fold.first or (file.first == fold.first and file.entering) for file in files]
        return not all(before) and not all(file.first >= fold.end for file in files)

    def _restart(self) -> None:
        self.attempts.clear()
        self._files.clear()
        self._listed = _ListingTimer()

    def _poll(self, seconds: float, progress: Progress | None) -> bool:
        deadline = time.monotonic() + seconds
        self._discover()
        has_new = False
        reading = [path for path in self._files if not self._is_remote(path)]
        files = max(1, len(reading))
        lines = _share(_LINES_OF_ALL, files, _FEWEST_LINES, MOST_LINES)
        chunk = _share(_BYTES_OF_ALL, files, _FEWEST_BYTES, CHUNK)
        while reading and time.monotonic() < deadline:
            for path in self._not_ahead(reading, files):
                more = self._read(path, lines, chunk)
                has_new = has_new or more
                if not more or self._is_remote(path):
                    reading.remove(path)
            for attempt in self.attempts.values():
                attempt.compare()
            if progress is not None:
                progress(self._bytes_read, self._bytes)
        for attempt in self.attempts.values():
            attempt.settle(self.patience)
        return has_new

    def finish(self, progress: Progress | None = None) -> None:
        """Read all remaining records. The ranks write no more."""
        self.follow_all()
        self._listed = _ListingTimer()
        self.poll(progress=progress)
        while self._skip_lost():
            self.poll(progress=progress)
        for file, header in self._files.values():
            if header is None:
                self.files_without_header += 1
                continue
            for record in file.recent():
                self.attempts[header.session].feed(header, record)
            rank = self.attempts[header.session].ranks[header.rank]
            rank.bad_lines, rank.torn = file.bad, file.torn
        for attempt in self.attempts.values():
            attempt.end()
        for path in sorted(self.path.glob("fault-*.jsonl")):
            self.unattributed_faults += [
                record for record in RecordFile(path).read() if isinstance(record, FaultRecord)
            ]

    def _skip_lost(self) -> bool:
        skipped = [file.skip_lost() for file, header in self._files.values() if header is not None]
        return any(skipped)

    @property
    def _bytes_read(self) -> int:
        return sum(file.bytes_read for file, _ in self._files.values())

    @cached_property
    def _bytes(self) -> int:
        """Of all files, when it is first asked for."""
        sizes = 0
        for path in self._files:
            for each in (path, *further_files(path)):
                with contextlib.suppress(OSError):
                    sizes += each.stat().st_size
        return sizes

    def files_of(self, session: str) -> dict[int, Path]:
        """The files of an attempt by rank."""
        return {
            header.rank: path
            for path, (_, header) in self._files.items()
            if header is not None and header.session == session
        }

    def ordered(self) -> list[Attempt]:
        return sorted(self.attempts.values(), key=lambda attempt: attempt.started)

    def _discover(self) -> None:
        if len(self._files) >= _MANY_FILES and not self._listed.is_due():
            return
        with self._listed:
            self._list()

    def _list(self) -> None:
        for path in sorted(self.path.glob(RANK_FILES), key=by_start):
            if path not in self._files:
                self._files[path] = (RecordFile(path, self.folds), None)

    def _is_remote(self, path: Path) -> bool:
        """Whether another launcher reads this file. In small jobs every launcher reads all files."""
        header = self._files[path][1]
        large = self._host and len(self._files) >= _MANY_FILES
        return bool(large) and header is not None and header.host != self._host

    def _not_ahead(self, paths: list[Path], files: int) -> list[Path]:
        """Without files that are far ahead of the slowest rank: ranks with fewer lines per step are read faster."""
        ahead = _share(_AHEAD_OF_ALL, files, _FEWEST_AHEAD, MOST_AHEAD)
        steps = {path: self._steps(path) for path in paths}
        slowest: dict[str, int] = {}
        for session, count in steps.values():
            slowest[session] = min(slowest.get(session, count), count)
        return [path for path, (session, count) in steps.items() if count <= slowest[session] + ahead]

    def _steps(self, path: Path) -> tuple[str, int]:
        header = self._files[path][1]
        if header is None:
            return "", 0
        return header.session, self.attempts[header.session].steps_read(header.rank)

    def _read(self, path: Path, lines: int, chunk: int) -> bool:
        file, header = self._files[path]
        items = file.read_items(lines, chunk) if header is not None else file.read_items(1, _FIRST_BYTES)
        for item in items:
            if isinstance(item, RankHeader):
                header = self._add_file(item)
                file.session = header.session
                self._files[path] = (file, header)
            if header is None:
                continue
            attempt = self.attempts[header.session]
            if isinstance(item, Block):
                attempt.feed_block(header, item)
            else:
                attempt.feed(header, item)
        return bool(items)

    def _add_file(self, header: RankHeader) -> RankHeader:
        """Assign a new file to its attempt. A second file of a rank with the same session starts another attempt."""
        while header.session in self.attempts and header.rank in self.attempts[header.session].ranks:
            header = replace(header, session=f"+{header.session}")
        if header.session not in self.attempts:
            self.attempts[header.session] = Attempt(header.session)
        return header


def _share(of_all: int, files: int, fewest: int, most: int) -> int:
    return max(fewest, min(most, of_all // files))


def by_start(path: Path) -> tuple[str, int]:
    """Sort key: the files of a rank in the order in which they were opened, rank-00000.jsonl, rank-00000.1.jsonl, …"""
    rank, _, number = path.name.removesuffix(".jsonl").partition(".")
    return rank, int(number) if number.isdigit() else 0


def read_description(path: Path) -> dict[str, Any]:
    """The contents of run.json; empty where it is missing or damaged but record files exist."""
    if not path.is_dir():
        raise RunNotFound(f"There is no run at {path}.")
    try:
        raw = json.loads((path / "run.json").read_text())
    except FileNotFoundError:
        if not any(path.glob(RANK_FILES)):
            raise RunNotFound(
                f"{path} is not a run folder: it contains neither run.json nor record files."
            ) from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if not any(path.glob(RANK_FILES)):
            raise RunUnreadable(f"The run at {path} cannot be read: run.json is damaged ({error}).") from None
        return {}
    return raw if isinstance(raw, dict) else {}
