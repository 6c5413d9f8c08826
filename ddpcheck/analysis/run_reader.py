"""A run folder: its attempts, fed from rank files as they grow or all at once, and what nodes noted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.errors import RunNotFound, RunUnreadable
from ddpcheck.records.kinds.rank import FaultRecord, RankHeader
from ddpcheck.records.node_log import node_lines
from ddpcheck.records.reader import CHUNK, RecordFile
from ddpcheck.records.registry import RANK_FILES


@dataclass(frozen=True)
class WriteError:
    """What a launcher read on the board of its node; older ones did not note of which process."""

    rank: int
    text: str
    # Host and pid.
    process: tuple[str, int] | None = None

    def is_of(self, rank: int, process: tuple[str, int]) -> bool:
        return self.rank == rank and self.process in (None, process)


def place(troubles: Iterable[WriteError], ranks: Sequence[Sequence[RankSummary]]) -> list[dict[int, str]]:
    """By attempt and rank. Of a rank that wrote nothing at all no attempt knows the process: it is missing there."""
    placed: list[dict[int, str]] = [{} for _ in ranks]
    for trouble in troubles:
        told = [n for n, rows in enumerate(ranks) if any(_is_of(trouble, row) for row in rows)]
        missing = [n for n, rows in enumerate(ranks) if any(_is_missing(trouble, row) for row in rows)]
        for number in told or missing[:1] or [len(ranks) - 1]:
            placed[number].setdefault(trouble.rank, trouble.text)
    return placed


def _is_of(trouble: WriteError, row: RankSummary) -> bool:
    return row.status is not RankStatus.MISSING and trouble.is_of(row.rank, (row.host, row.pid))


def _is_missing(trouble: WriteError, row: RankSummary) -> bool:
    return row.status is RankStatus.MISSING and row.rank == trouble.rank


# Steps by which one rank's records may be read ahead of another's, lines read of one file before the next has its turn,
# and bytes of them that are fetched: of all files together, more or less. Thousands of ranks have few each.
_AHEAD_OF_ALL, _FEWEST_AHEAD, MOST_AHEAD = 1 << 14, 4, 256
_LINES_OF_ALL, _FEWEST_LINES, MOST_LINES = 1 << 13, 8, 512
_BYTES_OF_ALL, _FEWEST_BYTES = 16 << 20, 16 << 10
# Of a new file no more than its first line, to see whose it is.
_FIRST_BYTES = 4 << 10
# With so many files a job is large: listing its folder takes time, of a shared file system's server too, and not much
# may go by that way.
_MANY_FILES = 64
_SHARE_OF_LISTING = 0.05


class _Listing:
    """When the folder was last listed, and when it may be again."""

    def __init__(self) -> None:
        self._began = self._again = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._again

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._again = now + (now - self._began) / _SHARE_OF_LISTING


@dataclass
class Hang:
    """A launcher found that all ranks it could see wait for each other."""

    # How long no rank had got any further, and the state of each rank as its own launcher saw it.
    seconds: float = 0.0
    states: dict[int, str] = field(default_factory=dict)
    # Ranks that did not answer: what they said of themselves before is out of date.
    silent: set[int] = field(default_factory=set)


@dataclass
class NodeNotes:
    """What the launchers saw from outside the ranks."""

    # By process (host, pid): when it was seen to vanish.
    exits: dict[tuple[str, int], float] = field(default_factory=dict)
    # By process: the signal that ended it, 0 for none; not every launcher comes in time to see it.
    signals: dict[tuple[str, int], int] = field(default_factory=dict)
    # Processes that nobody saw go: the time of their exit is when that was noticed.
    found_gone: set[tuple[str, int]] = field(default_factory=set)
    # When the user, or --fail-fast, asked the job to stop.
    stopped: float | None = None
    # What ranks could not write to their files.
    troubles: list[WriteError] = field(default_factory=list)
    leftovers: int = 0
    # By source that a launcher could not sample, and why: the hosts.
    unsampled: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    # Lines that a launcher could not add to its node's log.
    unwritten: int = 0
    # By session.
    hangs: dict[str, Hang] = field(default_factory=dict)


class RunReader:
    """Reads a run; `poll` can be called again and again while the job is under way.

    `host`: in a large job only ranks of this host are followed, until all are asked for. Of the others no more than the
    first line is read: a launcher on each of hundreds of nodes must not read what the ranks of all of them write.
    """

    def __init__(self, path: Path, host: str = "") -> None:
        self.path = path
        self._host = host
        self._listed = _Listing()
        self.attempts: dict[str, Attempt] = {}
        self.strays: list[FaultRecord] = []
        self.headless = 0
        self._files: dict[Path, tuple[RecordFile, RankHeader | None]] = {}

    def follow_all(self) -> None:
        """From now on the ranks of all hosts."""
        self._host = ""

    def poll(self, seconds: float = math.inf) -> bool:
        """Read what is new, a little from every file in turn so that ranks stay close; True for any.

        After so many seconds the rest is left for the next time.
        """
        deadline = time.monotonic() + seconds
        self._discover()
        anything = False
        reading = [path for path in self._files if not self._is_far(path)]
        files = max(1, len(reading))
        lines = _share(_LINES_OF_ALL, files, _FEWEST_LINES, MOST_LINES)
        fetched = _share(_BYTES_OF_ALL, files, _FEWEST_BYTES, CHUNK)
        while reading and time.monotonic() < deadline:
            for path in self._not_ahead(reading, files):
                more = self._read(path, lines, fetched)
                anything = anything or more
                if not more or self._is_far(path):
                    reading.remove(path)
        return anything

    def finish(self) -> None:
        """Read to the end: no more records will come."""
        self.follow_all()
        self._listed = _Listing()
        self.poll()
        for file, header in self._files.values():
            if header is None:
                self.headless += 1
                continue
            rank = self.attempts[header.session].ranks[header.rank]
            rank.bad_lines, rank.torn = file.bad, file.torn
        for attempt in self.attempts.values():
            attempt.end()
        for path in sorted(self.path.glob("fault-*.jsonl")):
            self.strays += [record for record in RecordFile(path).read() if isinstance(record, FaultRecord)]

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
                self._files[path] = (RecordFile(path), None)

    def _is_far(self, path: Path) -> bool:
        """Whether it is of a rank that another launcher follows. In small jobs, everything is near."""
        header = self._files[path][1]
        large = self._host and len(self._files) >= _MANY_FILES
        return bool(large) and header is not None and header.host != self._host

    def _not_ahead(self, paths: list[Path], files: int) -> list[Path]:
        """Without those that would run away from the slowest, as ranks do that write fewer lines a step."""
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
        return header.session, sum(self.attempts[header.session].ranks[header.rank].steps.values())

    def _read(self, path: Path, lines: int, fetched: int) -> bool:
        file, header = self._files[path]
        records = file.read(lines, fetched) if header is not None else file.read(1, _FIRST_BYTES)
        for record in records:
            if isinstance(record, RankHeader):
                header = self._enlist(record)
                self._files[path] = (file, header)
            if header is not None:
                self.attempts[header.session].feed(header, record)
        return bool(records)

    def _enlist(self, header: RankHeader) -> RankHeader:
        """Give a new file its attempt; a rank that comes back under the same name belongs to the next one."""
        while header.rank in self.attempts.setdefault(header.session, Attempt(header.session)).ranks:
            header = replace(header, session=f"+{header.session}")
        return header


def _share(of_all: int, files: int, fewest: int, most: int) -> int:
    return max(fewest, min(most, of_all // files))


def by_start(path: Path) -> tuple[str, int]:
    """A rank's files in the order in which they were opened: rank-00000.jsonl, rank-00000.1.jsonl, …"""
    rank, _, number = path.name.removesuffix(".jsonl").partition(".")
    return rank, int(number) if number.isdigit() else 0


def read_description(path: Path) -> dict[str, Any]:
    """run.json; a run without a readable one is still a run if ranks reported."""
    if not path.is_dir():
        raise RunNotFound(f"There is no run at {path}.")
    try:
        raw = json.loads((path / "run.json").read_text())
    except FileNotFoundError:
        if not any(path.glob(RANK_FILES)):
            raise RunNotFound(f"{path} is not a run folder: it holds neither run.json nor records.") from None
        return {}
    except (OSError, ValueError) as error:
        if not any(path.glob(RANK_FILES)):
            raise RunUnreadable(f"The run at {path} cannot be read: run.json is damaged ({error}).") from None
        return {}
    return raw if isinstance(raw, dict) else {}


def read_notes(path: Path, description: Mapping[str, Any]) -> NodeNotes:
    """The node logs, and of the run's description what they lack; lines that make no sense are passed over."""
    unwritten = description.get("unwritten")
    notes = NodeNotes(unwritten=unwritten if isinstance(unwritten, int) else 0)
    for _, line in node_lines(path):
        if line.startswith(b'{"kind":"sample'):  # many, and no notes
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(raw, dict):
            _note(notes, raw)
    return notes


def _note(notes: NodeNotes, raw: dict[str, Any]) -> None:
    match raw:
        case {"kind": "rank_exit", "pid": int(pid), "time": int() | float() as time, "host": str(host)}:
            notes.exits.setdefault((host, pid), float(time))
            if isinstance(raw.get("signal"), int):
                notes.signals.setdefault((host, pid), raw["signal"])
            if raw.get("found_gone") is True:
                notes.found_gone.add((host, pid))
        case {
            "kind": "signal",
            "signal": "SIGINT" | "SIGTERM" | "SIGHUP" | "SIGQUIT",
            "time": int() | float() as time,
        }:
            notes.stopped = min(notes.stopped or float(time), float(time))
        case {"kind": "stop", "time": int() | float() as time}:
            notes.stopped = min(notes.stopped or float(time), float(time))
        case {"kind": "trouble", "rank": int(rank), "text": str(text)}:
            match raw:
                case {"host": str(host), "pid": int(pid)}:
                    notes.troubles.append(WriteError(rank, text, (host, pid)))
                case _:
                    notes.troubles.append(WriteError(rank, text))
        case {"kind": "fault", "probe": "sampler", "error": str(error)}:
            hosts = notes.unsampled.setdefault((str(raw.get("entry", "")), error), set())
            hosts |= {str(raw["host"])} if "host" in raw else set()
        case {"kind": "leftover"}:
            notes.leftovers += 1
        case {
            "kind": "hang",
            "session": str(session),
            "seconds": int() | float() as seconds,
            "ranks": dict(ranks),
        }:
            hang = notes.hangs.setdefault(session, Hang())
            hang.seconds = max(hang.seconds, float(seconds))
            for rank, seen in ranks.items():
                if str(rank).isdigit() and isinstance(seen, dict):
                    hang.states[int(rank)] = str(seen.get("state", ""))
                    if seen.get("answered") is False:
                        hang.silent.add(int(rank))
