"""Which samples the samplers of a rank's data loaders drew, epoch by epoch."""

from __future__ import annotations

import base64
import hashlib
import weakref
import zlib
from array import array
from collections.abc import Iterator
from typing import Any

from ddpcheck import torch_compat
from ddpcheck.probes.samples.contents import MOST_PASSES, SampleContents, chosen_indices
from ddpcheck.records.kinds.data import EpochRecord, LoaderRecord

# Size limit of the map of drawn samples. For larger datasets it contains only indices that are multiples of a stride.
MOST_MARKED = 1 << 14
HEAD = 64
CHAIN = 6
# Epochs of one loader that are written with a map, and in total.
MOST_MAPS = 100
MOST_EPOCHS = 5000
# Limits the memory for programs that keep creating datasets.
MOST_LOADERS = 1000


class SampleDraws:
    """The samples that one pass over a loader has drawn so far. `from_start`: observed from its first draw."""

    def __init__(self, loader: TrackedLoader, number: int, iterator: Any, from_start: bool) -> None:
        self.loader = loader
        self.number = number
        self.iterator: weakref.ref[Any] = weakref.ref(iterator)
        self.exhausted = False
        self.drawn = 0
        self.batches = 0
        self.largest = 0
        # Training forwards that directly followed one of its batches, and their module.
        self.fed = 0
        self.module: int | None = None
        self.step = 0
        self.at = _number(loader.facts(iterator).get("epoch"))
        self._from_start = from_start
        # Batches that the loader has returned: workers draw further ahead.
        self.yielded = 0
        self._marks = bytearray(-(-loader.length // loader.stride)) if loader.length > 0 else bytearray()
        self._order = hashlib.blake2b(digest_size=8)
        self._head = array("q")
        self._not_integers = False
        # Not with loaders that return batches in another order than they were drawn.
        followed = loader.chosen if torch_compat.read(torch_compat.IN_ORDER, iterator, True) else frozenset()
        self.contents = SampleContents(followed if from_start and number < MOST_PASSES else frozenset())

    def add(self, index: Any) -> None:
        """Add one batch of indices, or one index. Indices that are not integers are only counted."""
        indices = index if isinstance(index, (list, tuple)) else [index]
        self.contents.drawn(index)
        self.batches += 1
        self.drawn += len(indices)
        self.largest = max(self.largest, len(indices))
        if self._not_integers:
            return
        try:
            numbers = array("q", indices)
        except (TypeError, ValueError, OverflowError):
            self._not_integers = True
            return
        self._order.update(numbers.tobytes())
        if len(self._head) < HEAD:
            self._head.extend(numbers[: HEAD - len(self._head)])
        self._mark(numbers)

    def _mark(self, numbers: array[int]) -> None:
        marks, stride = self._marks, self.loader.stride
        size = len(marks)
        for index in [number // stride for number in numbers if not number % stride]:
            if 0 <= index < size and marks[index] < 255:
                marks[index] += 1

    def update_yielded(self) -> None:
        """Read how many batches the loader has returned, as long as the iterator exists."""
        iterator = self.iterator()
        if iterator is not None:
            self.yielded = max(self.yielded, torch_compat.read(torch_compat.NUM_YIELDED, iterator, 0))

    @property
    def over(self) -> bool:
        return self.exhausted and self.yielded >= self.batches

    def record(self, with_map: bool) -> EpochRecord:
        known = not self._not_integers
        head = hashlib.blake2b(self._head.tobytes(), digest_size=6).hexdigest()
        return EpochRecord(
            loader=self.loader.ordinal,
            epoch=self.number,
            module=self.module or 0,
            step=self.step,
            drawn=self.drawn,
            batches=self.batches,
            largest=self.largest,
            fed=self.fed,
            yielded=self.yielded,
            complete=self.exhausted and self._from_start,
            map=_packed(self._marks) if known and with_map and self._from_start else "",
            repeated=sum(count - 1 for count in self._marks if count > 1),
            order=self._order.hexdigest() if known and self._from_start else "",
            head=head if known and self._from_start and len(self._head) >= 8 else "",
            at=self.at,
        )


class TrackedLoader:
    """One dataset with one kind of sampler, even if the program creates a new loader for every epoch."""

    def __init__(self, ordinal: int, iterator: Any, world_size: int) -> None:
        self.ordinal = ordinal
        # An IterableDataset has no indices.
        self.iterable = torch_compat.read(torch_compat.DATASET_KIND, iterator, 0) == 1
        self.length = -1 if self.iterable else _length(torch_compat.read(torch_compat.DATASET, iterator))
        self.stride = stride_for(self.length, world_size)
        self.chosen = chosen_indices(self.length)
        self.epochs = 0
        self.open: list[SampleDraws] = []
        self.written = 0
        self.described: LoaderRecord | None = None

    def facts(self, iterator: Any) -> dict[str, Any]:
        return facts_of(torch_compat.read(torch_compat.INDEX_SAMPLER, iterator))

    def begin(self, iterator: Any, from_start: bool) -> SampleDraws:
        draws = SampleDraws(self, self.epochs, iterator, from_start)
        self.epochs += 1
        self.open.append(draws)
        return draws

    def describe(self, iterator: Any, mark: str, columns: list[str], members: list[str]) -> None:
        facts = self.facts(iterator)
        self.described = LoaderRecord(
            loader=self.ordinal,
            length=self.length,
            stride=self.stride,
            sampler=facts["names"],
            iterable=self.iterable,
            shuffle=facts.get("shuffle"),
            replacement=bool(facts.get("replacement")),
            replicas=_number(facts.get("replicas")),
            share=_number(facts.get("share")),
            seed=_number(facts.get("seed")),
            mark=mark,
            columns=columns,
            members=members,
        )


class LoaderRegistry:
    """Finds the loader of an iterator. Holds only weak references to objects of the program."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[tuple[int, str], tuple[weakref.ref[Any], TrackedLoader]] = {}
        self._passes: weakref.WeakKeyDictionary[Any, SampleDraws] = weakref.WeakKeyDictionary()
        self.all: list[TrackedLoader] = []

    def draws(self, iterator: Any) -> SampleDraws | None:
        """The current pass of `iterator`; None if no draw of it was observed."""
        return self._passes.get(iterator)

    def pass_of(self, iterator: Any) -> tuple[SampleDraws, bool] | None:
        """The pass that a draw belongs to, and whether this is its first draw; None if there are too many loaders."""
        draws = self._passes.get(iterator)
        # With persistent workers, the same iterator is used again.
        restarted = draws is not None and (
            draws.exhausted or torch_compat.read(torch_compat.NUM_YIELDED, iterator, 0) < draws.yielded
        )
        if draws is not None and not restarted:
            return draws, False
        from_start = (
            torch_compat.read(torch_compat.NUM_YIELDED, iterator, 0) == 0
            and torch_compat.read(torch_compat.SEND_INDEX, iterator, 0) == 0
        )
        loader = self._loader(iterator)
        if loader is None:
            return None
        draws = self._passes[iterator] = loader.begin(iterator, from_start)
        return draws, True

    def _loader(self, iterator: Any) -> TrackedLoader | None:
        sampler = torch_compat.read(torch_compat.INDEX_SAMPLER, iterator)
        names = facts_of(sampler)["names"]
        for anchor in (torch_compat.read(torch_compat.DATASET, iterator), sampler, iterator):
            try:
                reference = weakref.ref(anchor)
            except TypeError:
                continue  # for example a list
            known = self._known.get((id(anchor), names))
            if known is not None and known[0]() is anchor:
                return known[1]
            if len(self.all) >= MOST_LOADERS:
                return None
            loader = TrackedLoader(len(self.all), iterator, self._world_size)
            self._known[id(anchor), names] = (reference, loader)
            self.all.append(loader)
            return loader
        return None


def facts_of(sampler: Any) -> dict[str, Any]:
    """Attributes of the samplers, the outermost sampler first. Attributes are read, nothing is called."""
    facts: dict[str, Any] = {}
    names: list[str] = []
    for each in _chain(sampler):
        attributes = vars(each) if hasattr(each, "__dict__") else {}
        names.append(type(each).__name__)
        for fact, aliases in (
            ("replicas", ("num_replicas", "num_processes", "world_size")),
            ("share", ("rank", "process_index")),
            ("seed", ("seed",)),
            ("epoch", ("epoch",)),
            ("replacement", ("replacement",)),
            ("shuffle", ("shuffle",)),
        ):
            value = next((attributes[name] for name in aliases if name in attributes), None)
            if value is not None:
                facts.setdefault(fact, value)
    plain = [name for name in names if name != "BatchSampler"] or names
    facts["names"] = " of ".join(plain)[:100]
    if not isinstance(facts.get("shuffle"), bool):
        facts["shuffle"] = _shuffles(names)
    return facts


def _chain(sampler: Any) -> Iterator[Any]:
    for _ in range(CHAIN):
        if sampler is None:
            return
        yield sampler
        attributes = vars(sampler) if hasattr(sampler, "__dict__") else {}
        sampler = attributes.get("batch_sampler", attributes.get("sampler"))


def _shuffles(names: list[str]) -> bool | None:
    if any(name.endswith("RandomSampler") for name in names):
        return True
    return False if "SequentialSampler" in names else None


def stride_for(length: int, world_size: int) -> int:
    """1 for a dataset that fits into the map, else a prime.

    Samplers distribute samples round robin: a stride with a common factor with the number of ranks would only include
    samples of some ranks.
    """
    if length <= MOST_MARKED:
        return 1
    stride = -(-length // MOST_MARKED)
    while not _is_prime(stride) or world_size % stride == 0:
        stride += 1
    return stride


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _packed(marks: bytearray) -> str:
    bits = int("".join("1" if mark else "0" for mark in reversed(marks)) or "0", 2)
    return base64.b64encode(zlib.compress(bits.to_bytes(-(-len(marks) // 8), "little"), 6)).decode()


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return -1


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
