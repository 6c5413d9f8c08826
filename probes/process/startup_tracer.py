"""Traces the start-up of a process up to the first step: files read, copies to a device, the broadcast.

It starts before the process is a rank, so its records are kept until there is a record file. It ends at the first
training forward, where all of its patches are removed.
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
from ddpcheck.device_api import COPYING_METHODS, direct_storage_file, memory_of_process, on_device
from ddpcheck.guard import GUARD
from ddpcheck.injection import CLOCK
from ddpcheck.patches import Patches, around, calling
from ddpcheck.privacy import mask_text
from ddpcheck.probes.process.os_counters import Reads, peak_resident, process_start, reads, resident
from ddpcheck.records.kinds.startup import StartupRecord, StartupStage

# Limits for programs that load very many files before they train.
MOST_RECORDS = 256
MOST_FILES = 32

# Stages that may occur any number of times.
_MANY = (StartupStage.LOAD, StartupStage.COPY)

Sink = Callable[[StartupRecord], None]


class StageStart(NamedTuple):
    """A stage that has begun, and the values of the counters at its begin."""

    stage: StartupStage
    via: str
    time: float
    clock: float
    reads: Reads
    host: int
    device: int
    # [path, bytes, how]; files of nested calls belong to the outermost call.
    files: list[list[Any]]
    # For a copy: bytes of the module that were on a device before.
    on_device: int


VIA = "GdsFile.load_storage"
CUFILE_READS_MOST_FILES = 256


@dataclass
class _File:
    """Totals of the reads of one file so far."""

    time: float
    seconds: float = 0.0
    bytes: int = 0
    read: int = 0
    storage: int = 0
    staged: int = 0
    moved: int = 0


class CufileReads:
    """Adds up the calls for each file until `take`."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def add(self, begun: StageStart, file: Any, storage: Any, moved: bool) -> None:
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
        # The memory on the device was allocated before, so its growth does not count these bytes.
        known.moved += size if moved else 0

    def take(self) -> list[StartupRecord]:
        """One record per file. Later reads of the same file get a new record."""
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
        device=memory_of_process().allocated,
        moved=file.moved,
    )


class StartupTracer:
    """Traces the stages of the start-up; one per process. A load or copy inside another one is not a separate stage."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._open: list[StageStart] = []
        self._unwritten: list[StartupRecord] = []
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
        """Install the patches. Called while torch is imported, so some modules are only available in sys.modules."""
        modules, storage = sys.modules["torch.nn.modules.module"].Module, sys.modules["torch.storage"]
        for owner in (sys.modules["torch.serialization"], torch):
            self._trace(owner, "load", StartupStage.LOAD, "torch.load")
        self._trace(modules, "load_state_dict", StartupStage.LOAD, "load_state_dict")
        self._trace(modules, "to", StartupStage.COPY, "Module.to")
        for name in COPYING_METHODS:
            self._trace(modules, name, StartupStage.COPY, f"Module.{name}")
        self._trace(direct_storage_file(), "load_storage", StartupStage.LOAD, VIA)
        for private, stage in (
            (torch_compat.VERIFY_SHAPES, StartupStage.MEET),
            (torch_compat.SYNC_STATES, StartupStage.BROADCAST),
        ):
            if torch_compat.lookup(private) is not None:
                self._trace(torch_compat.owner_of(private), private.name, stage)
        # safetensors maps its files with this function, and so does torch.load with mmap=True.
        self._patches.replace(
            storage.UntypedStorage, "from_file", lambda original: calling(original, self._maps, None)
        )

    # Called by the agent around functions that it patches itself.

    def joining(self, *args: Any, **kwargs: Any) -> None:
        self._marked[StartupStage.GROUP] = self._begin(StartupStage.GROUP)

    def joined(self) -> None:
        self._end(self._marked.pop(StartupStage.GROUP, None))

    def wrapping(self) -> None:
        self._marked[StartupStage.WRAP] = self._begin(StartupStage.WRAP)

    def wrapped(self) -> None:
        self._end(self._marked.pop(StartupStage.WRAP, None))

    def patch_libraries(self) -> None:
        """Patch libraries that may have been imported since. Class methods work for all users of the class."""
        transformers = sys.modules.get("transformers.modeling_utils")
        models = getattr(transformers, "PreTrainedModel", None)
        if models is not None and not self.over:
            self._trace(models, "from_pretrained", StartupStage.LOAD, "from_pretrained")

    def _write_to(self, sink: Sink) -> None:
        """Called when the process is a rank: writes the records so far, and later ones immediately."""
        self._take_cufile_reads()
        for record in (*self._import_stages(), *self._unwritten):
            sink(record)
        self._unwritten.clear()
        self._sink = sink

    def end(self) -> None:
        """Called at the first training forward: removes all patches."""
        self._take_cufile_reads()
        self.over = True
        self._sink = None
        self._open.clear()
        # torch imported this name from a module that was already patched.
        self._patches.unbind(torch, "load")
        self._patches.remove()

    def begin(self, stage: StartupStage, via: str = "", on_device: int = 0) -> StageStart | None:
        """Begin a stage, unless it is nested in a load or copy. `wrap` and `group` may contain other stages."""
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
            memory_of_process().allocated,
            [],
            on_device,
        )
        self._open.append(begun)
        return begun

    def finish(self, begun: StageStart | None, size: int = 0) -> None:
        """Record a stage. A stage that was open when the start-up ended is dropped."""
        if begun is None or begun not in self._open:
            return
        del self._open[self._open.index(begun) :]
        now = reads()
        held = resident().whole
        device = memory_of_process().allocated
        self._write(
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
        """Drop a stage without a record."""
        if begun in self._open:
            self._open.remove(begun)

    def _write(self, record: StartupRecord) -> None:
        self._written += 1
        if self._sink is not None:
            self._sink(record)
        else:
            self._unwritten.append(record)

    def _import_stages(self) -> Iterable[StartupRecord]:
        """The stages of the interpreter and of torch. A forked rank inherits both and has no such stages."""
        started = process_start()
        armed, torch_begun, torch_imported = (
            CLOCK.get(name, 0.0) for name in ("armed", "torch", "torch_imported")
        )
        if 0 < started <= armed:
            yield StartupRecord(StartupStage.INTERPRETER.value, round(started, 4), round(armed - started, 4))
        if started <= torch_begun <= torch_imported:
            seconds = round(torch_imported - torch_begun, 4)
            yield StartupRecord(StartupStage.TORCH.value, round(torch_begun, 4), seconds)
        self._unwritten = [record for record in self._unwritten if record.time + record.seconds >= started]

    def _trace(self, owner: Any, name: str, stage: StartupStage, via: str = "") -> None:
        def begin(*args: Any, **kwargs: Any) -> StageStart | None:
            return self._begin(stage, via, args, kwargs)

        # On top of the patches of checkpoints, which stay when this one is removed.
        self._patches.replace(owner, name, lambda original: around(original, begin, self._end), on_top=True)

    def _on_begin(
        self,
        stage: StartupStage,
        via: str = "",
        args: tuple[Any, ...] = (),
        kwargs: Any = MappingProxyType({}),
    ) -> StageStart | None:
        if self.over:
            return None
        self.patch_libraries()
        if via != VIA:
            self._take_cufile_reads()
        begun = self.begin(stage, via, _bytes_on_device(args[0]) if stage is StartupStage.COPY else 0)
        if via == "torch.load":
            self._add_file(args[0] if args else kwargs.get("f"), "read")
        return begun

    def _on_end(
        self, begun: StageStart | None, args: tuple[Any, ...] = (), kwargs: Any = MappingProxyType({})
    ) -> None:
        size = 0
        if begun is not None and begun.stage is StartupStage.COPY:
            size = _bytes_on_device(args[0]) - begun.on_device
            if size <= 0:
                self.drop(begun)
        elif begun is not None and begun.stage is StartupStage.BROADCAST:
            size = _broadcast_size(*args, **kwargs)
        elif begun is not None and begun.via == VIA:
            self._add_cufile_read(begun, *args, **kwargs)
        self.finish(begun, size)

    def _add_cufile_read(self, begun: StageStart, file: Any, storage: Any, offset: int = 0) -> None:
        self._cufile.add(begun, file, storage, on_device(storage))
        self.drop(begun)

    def _take_cufile_reads(self) -> None:
        for record in self._cufile.take():
            self._write(record)

    def _on_mapped(self, *args: Any, **kwargs: Any) -> None:
        if self.over:
            return
        self.patch_libraries()
        inside = any(begun.stage is StartupStage.LOAD for begun in self._open)
        own_stage = None if inside else self.begin(StartupStage.LOAD, "mapped file")
        self._add_file(args[0] if args else kwargs.get("filename"), "mapped")
        self.finish(own_stage)

    def _add_file(self, file: Any, how: str) -> None:
        """Add a file to the outermost load, once."""
        loads = [begun for begun in self._open if begun.stage is StartupStage.LOAD]
        path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        if not loads or not isinstance(path, (str, os.PathLike)):
            return
        full_path = os.path.abspath(os.fspath(path))
        entry = [mask_text(full_path), os.path.getsize(full_path) if os.path.isfile(full_path) else 0, how]
        known = [each[0] for each in loads[0].files]
        if entry[0] in known:
            # torch.load with mmap=True: added as "read" when it was called, now mapped.
            loads[0].files[known.index(entry[0])] = entry
        else:
            loads[0].files.append(entry)


def _bytes_on_device(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors if on_device(tensor))


def _broadcast_size(module: torch.nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that DDP broadcasts from its first rank: parameters, and buffers unless they are excluded."""
    ignored = set(kwargs.get("params_and_buffers_to_ignore") or ())
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters()]
    if kwargs.get("broadcast_buffers", True):
        named += module.named_buffers()
    return sum(tensor.nbytes for name, tensor in named if name not in ignored)


STARTUP = StartupTracer()
