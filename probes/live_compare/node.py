"""Snapshots, the digests of one module at one stage of a step, and their comparison on a node.

Compares snapshots of this rank with those of its peers on the node, and records the evidence of a mismatch."""

from __future__ import annotations

import base64
import functools
import hashlib
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ddpcheck.probes.live_compare.tensor_dump import dump_tensors
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, Stage, TensorKind

if TYPE_CHECKING:
    from ddpcheck.agent.shm_exchange import Entry, ShmExchange
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.probes.digest import Leaves
    from ddpcheck.probes.live_compare.store import StoreCompare
    from ddpcheck.probes.probe import ProbeContext


Value = TypeVar("Value")


class SnapshotKey(NamedTuple):
    """Which tensors a snapshot covers, and when it was taken; all ranks make the same keys."""

    tracked: TrackedModule
    stage: Stage
    of: TensorKind
    step: int
    optimizer: int | None = None

    def hash(self, session: str) -> bytes:
        """Eight bytes that identify the key on all ranks of a session."""
        tracked, stage, of, step, optimizer = self
        prefix = _key_prefix(session, tracked.key, stage, of, optimizer)
        return hashlib.blake2b(b"%s%d" % (prefix, step), digest_size=8).digest()


@functools.lru_cache(maxsize=256)
def _key_prefix(session: str, module: str, stage: Stage, of: TensorKind, optimizer: int | None) -> bytes:
    """What all steps have in common: formatting it takes longer than hashing."""
    return f"{session}|{module}|{stage}|{of}|{optimizer}|".encode()


@dataclass(eq=False)
class Snapshot:
    """The digests of the tensors that `key` describes."""

    key: SnapshotKey
    key_hash: bytes
    root: bytes
    leaves: Leaves
    samples: bytes
    # Sequence number in the exchange; -1: not published.
    number: int = -1
    # Whether the tensors still have the values of the snapshot.
    current: bool = True
    detailed: bool = False
    captured: bool = False


class RecentSnapshots(Generic[Value]):
    """A dict by key hash that drops its oldest entries: memory does not grow with steps."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key_hash: bytes) -> Value | None:
        return self._items.get(key_hash)

    def put(self, key_hash: bytes, value: Value) -> None:
        self._items[key_hash] = value
        if len(self._items) > self._limit:
            self._items.popitem(last=False)


# Bytes of each leaf that ranks exchange.
LEAF = 8
# One of the mismatch itself, and two more for ranks that are not in the same step and match at a later one.
MAX_CAPTURES = 3
MAX_DETAILS = 6
HOLD_SECONDS = 5.0

# A rewrite may be reverted before the step; at the end of the job there is nothing left to stop. Gradients, and
# parameters right after a step, may differ by design: what counts is whether parameters differ where they are used.
_NOT_FATAL = (Stage.REWRITTEN, Stage.BUFFERS_END, Stage.APPLIED)


class NodeCompare:
    """Never waits: a rank that is ahead sees a mismatch late, and records what it still has."""

    def __init__(
        self, context: ProbeContext, exchange: ShmExchange, store_compare: StoreCompare | None = None
    ) -> None:
        self._context = context
        self._exchange = exchange
        self._store_compare = store_compare
        self._own: RecentSnapshots[Snapshot] = RecentSnapshots(64)
        self._received: RecentSnapshots[dict[int, Entry]] = RecentSnapshots(256)
        # The largest number of peers with the same key: ranks on other nodes are not in this exchange.
        self._peers = 0
        # Parameters, buffers and gradients have separate limits.
        self._details: Counter[TensorKind] = Counter()
        self._captures: Counter[TensorKind] = Counter()
        # Modules whose next snapshot is dumped, since an earlier mismatch was seen too late, and what differed there.
        self._capture_next: dict[tuple[int, TensorKind], list[int]] = {}
        self._held = False
        # Modules whose parameters differed after a step: they are compared again where they are used.
        self._unconfirmed: set[int] = set()
        # Modules whose parameters differed there as well: nothing is left to find out.
        self._diverged: set[int] = set()

    @property
    def has_unconfirmed(self) -> bool:
        """Whether `take_unconfirmed` is true of a module."""
        return bool(self._unconfirmed)

    def take_unconfirmed(self, module: int) -> bool:
        """Whether this rank's parameters differed from a peer's after a step, and were not compared again yet."""
        if module not in self._unconfirmed:
            return False
        self._unconfirmed.remove(module)
        return True

    def publish(self, snapshot: Snapshot) -> None:
        snapshot.number = self._exchange.publish(
            snapshot.key_hash, snapshot.root, snapshot.leaves.narrow(LEAF)
        )
        self._own.put(snapshot.key_hash, snapshot)
        # Values of a later step would be no evidence for this one.
        dumped = self._capture_next and snapshot.key.stage is not Stage.USED
        if dumped and snapshot.current and _tensors(snapshot) in self._capture_next:
            self._capture(snapshot, None)
        received = self._received.get(snapshot.key_hash)
        if received is not None:
            for entry in received.values():
                self._check(snapshot, entry)
        if self._store_compare is not None:
            self._store_compare.publish(snapshot)
        self.catch_up()

    def needs_values(self, module: int, of: TensorKind) -> bool:
        """Whether the next snapshot of these tensors is dumped: worth one wait for a device, the job is broken."""
        return (module, of) in self._capture_next

    def catch_up(self) -> None:
        """Compare with everything that peers have published since the last call."""
        for entry in self._exchange.new_entries():
            received = self._received.get(entry.key)
            if received is None:
                received = {}
                self._received.put(entry.key, received)
            received[entry.slot] = entry
            self._peers = max(self._peers, len(received))
            snapshot = self._own.get(entry.key)
            if snapshot is not None:
                self._check(snapshot, entry)
        for key_hash in self._store_compare.take_mismatches() if self._store_compare is not None else ():
            snapshot = self._own.get(key_hash)
            if snapshot is not None:
                self._record(snapshot, None)

    def wait_for_peers(self, snapshot: Snapshot, deadline: float) -> None:
        """After the training loop, give peers a moment to publish their last snapshot."""
        # Modules may have groups of different sizes.
        others = len(snapshot.key.tracked.group) - 1
        while time.monotonic() < deadline:
            self.catch_up()
            if len(self._received.get(snapshot.key_hash) or {}) >= min(self._peers, others):
                return
            time.sleep(0.01)

    def wait_for_nodes(self, deadline: float) -> None:
        """After the last snapshot, give other nodes a moment to compare it."""
        if self._store_compare is not None:
            self._store_compare.finish(deadline)
            self.catch_up()

    def _check(self, snapshot: Snapshot, entry: Entry) -> None:
        if entry.root != snapshot.root:
            self._record(snapshot, entry)

    def _record(self, snapshot: Snapshot, entry: Entry | None) -> None:
        """Record the evidence of a mismatch; without an entry it is with another node."""
        self._context.budget.check_everything()
        key = snapshot.key
        if key.stage is Stage.USED:
            # The evidence is that of the step, which was recorded first.
            self._diverged.add(key.tracked.index)
            self._unconfirmed.discard(key.tracked.index)
            if self._context.config.fail_fast:
                self._hold()
            return
        after_step = key.stage is Stage.PARAMS and key.optimizer is not None
        if after_step and key.of is TensorKind.PARAMETERS and key.tracked.index not in self._diverged:
            self._unconfirmed.add(key.tracked.index)
        self._write_detail(snapshot)
        if snapshot.current:
            self._capture(snapshot, entry)
        else:
            self._capture_next.setdefault(_tensors(snapshot), self._differing(snapshot, entry))
        if self._context.config.fail_fast and not after_step and key.stage not in _NOT_FATAL:
            self._hold()

    def _differing(self, snapshot: Snapshot, entry: Entry | None) -> list[int]:
        """Indices of the tensors that differ from those of a peer; empty where its leaves are not known."""
        others = self._exchange.leaves_of(entry.slot, snapshot.key_hash) if entry is not None else None
        if others is None or len(others) != len(snapshot.leaves):
            return []
        return [index for index in range(len(others)) if snapshot.leaves[index][:LEAF] != others[index]]

    def _hold(self) -> None:
        """The launcher stops the job at this step: give it time to, once."""
        if not self._held:
            self._held = True
            time.sleep(HOLD_SECONDS)

    def _write_detail(self, snapshot: Snapshot) -> None:
        key = snapshot.key
        if snapshot.detailed or self._details[key.of] >= MAX_DETAILS:
            return
        snapshot.detailed = True
        self._details[key.of] += 1
        self._context.write(
            DetailRecord(
                module=key.tracked.index,
                stage=key.stage.value,
                step=key.step,
                of=key.of.value,
                optimizer=key.optimizer,
                leaves=_base64(snapshot.leaves.narrow(LEAF)),
                width=LEAF,
                samples=_base64(snapshot.samples),
            )
        )

    def _capture(self, snapshot: Snapshot, entry: Entry | None) -> None:
        """Write the differing tensors to a file while they still match the digests."""
        key = snapshot.key
        if snapshot.captured or self._captures[key.of] >= MAX_CAPTURES:
            return
        if not key.tracked.parameters:
            return  # the mismatch was reported after the model was deleted
        snapshot.captured = True
        self._captures[key.of] += 1
        first = self._capture_next.pop(_tensors(snapshot), [])
        self._write_detail(snapshot)
        indices = self._differing(snapshot, entry)
        if not indices:
            # The limit of bytes must not be used up by large tensors that are equal.
            indices = list(dict.fromkeys([*first, *range(len(snapshot.leaves))]))
        file, complete, truncated = dump_tensors(self._context, key, indices)
        self._exchange.mark_captured(snapshot.number, snapshot.key_hash, snapshot.root)
        self._context.write(
            CaptureRecord(
                module=key.tracked.index,
                stage=key.stage.value,
                step=key.step,
                of=key.of.value,
                optimizer=key.optimizer,
                file=file,
                tensors=complete,
                cut=truncated,
            )
        )


def _tensors(snapshot: Snapshot) -> tuple[int, TensorKind]:
    return snapshot.key.tracked.index, snapshot.key.of


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
