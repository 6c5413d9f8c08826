"""Compares this rank's looks with those of its neighbours on the board, and keeps the evidence."""

from __future__ import annotations

import base64
import time
from collections import Counter
from typing import TYPE_CHECKING

from ddpcheck.probes.live_compare.snapshot import RecentSnapshots, Snapshot
from ddpcheck.probes.tensor_dump import dump_tensors
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, Stage, TensorKind

if TYPE_CHECKING:
    from ddpcheck.agent.shm_exchange import Entry, ShmExchange
    from ddpcheck.probes.live_compare.store import StoreCompare
    from ddpcheck.probes.probe import ProbeContext

LEAF = 8
# One exact, and two more for ranks that run apart and have to meet at a later step.
MOST_CAPTURES = 3
MOST_DETAILS = 6
HOLD_SECONDS = 5.0

# A rewrite may be made good before the step; at the end there is nothing left to stop.
_NO_REASON_TO_STOP = (Stage.REWRITTEN, Stage.BUFFERS_END)


class NodeCompare:
    """Nobody waits: a rank that is ahead learns of a disagreement late, and shows what it still remembers."""

    def __init__(self, context: ProbeContext, board: ShmExchange, across: StoreCompare | None = None) -> None:
        self._context = context
        self._board = board
        self._across = across
        self._mine: RecentSnapshots[Snapshot] = RecentSnapshots(64)
        self._theirs: RecentSnapshots[dict[int, Entry]] = RecentSnapshots(256)
        # The most that ever spoke of one moment: ranks on other nodes are not on this board.
        self._neighbours = 0
        # Parameters, buffers and gradients each have their own: one must not use up the others'.
        self._details: Counter[TensorKind] = Counter()
        self._captures: Counter[TensorKind] = Counter()
        # Modules whose next look is to be kept whole, since an earlier disagreement was seen too late.
        self._due: set[tuple[int, TensorKind]] = set()
        self._held = False

    def publish(self, look: Snapshot) -> None:
        look.number = self._board.publish(look.key, look.root, look.leaves)
        self._mine.put(look.key, look)
        if _whose(look) in self._due:
            self._capture(look, None)
        for entry in (self._theirs.get(look.key) or {}).values():
            self._check(look, entry)
        if self._across is not None:
            self._across.offer(look)
        self.catch_up()

    def catch_up(self) -> None:
        """Look at what the others have published since the last time."""
        for entry in self._board.news():
            known = self._theirs.get(entry.key)
            if known is None:
                known = {}
                self._theirs.put(entry.key, known)
            known[entry.slot] = entry
            self._neighbours = max(self._neighbours, len(known))
            look = self._mine.get(entry.key)
            if look is not None:
                self._check(look, entry)
        for key in self._across.news() if self._across is not None else ():
            look = self._mine.get(key)
            if look is not None:
                self._keep(look, None)

    def linger(self, look: Snapshot, deadline: float) -> None:
        """At the very end, give neighbours a moment to reach the last look: the training loop is over."""
        while time.monotonic() < deadline:
            self.catch_up()
            if len(self._theirs.get(look.key) or {}) >= self._neighbours:
                return
            time.sleep(0.01)

    def part(self, deadline: float) -> None:
        """After the last look of all: hear what other nodes say of it, for a moment."""
        if self._across is not None:
            self._across.linger(deadline)
            self.catch_up()

    def _check(self, look: Snapshot, entry: Entry) -> None:
        if entry.root != look.root:
            self._keep(look, entry)

    def _keep(self, look: Snapshot, entry: Entry | None) -> None:
        """The evidence of a disagreement; without an entry it is with another node."""
        self._detail(look)
        if look.current:
            self._capture(look, entry)
        else:
            self._due.add(_whose(look))
        if self._context.config.fail_fast and look.moment.stage not in _NO_REASON_TO_STOP:
            self._hold()

    def _hold(self) -> None:
        """The launcher has been asked to stop the job here: give it the time to, once."""
        if not self._held:
            self._held = True
            time.sleep(HOLD_SECONDS)

    def _detail(self, look: Snapshot) -> None:
        if look.detailed or self._details[look.moment.of] >= MOST_DETAILS:
            return
        look.detailed = True
        self._details[look.moment.of] += 1
        moment = look.moment
        self._context.write(
            DetailRecord(
                module=moment.tracked.index,
                stage=moment.stage.value,
                step=moment.step,
                of=moment.of.value,
                optimizer=moment.optimizer,
                leaves=_text(b"".join(leaf[:LEAF] for leaf in look.leaves)),
                width=LEAF,
                samples=_text(look.samples),
            )
        )

    def _capture(self, look: Snapshot, entry: Entry | None) -> None:
        """Write the differing tensors to a file of their own, while they still are what the digests say."""
        if look.captured or self._captures[look.moment.of] >= MOST_CAPTURES:
            return
        if not look.moment.tracked.parameters:
            return  # word came after the model had gone
        look.captured = True
        self._captures[look.moment.of] += 1
        self._due.discard(_whose(look))
        self._detail(look)
        moment = look.moment
        others = self._board.leaves_of(entry.slot, look.key) if entry is not None else None
        places = list(range(len(look.leaves)))
        if others is not None and len(others) == len(look.leaves):
            places = [p for p in places if look.leaves[p][:LEAF] != others[p]]
        file, whole, cut = dump_tensors(self._context, moment, places)
        self._board.mark_captured(look.number, look.key, look.root)
        self._context.write(
            CaptureRecord(
                module=moment.tracked.index,
                stage=moment.stage.value,
                step=moment.step,
                of=moment.of.value,
                optimizer=moment.optimizer,
                file=file,
                tensors=whole,
                cut=cut,
            )
        )


def _whose(look: Snapshot) -> tuple[int, TensorKind]:
    return look.moment.tracked.index, look.moment.of


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
