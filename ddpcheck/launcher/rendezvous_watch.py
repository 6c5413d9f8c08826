"""Detects ranks that wait for others in `init_process_group`, and says which ranks never came."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.launcher.process.process_table import descendants, read_process
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.records.node_log import NodeLog
from ddpcheck.records.rendezvous import JOINING_FILES

_LOOK_SECONDS = 1.0
# Programs at the end of a pipe: they never become a rank. Any other process may, also a shell that copies data first.
_OF_PIPES = frozenset(("tee", "cat", "grep", "sed", "awk", "tail", "head", "ts", "logger", "less"))


@dataclass(frozen=True)
class Joining:
    """A rank that waits in `init_process_group`."""

    rank: int
    world_size: int
    pid: int
    where: str
    one_host: bool


class RendezvousWatch:
    """The job is stopped only if no process is left that could be one of the missing ranks."""

    def __init__(
        self,
        folder: Path,
        host: str,
        node_log: NodeLog,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        candidates: Callable[[set[int]], list[int]] | None = None,
    ) -> None:
        self._folder, self._host, self._node_log = folder, host, node_log
        self._timeout, self._clock = timeout, clock
        self._candidates = candidates or possible_ranks
        self._look = min(_LOOK_SECONDS, timeout / 4)
        self._last_look = -self._look
        self._since: dict[tuple[int, int], float] = {}
        self._logged: frozenset[int] | None = None

    def tick(self) -> StopRequest | None:
        now = self._clock()
        if now - self._last_look < self._look:
            return None
        self._last_look = now
        waiting = self._waiting()
        self._since = {key: self._since.get(key, now) for key in waiting}
        # A rank that has come is progress: the others may come too.
        if not waiting or now - max(self._since.values()) < self._timeout:
            return None
        world_size = max(joining.world_size for joining in waiting.values())
        present = {joining.rank for joining in waiting.values()}
        missing = frozenset(set(range(world_size)) - present)
        possible = self._candidates({joining.pid for joining in waiting.values()})
        stops = not possible and all(joining.one_host for joining in waiting.values())
        if self._logged != missing or stops:
            self._logged = missing
            self._node_log.write(
                "rendezvous",
                seconds=round(now - min(self._since.values()), 1),
                world_size=world_size,
                waiting=sorted(present),
                missing=sorted(missing),
                processes=possible,
                where=next(iter(waiting.values())).where,
                stopped=stops,
            )
        if not stops:
            return None
        return StopRequest(
            f"ranks have waited for others for {self._timeout:g} seconds or more (--hang-timeout)"
        )

    def _waiting(self) -> dict[tuple[int, int], Joining]:
        """By process id and start time, the processes of this host that wait and still exist."""
        by_process = {}
        for path in self._folder.glob(JOINING_FILES):
            try:
                match json.loads(path.read_text(encoding="utf-8")):
                    case {
                        "rank": int(rank),
                        "world_size": int(size),
                        "host": self._host,
                        "pid": int(pid),
                        "where": str(where),
                        "one_host": bool(one_host),
                    }:
                        process = read_process(pid)
                        if process is not None and not process.is_gone:
                            by_process[pid, process.started] = Joining(rank, size, pid, where, one_host)
            except (OSError, ValueError):
                continue
        return by_process


def possible_ranks(waiting: set[int]) -> list[int]:
    """Processes below this one that may still become a rank: no launcher and no helper of a rank that waits."""
    processes = [process for process in descendants(os.getpid()) if not process.is_gone]
    parents = {process.pid: process.parent for process in processes}
    launchers = {ancestor for pid in waiting for ancestor in _ancestors(pid, parents)}
    return [
        process.pid
        for process in processes
        if process.pid not in launchers
        and not waiting & {process.pid, *_ancestors(process.pid, parents)}
        and process.name not in _OF_PIPES
        and not _is_isolated(process.pid)
    ]


def _ancestors(pid: int, parents: dict[int, int]) -> Iterable[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


def _is_isolated(pid: int) -> bool:
    """Whether it is an interpreter that ddpcheck cannot enter, such as the helper of this launcher."""
    try:
        return b"-I" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3]
    except OSError:
        return False
