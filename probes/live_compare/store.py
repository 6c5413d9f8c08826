"""Compares looks with those of other nodes through the job's own store, off the training thread.

Ranks of one node see each other on the board. Of each node one rank speaks for a module: it lays the digest of a
moment down in the store if it is the first to come there, and gets back what lies there if it is not. Nobody waits.
Whoever sees a difference leaves a note that all nodes look for, so that each of them can tell it by itself.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpcheck.agent.guard import GUARD
from ddpcheck.probes.live_compare.snapshot import RecentSnapshots, Snapshot
from ddpcheck.records.kinds.nodes import NodeMismatchRecord, NodesRecord

if TYPE_CHECKING:
    from ddpcheck.probes.probe import ProbeContext


# Rank 0 gathers what all ranks said and lays it down as one piece. Asked so often in vain, a node gathers for itself.
_PATIENCE = 20

# The node and the host's name.
Where = tuple[str, str]


class RankPlacement:
    """Asked from the thread that speaks with other nodes."""

    def __init__(self, drawer: str, rank: int, world_size: int) -> None:
        self._drawer, self._rank, self._world_size = drawer, rank, world_size
        self._asked = 0

    def say(self, store: Any, node: str) -> None:
        """Where this rank is."""
        store.set(self._place(self._rank), json.dumps([node, socket.gethostname()]))
        store.add(f"{self._drawer}/here", 1)

    def ask(self, store: Any, at_last: bool) -> dict[int, Where]:
        """By rank, once all have said it; `at_last` those that have. Empty: not yet."""
        # A count is one small question: the places of all ranks would be as many keys.
        if store.add(f"{self._drawer}/here", 0) < self._world_size:
            some = [rank for rank in range(self._world_size) if at_last and store.check([self._place(rank)])]
            return self._gather(store, some)
        if self._rank:
            if store.check([self._gathered]):
                return _unfolded(store.get(self._gathered))
            self._asked += 1
            if self._asked < _PATIENCE and not at_last:
                return {}
        found = self._gather(store, range(self._world_size))
        if not self._rank:
            store.set(self._gathered, _folded(found))
        return found

    @property
    def _gathered(self) -> str:
        return f"{self._drawer}/everyone"

    def _gather(self, store: Any, ranks: Iterable[int]) -> dict[int, Where]:
        """At once, where the store can do that."""
        asked = list(ranks)
        keys = [self._place(rank) for rank in asked]
        at_once = bool(keys) and getattr(store, "has_extended_api", bool)()
        said = store.multi_get(keys) if at_once else [store.get(key) for key in keys]
        return {rank: tuple(json.loads(text)) for rank, text in zip(asked, said, strict=True)}

    def _place(self, rank: int) -> str:
        return f"{self._drawer}/rank/{rank}"


def _folded(found: dict[int, Where]) -> str:
    """Each node once, and for each rank the number of its node."""
    nodes = list(dict.fromkeys(found.values()))
    numbers = {where: number for number, where in enumerate(nodes)}
    return json.dumps([nodes, [numbers[found[rank]] for rank in sorted(found)]], separators=(",", ":"))


def _unfolded(text: bytes) -> dict[int, Where]:
    nodes, numbers = json.loads(text)
    return {rank: tuple(nodes[number]) for rank, number in enumerate(numbers)}


# Moments that wait for the store, or for another node to come: older ones are let go.
MOST_WAITING = 256
# What this rank has laid down in the store is taken away when it has laid down so many more.
MOST_KEPT = 256
# Records of partings, for each kind of tensor of a module: the first tells, a few more show where it leads.
MOST_RECORDS = 3
# How often the store is asked whether another node has seen a difference, or is there at all.
ASK_SECONDS = 0.5
# Ranks of a job come within this time; later there is only one node.
MEETING_SECONDS = 120.0
LINGER_SECONDS = 2.0


@dataclass(frozen=True)
class PublishedDigest:
    """A look, without the tensors behind it."""

    key: bytes
    root: bytes
    module: int
    stage: str
    of: str
    step: int
    optimizer: int | None


class StoreCompare:
    """Speaks with other nodes from a thread of its own; after an error in there it is silent."""

    def __init__(self, context: ProbeContext, store: Any, node: str, algorithm: str) -> None:
        self._context = context
        self._store = store
        self._node = node
        # Digests of another kind cannot be compared: they get drawers of their own.
        self._drawer = f"ddpcheck/nodes/{context.session}"
        self._looks = f"{self._drawer}/{algorithm}"
        self._whereabouts = RankPlacement(self._drawer, context.rank, context.world_size)
        self._waiting: deque[PublishedDigest] = deque(maxlen=MOST_WAITING)
        self._told: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._known: RecentSnapshots[PublishedDigest] = RecentSnapshots(MOST_WAITING)
        self._speaks: dict[int, bool] = {}
        self._laid_down: deque[str] = deque()
        self._records: Counter[tuple[int, str, str]] = Counter()
        self._note = ""
        self._others: dict[str, str] = {}
        self._spoken = 0
        self._looked_around = False
        self._wake = threading.Event()
        self._over = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()
        self.run = GUARD.protect("across_nodes", "run", self._run)
        threading.Thread(target=self.run, name="ddpcheck-across", daemon=True).start()

    def offer(self, look: Snapshot) -> None:
        """On the training thread: leave a look to be compared."""
        moment = look.moment
        tracked = moment.tracked
        if tracked.index not in self._speaks:
            self._speaks[tracked.index] = self._speaks_for(tracked.group)
        if self._speaks[tracked.index] and not self._ended.is_set():
            self._waiting.append(
                PublishedDigest(
                    look.key,
                    look.root,
                    tracked.index,
                    moment.stage.value,
                    moment.of.value,
                    moment.step,
                    moment.optimizer,
                )
            )
            self._wake.set()

    def news(self) -> list[bytes]:
        """On the training thread: keys of looks that are known to differ from another node's."""
        news = []
        while self._told:
            news.append(self._told.popleft())
        return news

    def linger(self, deadline: float) -> None:
        """At the end: let the last looks be compared, and other nodes come to theirs, for a moment."""
        if os.getpid() == self._pid:
            self._over.set()
            self._wake.set()
            self._ended.wait(max(0.0, min(deadline - time.monotonic(), LINGER_SECONDS)))

    def _speaks_for(self, group: tuple[int, ...]) -> bool:
        """Whether this rank is the first of a module's that are on this node's board."""
        board = self._context.exchange
        here = set(group) & (board.ranks() if board is not None else set())
        return self._context.rank == min(here | {self._context.rank})

    def _run(self) -> None:
        try:
            # A connection of our own: the user's calls must not stand in line behind ours.
            if hasattr(self._store, "clone"):
                self._store = self._store.clone()
            if self._meet():
                self._compare()
        except (RuntimeError, OSError, ValueError):
            # The store went away with the rank that held it, as at the end of every job.
            pass
        finally:
            self._ended.set()
            self._store = None

    def _meet(self) -> bool:
        """Whether there is another node; the one that comes second says so."""
        self._whereabouts.say(self._store, self._node)
        if self._agree("first", self._node) != self._node:
            self._agree("many", self._node)
            return True
        deadline = time.monotonic() + MEETING_SECONDS
        while time.monotonic() < deadline:
            if self._store.check([f"{self._drawer}/many"]):
                return True
            if self._over.wait(ASK_SECONDS):
                return bool(self._store.check([f"{self._drawer}/many"]))
        return False

    def _compare(self) -> None:
        asked = 0.0
        while True:
            over = self._over.is_set()
            while self._waiting:
                self._speak(self._waiting.popleft())
            # Ranks that speak for no module leave the store alone.
            if self._spoken and (over or time.monotonic() - asked >= ASK_SECONDS):
                asked = time.monotonic()
                self._look_for_note()
                self._look_around(at_last=over)
            if over:
                self._part()
                return
            self._wake.wait(ASK_SECONDS)
            self._wake.clear()

    def _speak(self, offer: PublishedDigest) -> None:
        if not self._spoken:
            self._store.add(f"{self._drawer}/speakers", 1)
        self._spoken += 1
        self._known.put(offer.key, offer)
        place = f"{self._looks}/{offer.key.hex()}"
        mine = json.dumps([offer.root.hex(), self._context.rank, socket.gethostname()])
        found = str(self._store.compare_set(place, "", mine).decode())
        if found == mine:
            self._laid_down.append(place)
            if len(self._laid_down) > MOST_KEPT:
                self._store.delete_key(self._laid_down.popleft())
            return
        root, rank, host = json.loads(found)
        if root != offer.root.hex():
            self._apart(offer, rank, host, root)
            self._agree("apart", json.dumps([offer.key.hex(), json.loads(found), json.loads(mine)]))

    def _look_for_note(self) -> None:
        """Another node may have seen what this one, being the first, could not."""
        if self._note or not self._store.check([f"{self._drawer}/apart"]):
            return
        self._note = str(self._store.get(f"{self._drawer}/apart").decode())
        key, *sides = json.loads(self._note)
        offer = self._known.get(bytes.fromhex(key))
        if offer is not None:
            for root, rank, host in sides:
                if root != offer.root.hex():
                    # It may be the first of all: those that were seen since must not keep it out.
                    self._apart(offer, rank, host, root, most=2 * MOST_RECORDS)

    def _apart(
        self, offer: PublishedDigest, rank: int, host: str, root: str, most: int = MOST_RECORDS
    ) -> None:
        kind = (offer.module, offer.stage, offer.of)
        self._told.append(offer.key)
        if self._records[kind] >= most:
            return
        self._records[kind] += 1
        self._context.write(
            NodeMismatchRecord(
                module=offer.module,
                stage=offer.stage,
                of=offer.of,
                step=offer.step,
                optimizer=offer.optimizer,
                root=offer.root.hex(),
                other_root=root,
                other_rank=rank,
                other_host=host,
            )
        )

    def _look_around(self, at_last: bool) -> None:
        """Once all ranks have said where they are: which of them are not on this node."""
        if self._looked_around or not self._spoken:
            return
        said = self._whereabouts.ask(self._store, at_last)
        if not said:
            return
        self._looked_around = True
        self._others = {str(rank): host for rank, (node, host) in said.items() if node != self._node}
        self._context.write(NodesRecord(self._others))

    def _part(self) -> None:
        """The last looks are compared only when all nodes have come to them: give them a moment."""
        if not self._spoken:
            return
        gone = self._store.add(f"{self._drawer}/gone", 1)
        deadline = time.monotonic() + LINGER_SECONDS
        while gone < self._store.add(f"{self._drawer}/speakers", 0) and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = self._store.add(f"{self._drawer}/gone", 0)
        self._look_for_note()
        self._context.write(NodesRecord(self._others, compared=self._spoken))

    def _agree(self, name: str, proposal: str) -> str:
        return str(self._store.compare_set(f"{self._drawer}/{name}", "", proposal).decode())
