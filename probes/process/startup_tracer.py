"""Watches a process on its way to the first step: files read, copies to a device, the broadcast.

It begins before there is a rank, so what it sees is kept until somebody takes it, and it ends at the first
training forward: from there on nothing of it is left in the user's program.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.guard import GUARD
from ddpcheck.injection import CLOCK
from ddpcheck.patches import Patches, around, calling
from ddpcheck.privacy import mask_text
from ddpcheck.probes.process.device_memory import device_memory
from ddpcheck.probes.process.os_counters import Reads, peak_resident, process_start, reads, resident
from ddpcheck.records.kinds.startup import StartupRecord, StartupStage

# A program that loads without end before it trains must not fill the memory, nor the records.
MOST_RECORDS = 256
MOST_FILES = 32
# Where tensors are before they are copied to a device.
HOST = ("cpu", "meta")

# Of these there may be any number.
_MANY = (StartupStage.LOAD, StartupStage.COPY)

Sink = Callable[[StartupRecord], None]


class StageStart(NamedTuple):
    """A stretch under way, and what the counters were when it began."""

    stage: StartupStage
    via: str
    time: float
    clock: float
    reads: Reads
    host: int
    device: int
    # [path, bytes, how]; those of calls inside count to the outermost.
    files: list[list[Any]]
    # Before a copy: bytes of the module that lie on a device already.
    there: int


VIA = "GdsFile.load_storage"
CUFILE_READS_MOST_FILES = 256


@dataclass
class _File:
    """What was read of one file so far."""

    time: float
    seconds: float = 0.0
    bytes: int = 0
    read: int = 0
    storage: int = 0
    staged: int = 0
    moved: int = 0


class CufileReads:
    """Adds up the calls for each file until somebody takes them."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def add(self, begun: StageStart, file: Any, storage: Any, on_device: bool) -> None:
        path = str(getattr(file, "filename", ""))
        if path not in self._files and len(self._files) >= CUFILE_READS_MOST_FILES:
            return
        known = self._files.setdefault(path, _File(begun.time))
        now, size = reads(), int(storage.nbytes())
        known.seconds += time.monotonic() - begun.clock
        known.bytes += size
        known.read += now.asked - begun.reads.asked
        known.storage += now.storage - begun.reads.storage
        known.staged += max(0, resident().whole - begun.host)
        # The room on the device was there before: what counts is where the bytes went.
        known.moved += size if on_device else 0

    def take(self) -> list[StartupRecord]:
        """One record a file; what comes later of the same file begins anew."""
        files, self._files = self._files, {}
        return [_record(path, file) for path, file in files.items()]


def _record(path: str, file: _File) -> StartupRecord:
    return StartupRecord(
        stage=StartupStage.LOAD.value,
        time=round(file.time, 4),
        seconds=round(file.seconds, 4),
        via=VIA,
        bytes=file.bytes,
        files=[[mask_text(os.path.abspath(path)), file.bytes, "cufile"]],
        read=file.read,
        storage=file.storage,
        host=resident().whole,
        staged=file.staged,
        device=device_memory().allocated,
        moved=file.moved,
    )


class StartupTracer:
    """One a process. Stretches of one kind that lie inside another are part of it."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._open: list[StageStart] = []
        self._kept: list[StartupRecord] = []
        self._sink: Sink | None = None
        self._written = 0
        self._cufile = CufileReads()
        self._marked: dict[StartupStage, StageStart | None] = {}
        self.over = False
        GUARD.early.add("startup")
        self._begin = GUARD.protect("startup", "begin", self._on_begin)
        self._end = GUARD.protect("startup", "end", self._on_end)
        self._maps = GUARD.protect("startup", "mapped", self._on_mapped)
        self.write_to = GUARD.protect("startup", "write_to", self._write_to)

    def install(self) -> None:
        """While torch is being imported: of its parts not all can be reached by name yet."""
        modules, storage = sys.modules["torch.nn.modules.module"].Module, sys.modules["torch.storage"]
        for owner in (sys.modules["torch.serialization"], torch):
            self._watch(owner, "load", StartupStage.LOAD, "torch.load")
        self._watch(modules, "load_state_dict", StartupStage.LOAD, "load_state_dict")
        self._watch(modules, "to", StartupStage.COPY, "Module.to")
        self._watch(modules, "cuda", StartupStage.COPY, "Module.cuda")
        cufile = getattr(sys.modules.get("torch.cuda.gds"), "GdsFile", None)
        self._watch(cufile, "load_storage", StartupStage.LOAD, VIA)
        for private, stage in (
            (torch_compat.VERIFY_SHAPES, StartupStage.MEET),
            (torch_compat.SYNC_STATES, StartupStage.BROADCAST),
        ):
            if torch_compat.lookup(private) is not None:
                self._watch(torch_compat.owner_of(private), private.name, stage)
        # safetensors maps its files by this one, and so does torch.load with mmap=True.
        self._patches.replace(
            storage.UntypedStorage, "from_file", lambda original: calling(original, self._maps, None)
        )

    # For the agent, around what it patches itself.

    def joining(self, *args: Any, **kwargs: Any) -> None:
        self._marked[StartupStage.GROUP] = self._begin(StartupStage.GROUP)

    def joined(self) -> None:
        self._end(self._marked.pop(StartupStage.GROUP, None))

    def wrapping(self) -> None:
        self._marked[StartupStage.WRAP] = self._begin(StartupStage.WRAP)

    def wrapped(self) -> None:
        self._end(self._marked.pop(StartupStage.WRAP, None))

    def watch_libraries(self) -> None:
        """Patch what may have been imported since. Class methods: whoever holds the class sees the patch."""
        transformers = sys.modules.get("transformers.modeling_utils")
        models = getattr(transformers, "PreTrainedModel", None)
        if models is not None and not self.over:
            self._watch(models, "from_pretrained", StartupStage.LOAD, "from_pretrained")

    def _write_to(self, sink: Sink) -> None:
        """There is a rank: what was seen so far, and from here on everything at once."""
        self._take_cufile_reads()
        for record in (*self._birth(), *self._kept):
            sink(record)
        self._kept.clear()
        self._sink = sink

    def end(self) -> None:
        """The first training forward: nothing more to see, and nothing of ours stays behind."""
        self._take_cufile_reads()
        self.over = True
        self._sink = None
        self._open.clear()
        # Bound while torch was still being imported, out of a module that was patched by then.
        self._patches.unbind(torch, "load")
        self._patches.remove()

    def begin(self, stage: StartupStage, via: str = "", there: int = 0) -> StageStart | None:
        """The first of nested stretches opens; `wrap` and `group` hold others that are told apart."""
        inside = bool(self._open) and self._open[-1].stage in _MANY
        if self.over or inside or (stage in _MANY and self._written >= MOST_RECORDS):
            return None
        begun = StageStart(
            stage,
            via,
            time.time(),
            time.monotonic(),
            reads(),
            resident().whole,
            device_memory().allocated,
            [],
            there,
        )
        self._open.append(begun)
        return begun

    def finish(self, begun: StageStart | None, size: int = 0) -> None:
        """Write a stretch down; one that was open when the start-up ended is nobody's any more."""
        if begun is None or begun not in self._open:
            return
        del self._open[self._open.index(begun) :]
        now = reads()
        held = resident().whole
        device = device_memory().allocated
        self._put(
            StartupRecord(
                stage=begun.stage.value,
                time=round(begun.time, 4),
                seconds=round(time.monotonic() - begun.clock, 4),
                via=begun.via,
                bytes=size or sum(entry[1] for entry in begun.files),
                files=begun.files[:MOST_FILES],
                read=now.asked - begun.reads.asked,
                storage=now.storage - begun.reads.storage,
                host=held,
                staged=max(0, peak_resident() - begun.host),
                device=device,
                moved=max(0, device - begun.device),
            )
        )

    def drop(self, begun: StageStart | None) -> None:
        """Forget a stretch that came to nothing."""
        if begun in self._open:
            self._open.remove(begun)

    def _put(self, record: StartupRecord) -> None:
        self._written += 1
        if self._sink is not None:
            self._sink(record)
        else:
            self._kept.append(record)

    def _birth(self) -> Iterable[StartupRecord]:
        """The interpreter and torch; a forked rank has both from its parent, and took no time for them."""
        born = process_start()
        armed, torch_begun, torch_there = (CLOCK.get(name, 0.0) for name in ("armed", "torch", "torch_there"))
        if 0 < born <= armed:
            yield StartupRecord(StartupStage.INTERPRETER.value, round(born, 4), round(armed - born, 4))
        if born <= torch_begun <= torch_there:
            seconds = round(torch_there - torch_begun, 4)
            yield StartupRecord(StartupStage.TORCH.value, round(torch_begun, 4), seconds)
        self._kept = [record for record in self._kept if record.time + record.seconds >= born]

    def _watch(self, owner: Any, name: str, stage: StartupStage, via: str = "") -> None:
        def begin(*args: Any, **kwargs: Any) -> StageStart | None:
            return self._begin(stage, via, args, kwargs)

        self._patches.replace(owner, name, lambda original: around(original, begin, self._end))

    def _on_begin(
        self,
        stage: StartupStage,
        via: str = "",
        args: tuple[Any, ...] = (),
        kwargs: Any = MappingProxyType({}),
    ) -> StageStart | None:
        if self.over:
            return None
        self.watch_libraries()
        if via != VIA:
            self._take_cufile_reads()
        begun = self.begin(stage, via, _on_a_device(args[0]) if stage is StartupStage.COPY else 0)
        if via == "torch.load":
            self._note(args[0] if args else kwargs.get("f"), "read")
        return begun

    def _on_end(
        self, begun: StageStart | None, args: tuple[Any, ...] = (), kwargs: Any = MappingProxyType({})
    ) -> None:
        size = 0
        if begun is not None and begun.stage is StartupStage.COPY:
            size = _on_a_device(args[0]) - begun.there
            if size <= 0:
                self.drop(begun)
        elif begun is not None and begun.stage is StartupStage.BROADCAST:
            size = _broadcast_size(*args, **kwargs)
        elif begun is not None and begun.via == VIA:
            self._add_cufile_read(begun, *args, **kwargs)
        self.finish(begun, size)

    def _add_cufile_read(self, begun: StageStart, file: Any, storage: Any, offset: int = 0) -> None:
        self._cufile.add(begun, file, storage, storage.device.type not in HOST)
        self.drop(begun)

    def _take_cufile_reads(self) -> None:
        for record in self._cufile.take():
            self._put(record)

    def _on_mapped(self, *args: Any, **kwargs: Any) -> None:
        if self.over:
            return
        self.watch_libraries()
        inside = any(begun.stage is StartupStage.LOAD for begun in self._open)
        alone = None if inside else self.begin(StartupStage.LOAD, "mapped file")
        self._note(args[0] if args else kwargs.get("filename"), "mapped")
        self.finish(alone)

    def _note(self, file: Any, how: str) -> None:
        """A file that is loaded now: to the outermost load, once."""
        loads = [begun for begun in self._open if begun.stage is StartupStage.LOAD]
        path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        if not loads or not isinstance(path, (str, os.PathLike)):
            return
        whole = os.path.abspath(os.fspath(path))
        entry = [mask_text(whole), os.path.getsize(whole) if os.path.isfile(whole) else 0, how]
        known = [each[0] for each in loads[0].files]
        if entry[0] in known:
            # torch.load with mmap=True: named when it was called, mapped a moment later.
            loads[0].files[known.index(entry[0])] = entry
        else:
            loads[0].files.append(entry)


def _on_a_device(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type not in HOST)


def _broadcast_size(module: torch.nn.Module, *args: Any, **kwargs: Any) -> int:
    """What DDP sends from its first rank: parameters, and buffers unless it was told not to."""
    ignored = set(kwargs.get("params_and_buffers_to_ignore") or ())
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters()]
    if kwargs.get("broadcast_buffers", True):
        named += module.named_buffers()
    return sum(tensor.nbytes for name, tensor in named if name not in ignored)


STARTUP = StartupTracer()
