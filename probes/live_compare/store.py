"""Compares snapshots with those of other nodes through the job's own store, in a thread beside the training thread.

Ranks of one node compare through shared memory. On each node one rank represents a module. It writes the digest of a
snapshot to the store if no other node has done so, and else reads the digest that is there. No rank waits for another.
A rank that sees a mismatch stores a notice that all nodes poll for, so that each node can record the mismatch itself.
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

from ddpcheck.guard import GUARD
from ddpcheck.probes.live_compare.node import RecentSnapshots, Snapshot
from ddpcheck.records.kinds.rank import NodeMismatchRecord, NodesRecord
from ddpcheck.wakeup import Wakeup

if TYPE_CHECKING:
    from ddpcheck.probes.probe import ProbeContext


# Rank 0 collects the placements of all ranks and stores them under one key. After this many attempts without it, a
# node collects them itself.
_MAX_ATTEMPTS = 20

# The node's id and the host name.
Placement = tuple[str, str]


class RankPlacement:
    """Used by the comparison thread."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._attempts = 0

    def publish(self, store: Any, node: str) -> None:
        """Store the placement of this rank."""
        store.set(self._key(self._rank), json.dumps([node, socket.gethostname()]))
        store.add(f"{self._prefix}/placed", 1)

    def read(self, store: Any, partial: bool) -> dict[int, Placement]:
        """By rank, when all ranks have published; with `partial` those that have. Empty: not yet."""
        # Reading a count is one small request; checking the key of every rank would be many.
        if store.add(f"{self._prefix}/placed", 0) < self._world_size:
            ranks = [rank for rank in range(self._world_size) if partial and store.check([self._key(rank)])]
            return self._collect(store, ranks)
        if self._rank:
            if store.check([self._all_key]):
                return _decode(store.get(self._all_key))
            self._attempts += 1
            if self._attempts < _MAX_ATTEMPTS and not partial:
                return {}
        placements = self._collect(store, range(self._world_size))
        if not self._rank:
            store.set(self._all_key, _encode(placements))
        return placements

    @property
    def _all_key(self) -> str:
        return f"{self._prefix}/placements"

    def _collect(self, store: Any, ranks: Iterable[int]) -> dict[int, Placement]:
        """In one request, if the store supports it."""
        ranks = list(ranks)
        keys = [self._key(rank) for rank in ranks]
        in_one_request = bool(keys) and getattr(store, "has_extended_api", bool)()
        values = store.multi_get(keys) if in_one_request else [store.get(key) for key in keys]
        return {rank: tuple(json.loads(text)) for rank, text in zip(ranks, values, strict=True)}

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"


def _encode(placements: dict[int, Placement]) -> str:
    """Each node once, and for each rank the index of its node."""
    nodes = list(dict.fromkeys(placements.values()))
    indices = {placement: index for index, placement in enumerate(nodes)}
    by_rank = [indices[placements[rank]] for rank in sorted(placements)]
    return json.dumps([nodes, by_rank], separators=(",", ":"))


def _decode(text: bytes) -> dict[int, Placement]:
    nodes, by_rank = json.loads(text)
    return {rank: tuple(nodes[index]) for rank, index in enumerate(by_rank)}


# Snapshots that wait for the store or for another node; older ones are dropped.
MAX_WAITING = 256
# Keys that this rank keeps in the store; older ones are deleted.
MAX_KEYS = 256
# Mismatch records per kind of tensor of a module: the first is the evidence, a few more show how it develops.
MAX_RECORDS = 3
# How often the store is polled for a notice of another node, or for a second node.
POLL_SECONDS = 0.5
# All ranks of a job start within this time; after it there is only one node.
RENDEZVOUS_SECONDS = 120.0
WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class PublishedDigest:
    """A snapshot without its tensors."""

    key_hash: bytes
    root: bytes
    module: int
    stage: str
    of: str
    step: int
    optimizer: int | None


class StoreCompare:
    """Uses the store from its own thread; stops for good after an error there."""

    def __init__(self, context: ProbeContext, store: Any, node: str, algorithm: str) -> None:
        self._context = context
        self._store = store
        self._node = node
        self._prefix = f"ddpcheck/nodes/{context.session}"
        # Digests of different algorithms cannot be compared: each has its own keys.
        self._digest_prefix = f"{self._prefix}/{algorithm}"
        self._placement = RankPlacement(self._prefix, context.rank, context.world_size)
        self._waiting: deque[PublishedDigest] = deque(maxlen=MAX_WAITING)
        self._mismatches: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._published: RecentSnapshots[PublishedDigest] = RecentSnapshots(MAX_WAITING)
        # By module, whether this rank represents it.
        self._represents: dict[int, bool] = {}
        self._own_keys: deque[str] = deque()
        self._records: Counter[tuple[int, str, str]] = Counter()
        self._notice = ""
        self._others: dict[str, str] = {}
        self._compared = 0
        self._placed = False
        self._wake = Wakeup()
        self._over = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()
        self.run = GUARD.protect("across_nodes", "run", self._run)
        threading.Thread(target=self.run, name="ddpcheck-store-compare", daemon=True).start()

    def publish(self, snapshot: Snapshot) -> None:
        """On the training thread: queue a snapshot for comparison."""
        key = snapshot.key
        tracked = key.tracked
        if tracked.index not in self._represents:
            self._represents[tracked.index] = self._is_representative(tracked.group)
        if self._represents[tracked.index] and not self._ended.is_set():
            self._waiting.append(
                PublishedDigest(
                    snapshot.key_hash,
                    snapshot.root,
                    tracked.index,
                    key.stage.value,
                    key.of.value,
                    key.step,
                    key.optimizer,
                )
            )
            self._wake.set()

    def take_mismatches(self) -> list[bytes]:
        """On the training thread: key hashes of snapshots that differ from another node's."""
        mismatches = []
        while self._mismatches:
            mismatches.append(self._mismatches.popleft())
        return mismatches

    def finish(self, deadline: float) -> None:
        """At the end: wait a moment until the last snapshots are compared on all nodes."""
        if os.getpid() == self._pid:
            self._over.set()
            self._wake.set()
            self._ended.wait(max(0.0, min(deadline - time.monotonic(), WAIT_SECONDS)))

    def _is_representative(self, group: tuple[int, ...]) -> bool:
        """Whether this rank is the lowest of the group's ranks on this node."""
        exchange = self._context.exchange
        local = set(group) & (exchange.ranks() if exchange is not None else set())
        return self._context.rank == min(local | {self._context.rank})

    def _run(self) -> None:
        try:
            # A separate connection: the user's requests must not queue behind ours.
            if hasattr(self._store, "clone"):
                self._store = self._store.clone()
            if self._find_other_node():
                self._compare_until_over()
        except (RuntimeError, OSError, ValueError):
            # The rank that holds the store has exited, as at the end of every job.
            pass
        finally:
            self._ended.set()
            self._store = None

    def _find_other_node(self) -> bool:
        """Whether there is another node; the second one to start announces it."""
        self._placement.publish(self._store, self._node)
        if self._set_once("first_node", self._node) != self._node:
            self._set_once("several_nodes", self._node)
            return True
        deadline = time.monotonic() + RENDEZVOUS_SECONDS
        while time.monotonic() < deadline:
            if self._store.check([f"{self._prefix}/several_nodes"]):
                return True
            if self._over.wait(POLL_SECONDS):
                return bool(self._store.check([f"{self._prefix}/several_nodes"]))
        return False

    def _compare_until_over(self) -> None:
        polled = 0.0
        while True:
            over = self._over.is_set()
            while self._waiting:
                self._compare(self._waiting.popleft())
            # Ranks that represent no module do not use the store.
            if self._compared and (over or time.monotonic() - polled >= POLL_SECONDS):
                polled = time.monotonic()
                self._read_notice()
                self._read_placements(partial=over)
            if over:
                self._finish_with_other_nodes()
                return
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _compare(self, own: PublishedDigest) -> None:
        if not self._compared:
            self._store.add(f"{self._prefix}/representatives", 1)
        self._compared += 1
        self._published.put(own.key_hash, own)
        key = f"{self._digest_prefix}/{own.key_hash.hex()}"
        own_text = json.dumps([own.root.hex(), self._context.rank, socket.gethostname()])
        stored_text = str(self._store.compare_set(key, "", own_text).decode())
        if stored_text == own_text:
            self._own_keys.append(key)
            if len(self._own_keys) > MAX_KEYS:
                self._store.delete_key(self._own_keys.popleft())
            return
        root, rank, host = json.loads(stored_text)
        if root != own.root.hex():
            self._record_mismatch(own, rank, host, root)
            sides = [json.loads(stored_text), json.loads(own_text)]
            self._set_once("mismatch", json.dumps([own.key_hash.hex(), *sides]))

    def _read_notice(self) -> None:
        """Another node may see a mismatch that this one, which published first, cannot see."""
        if self._notice or not self._store.check([f"{self._prefix}/mismatch"]):
            return
        self._notice = str(self._store.get(f"{self._prefix}/mismatch").decode())
        key_hash, *sides = json.loads(self._notice)
        own = self._published.get(bytes.fromhex(key_hash))
        if own is not None:
            for root, rank, host in sides:
                if root != own.root.hex():
                    # It may be the first of all: records of later mismatches must not exclude it.
                    self._record_mismatch(own, rank, host, root, limit=2 * MAX_RECORDS)

    def _record_mismatch(
        self, own: PublishedDigest, rank: int, host: str, root: str, limit: int = MAX_RECORDS
    ) -> None:
        tensors = (own.module, own.stage, own.of)
        self._mismatches.append(own.key_hash)
        if self._records[tensors] >= limit:
            return
        self._records[tensors] += 1
        self._context.write(
            NodeMismatchRecord(
                module=own.module,
                stage=own.stage,
                of=own.of,
                step=own.step,
                optimizer=own.optimizer,
                root=own.root.hex(),
                other_root=root,
                other_rank=rank,
                other_host=host,
            )
        )

    def _read_placements(self, partial: bool) -> None:
        """Record which ranks are on other nodes, when all ranks have published their placement."""
        if self._placed or not self._compared:
            return
        placements = self._placement.read(self._store, partial)
        if not placements:
            return
        self._placed = True
        self._others = {str(rank): host for rank, (node, host) in placements.items() if node != self._node}
        self._context.write(NodesRecord(self._others))

    def _finish_with_other_nodes(self) -> None:
        """Wait a moment: the last snapshots are compared only when all nodes have published them."""
        if not self._compared:
            return
        finished = self._store.add(f"{self._prefix}/finished", 1)
        deadline = time.monotonic() + WAIT_SECONDS
        while (
            finished < self._store.add(f"{self._prefix}/representatives", 0) and time.monotonic() < deadline
        ):
            time.sleep(0.02)
            finished = self._store.add(f"{self._prefix}/finished", 0)
        self._read_notice()
        self._context.write(NodesRecord(self._others, compared=self._compared))

    def _set_once(self, name: str, value: str) -> str:
        """Set a key that is not set yet; returns the value that it has."""
        return str(self._store.compare_set(f"{self._prefix}/{name}", "", value).decode())
