"""Follows labels from the data loader to the loss: which class number each of them has there."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.losses.graph import loss_terms, targets_of
from ddpcheck.probes.samples.contents import MAX_DEPTH, MOST_PARTS
from ddpcheck.records.kinds.data import LabelsRecord

# Labels that are read of one batch.
MOST_LABELS = 64
# Batches of one loader that were returned and may not have been trained on: programs fetch the next one early.
_AHEAD = 2
# Different labels that are kept, and that are written.
MOST_CLASSES = 512
MOST_PAIRS = 64
# How often a label must have had the same number, in how many batches, and how often labels were repeated in all.
FEWEST_OF_PAIR = 8
FEWEST_BATCHES = 4
FEWEST_REPEATED = 32
# A program that changes the mapping more often than that draws its labels.
MOST_RESTARTS = 3
MOST_WATCHED = 32
MOST_PENDING = 32

Label = int | str


class Watched(NamedTuple):
    """A column of labels of a loader, the term of the loss, and how many batches the loader is ahead."""

    loader: int
    part: int
    term: int
    ahead: int


class ReturnedLabels(NamedTuple):
    """The labels of one batch: copies, since programs may write to them, and that of a device may be pending."""

    part: int
    # The number of all labels of the batch, of which some are kept.
    size: int
    values: list[Label] | HostCopy

    def ready(self) -> bool:
        return isinstance(self.values, list) or self.values.ready()

    def read(self) -> list[Label]:
        return self.values if isinstance(self.values, list) else list(self.values.rows()[0])


class PendingTargets(NamedTuple):
    """Class numbers that may still be on a device, and the labels they may belong to."""

    step: int
    module: int
    copy: HostCopy
    candidates: list[tuple[Watched, ReturnedLabels]]

    def ready(self) -> bool:
        return self.copy.ready() and all(labels.ready() for _, labels in self.candidates)


class LabelMapping:
    """What each label became, as long as the same label always becomes the same number."""

    def __init__(self, step: int, module: int) -> None:
        self.since = step
        self.module = module
        self.restarts = 0
        self.targets: dict[Label, int] = {}
        self.counts: dict[Label, int] = {}
        # Sorted data has many labels of one kind in one batch.
        self.batches: dict[Label, int] = {}
        self.repeated = 0
        self.written: dict[str, int] | None = None

    def add(self, step: int, labels: Sequence[Label], targets: Sequence[int]) -> None:
        if any(
            self.targets.get(label, target) != target for label, target in zip(labels, targets, strict=True)
        ):
            self.since = step
            self.restarts += 1
            self.targets.clear()
            self.counts.clear()
            self.batches.clear()
            self.repeated = 0
        for label, target in zip(labels, targets, strict=True):
            known = self.targets.setdefault(label, target)
            if known != target:
                # Within one batch: not a mapping at all.
                self.restarts = MOST_RESTARTS + 1
                return
            if label in self.counts:
                self.repeated += 1
            elif len(self.counts) >= MOST_CLASSES:
                del self.targets[label]
                continue
            self.counts[label] = self.counts.get(label, 0) + 1
        for label in self.counts.keys() & set(labels):
            self.batches[label] = self.batches.get(label, 0) + 1

    @property
    def drawn(self) -> bool:
        return self.restarts > MOST_RESTARTS

    def pairs(self) -> dict[str, int]:
        """The same labels on all ranks, if there are many: those with the smallest digests."""
        if self.drawn or self.repeated < FEWEST_REPEATED:
            return {}
        often = [
            label
            for label, count in self.counts.items()
            if count >= FEWEST_OF_PAIR and self.batches[label] >= FEWEST_BATCHES
        ]
        return {name_of(label): self.targets[label] for label in sorted(often, key=_digest)[:MOST_PAIRS]}


class LabelTracker:
    """The labels that loaders have returned, and what the losses were given. Read at some steps only."""

    def __init__(self) -> None:
        self.due = True
        # Of the latest training forward.
        self._module: int | None = None
        self._step = 0
        # By loader: the labels of its latest batches.
        self._returned: dict[int, deque[list[ReturnedLabels]]] = {}
        self._mappings: dict[Watched, LabelMapping] = {}
        self._pending: deque[PendingTargets] = deque()

    def returned(self, loader: int, batch: Any) -> None:
        batches = self._returned.setdefault(loader, deque(maxlen=_AHEAD))
        parts: list[Any] = []
        _add_columns(batch, parts, MAX_DEPTH)
        batches.appendleft([_returned(number, part) for number, part in enumerate(parts)])

    def forward(self, module: int, step: int) -> None:
        self._module, self._step = module, step

    def backward_called(self, root: Any) -> None:
        if not self._returned or self._module is None or len(self._pending) >= MOST_PENDING:
            return
        for number, term in enumerate(loss_terms(getattr(root, "grad_fn", None))):
            targets = targets_of(term)
            if targets is None or type(targets) is not torch.Tensor or not targets.is_contiguous():
                continue
            candidates = [
                (Watched(loader, labels.part, number, ahead), labels)
                for loader, batches in self._returned.items()
                for ahead, parts in enumerate(batches)
                for labels in parts
                if labels.size == targets.numel() and targets.numel()
            ]
            candidates = [each for each in candidates if not self._is_drawn(each[0])]
            if candidates:
                # A copy: programs may write to them before it is read.
                copy = copy_to_host(_sampled(targets.detach()).long().clone().view(1, -1))
                self._pending.append(PendingTargets(self._step, self._module, copy, candidates))

    def _is_drawn(self, watched: Watched) -> bool:
        mapping = self._mappings.get(watched)
        return mapping.drawn if mapping is not None else len(self._mappings) >= MOST_WATCHED

    def records(self, wait: bool = False) -> list[LabelsRecord]:
        """Mappings that are known now and were not before, or that are known no more; at the end all that changed."""
        while self._pending and (wait or self._pending[0].ready()):
            step, module, copy, candidates = self._pending.popleft()
            targets = copy.rows()[0]
            for watched, labels in candidates:
                mapping = self._mappings.setdefault(watched, LabelMapping(step, module))
                if not mapping.drawn:
                    mapping.add(step, labels.read(), targets)
        records = []
        for watched, mapping in self._mappings.items():
            pairs = mapping.pairs()
            before = mapping.written
            if (before is None and not pairs) or before == pairs or (before and pairs and not wait):
                continue
            mapping.written = pairs
            records.append(
                LabelsRecord(
                    watched.loader,
                    watched.part,
                    watched.term,
                    watched.ahead,
                    mapping.module,
                    mapping.since,
                    pairs,
                )
            )
        return records


def name_of(label: Label) -> str:
    """A text of the program appears as a digest."""
    if isinstance(label, int):
        return str(label)
    return f"#{hashlib.blake2b(label.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


def _digest(label: Label) -> bytes:
    return hashlib.blake2b(name_of(label).encode(), digest_size=4).digest()


def _add_columns(thing: Any, parts: list[Any], depth: int) -> None:
    """Columns of integers or texts, in order."""
    if len(parts) >= MOST_PARTS:
        return
    if isinstance(thing, torch.Tensor):
        # Subclasses may run the user's code when their values are read.
        plain = type(thing) is torch.Tensor and thing.layout is torch.strided and thing.is_contiguous()
        if plain and thing.dim() and not thing.is_floating_point() and not thing.is_complex():
            parts.append(thing)
    elif isinstance(thing, dict) and depth:
        for value in list(thing.values())[: 4 * MOST_PARTS]:
            _add_columns(value, parts, depth - 1)
    elif isinstance(thing, (list, tuple)) and depth:
        if thing and all(type(each) is str for each in thing):
            parts.append(thing)
            return
        for value in thing[: 4 * MOST_PARTS]:
            _add_columns(value, parts, depth - 1)


def _returned(number: int, part: torch.Tensor | Sequence[str]) -> ReturnedLabels:
    if isinstance(part, torch.Tensor):
        sampled = _sampled(part.detach())
        if part.is_cpu or not part.numel():
            return ReturnedLabels(number, part.numel(), [int(value) for value in sampled.tolist()])
        return ReturnedLabels(number, part.numel(), copy_to_host(sampled.long().clone().view(1, -1)))
    return ReturnedLabels(number, len(part), list(part[:: _stride(len(part))][:MOST_LABELS]))


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The same positions of labels and of class numbers."""
    return tensor.view(-1)[:: _stride(tensor.numel())][:MOST_LABELS]


def _stride(count: int) -> int:
    return -(-count // MOST_LABELS) or 1
