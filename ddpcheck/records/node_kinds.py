"""Typed records of a node log, decoded with msgspec.

Decoding is lenient: a field of the wrong type takes its default, so that logs of other versions, and lines that were
damaged, give what can be used. A line is skipped if it is not JSON, has an unknown kind or lacks a required field.
Optional fields are None where the value is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from ddpcheck.records.node_log import node_lines

# The beginning of every line that a launcher writes.
_KIND = re.compile(rb'\{"kind":"(\w+)"')

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Counters by interface, port, rank or connection.
CounterRows = dict[str, list[Count]]


class NodeRecord(msgspec.Struct, frozen=True):
    """Base class of all records of a node log."""


_AnyNodeRecord = TypeVar("_AnyNodeRecord", bound=type[NodeRecord])
_AnyStruct = TypeVar("_AnyStruct", bound=msgspec.Struct)
_kinds: dict[str, type[NodeRecord]] = {}
_decoders: dict[bytes, msgspec.json.Decoder[NodeRecord]] = {}


def node_record(kind: str) -> Callable[[_AnyNodeRecord], _AnyNodeRecord]:
    """Register a record class. `kind` identifies it in the file: it never changes."""

    def register(cls: _AnyNodeRecord) -> _AnyNodeRecord:
        _kinds[kind] = cls
        _decoders[kind.encode()] = msgspec.json.Decoder(cls)
        return cls

    return register


@node_record("node")
class NodeHeader(NodeRecord, frozen=True):
    """First record of a launcher."""

    host: str = ""


@node_record("rank_exit")
class RankExitRecord(NodeRecord, frozen=True):
    """The process of a rank exited."""

    pid: int
    host: str
    time: float
    # The signal that ended it, 0 for none; None: not known.
    signal: int | None = None
    # The exit was noticed late: `time` is not the time of the exit.
    found_gone: bool = False


@node_record("signal")
class SignalRecord(NodeRecord, frozen=True):
    """The launcher received a signal."""

    signal: str
    time: float


@node_record("stop")
class StopRecord(NodeRecord, frozen=True):
    """The launcher stopped the job."""

    time: float


@node_record("trouble")
class WriteErrorRecord(NodeRecord, frozen=True):
    """A rank could not write its records."""

    rank: int
    text: str
    # The process of the rank; early versions did not write it.
    host: str | None = None
    pid: int | None = None


@node_record("fault")
class LauncherFaultRecord(NodeRecord, frozen=True):
    """An internal error of the launcher, or a source that the sampler could not read."""

    probe: str
    error: str
    entry: str = ""
    host: str | None = None


@node_record("leftover")
class OrphanRecord(NodeRecord, frozen=True):
    """The launcher ended processes that the job had left behind."""


@node_record("rendezvous")
class RendezvousRecord(NodeRecord, frozen=True):
    """Ranks of this node wait in `init_process_group` for others that have not called it."""

    seconds: float = 0.0
    world_size: int = 0
    waiting: list[int] = msgspec.field(default_factory=list)
    missing: list[int] = msgspec.field(default_factory=list)
    # Processes that may still become ranks.
    processes: list[int] = msgspec.field(default_factory=list)
    # Line of the call in the user's code.
    where: str = ""
    stopped: bool = False


@node_record("no_hang_watch")
class NoHangWatchRecord(NodeRecord, frozen=True):
    """Hangs of these ranks, or of all of this launcher if none is listed, are not detected. `why`: a `NoHangWatch`."""

    why: str
    ranks: list[int] = msgspec.field(default_factory=list)


@node_record("unwatched")
class UnwatchedRecord(NodeRecord, frozen=True):
    """A process of the job uses torch and is not watched, or starts processes elsewhere. `why`: see `Unwatched`."""

    why: str
    name: str = ""


class HangState(msgspec.Struct, frozen=True):
    """The state of one rank in a hang."""

    state: str = ""
    answered: bool = True
    # The kernel function in which the training thread sleeps.
    sleeps_in: str = ""
    # The process that holds the file lock for which it waits (0: none), and the file.
    lock_holder: int = 0
    lock_file: str = ""


@node_record("slow")
class SlowRecord(NodeRecord, frozen=True):
    """No rank made progress, but at least one may go on by itself."""

    session: str
    seconds: float
    time: float = 0.0
    details: dict[str, HangState] = msgspec.field(default_factory=dict)


@node_record("hang")
class HangRecord(NodeRecord, frozen=True):
    """All ranks wait for each other."""

    session: str
    seconds: float
    ranks: dict[str, HangState]


class InterfaceEntry(msgspec.Struct, frozen=True):
    """A network interface. `speed` in Mbit/s."""

    name: str = ""
    type: str = msgspec.field(default="", name="class")
    running: bool = True
    driver: str = ""
    speed: Count | None = None
    addresses: list[str] = msgspec.field(default_factory=list)


class PortEntry(msgspec.Struct, frozen=True):
    """An InfiniBand port. `speed` in Mbit/s."""

    name: str = ""
    speed: Count | None = None
    state: str = ""
    layer: str = ""


class MigEntry(msgspec.Struct, frozen=True):
    """A MIG slice of a GPU."""

    uuid: str = ""
    memory: Count | None = None


class GpuEntry(msgspec.Struct, frozen=True):
    """A GPU as NVML describes it."""

    index: Count | None = None
    name: str = ""
    uuid: str = ""
    bus: str = ""
    memory: Count | None = None
    clock: Count | None = None
    # Maximum generation and width.
    pcie: list[Count] = msgspec.field(default_factory=list)
    # Numbers of the active links.
    nvlinks: list[Count] = msgspec.field(default_factory=list)
    mig: list[MigEntry] = msgspec.field(default_factory=list)
    unsupported: list[str] = msgspec.field(default_factory=list)


class NvmlEntry(msgspec.Struct, frozen=True):
    """The GPUs of a node. `note` says why there are none."""

    note: str = ""
    driver: str = ""
    gpus: list[GpuEntry] = msgspec.field(default_factory=list)
    topology: list[list[str]] = msgspec.field(default_factory=list)
    p2p: list[list[bool]] = msgspec.field(default_factory=list)


@node_record("hardware")
class HardwareRecord(NodeRecord, frozen=True):
    """The hardware of a node, written once by its sampler."""

    pid: int = 0
    namespace: str = ""
    cpus: Count = 0
    memory: Count = 0
    interfaces: list[InterfaceEntry] = msgspec.field(default_factory=list)
    infiniband: list[PortEntry] = msgspec.field(default_factory=list)
    nvml: NvmlEntry = msgspec.field(default_factory=NvmlEntry)


class GpuSampleEntry(msgspec.Struct, frozen=True):
    """One GPU in a sample."""

    memory: Count | None = None
    busy: Count | None = None
    memory_busy: Count | None = None
    clock: Count | None = None
    memory_clock: Count | None = None
    throttled: Count = 0
    temperature: Count | None = None
    power: Count | None = None
    ecc: list[Count] = msgspec.field(default_factory=list)
    # Bytes sent and bytes received, each by link.
    nvlink: list[list[Count]] = msgspec.field(default_factory=list)
    pcie: list[Count] = msgspec.field(default_factory=list)
    pcie_rate: list[Count] = msgspec.field(default_factory=list)
    pcie_link: list[Count] = msgspec.field(default_factory=list)
    # Bytes by process id; null: not known.
    processes: dict[str, Count | None] = msgspec.field(default_factory=dict)
    # Bytes used of each MIG slice; null: not known.
    mig: list[Count | None] = msgspec.field(default_factory=list)
    # Why the GPU could not be read.
    lost: str = ""


@node_record("sample")
class SampleRecord(NodeRecord, frozen=True):
    """One sample of a node. Counters start at 0 with the first sample."""

    time: float
    pid: int = 0
    cpu: float | None = None
    memory: Count | None = None
    interfaces: CounterRows = msgspec.field(default_factory=dict)
    infiniband: CounterRows = msgspec.field(default_factory=dict)
    connections: CounterRows = msgspec.field(default_factory=dict)
    ranks: CounterRows = msgspec.field(default_factory=dict)
    gpus: list[GpuSampleEntry] = msgspec.field(default_factory=list)


@node_record("sampled")
class SamplerEndRecord(NodeRecord, frozen=True):
    """Last record of a sampler: the processor time that it took."""

    pid: int = 0
    cpu_seconds: float | None = None


class NodeLogReader:
    """Reads the node logs of a run folder. `skipped` counts lines that could not be decoded."""

    def __init__(self, folder: Path, unwritten: Sequence[tuple[str, bytes]] = ()) -> None:
        """`unwritten`: lines that a launcher could not write, each with the name of its file."""
        self._folder = folder
        self._unwritten = unwritten
        self.skipped = 0

    def read(self, kinds: Collection[type[NodeRecord]]) -> Iterator[tuple[str, NodeRecord]]:
        """The host and the record of each line with one of these kinds."""
        names = {kind.encode() for kind, cls in _kinds.items() if cls in kinds}
        hosts: dict[str, str] = {}
        for file, line in chain(node_lines(self._folder), self._unwritten):
            match = _KIND.match(line)
            if match and match[1] in _decoders and match[1] not in names and match[1] != b"node":
                continue
            record = decode(line)
            if record is None:
                self.skipped += match is None or match[1] in _decoders
            elif isinstance(record, NodeHeader):
                # Characters of the host's name may be missing in the name of the file.
                hosts[file] = record.host
            elif type(record) in kinds:
                yield hosts.get(file) or file.removeprefix("node-").removesuffix(".jsonl"), record


def decode(line: bytes) -> NodeRecord | None:
    """The record in one line, or None where the line cannot be used."""
    match = _KIND.match(line)
    decoder = _decoders.get(match[1]) if match else None
    if decoder is not None:
        try:
            return decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return from_mapping(raw) if isinstance(raw, dict) else None


def from_mapping(raw: Mapping[str, Any]) -> NodeRecord | None:
    """The record in `raw`, or None where its kind is unknown or a required field is missing or of the wrong type."""
    cls = _kinds.get(str(raw.get("kind")))
    if cls is None:
        return None
    try:
        record = _convert_struct(raw, cls)
    except msgspec.ValidationError:
        return None
    return record


def _convert(raw: Any, cls: Any) -> Any:
    """`raw` as a value of type `cls`, without the parts that have the wrong type."""
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and isinstance(raw, Mapping):
        return _convert_struct(raw, cls)
    origin, arguments = get_origin(cls), get_args(cls)
    if origin is list and isinstance(raw, list) and _is_composite(arguments[0]):
        return list(_convertible(raw, arguments[0]))
    if origin is dict and isinstance(raw, dict):
        converted = ((str(key), list(_convertible([value], arguments[1]))) for key, value in raw.items())
        return {key: value[0] for key, value in converted if value}
    return msgspec.convert(raw, cls)


def _convert_struct(raw: Mapping[str, Any], cls: type[_AnyStruct]) -> _AnyStruct:
    values = {}
    for field in msgspec.structs.fields(cls):
        if field.encode_name not in raw:
            continue
        try:
            values[field.name] = _convert(raw[field.encode_name], field.type)
        except msgspec.ValidationError:
            continue
    try:
        return cls(**values)
    except TypeError as error:
        raise msgspec.ValidationError(str(error)) from None


def _convertible(values: list[Any], cls: Any) -> Iterator[Any]:
    for value in values:
        try:
            yield _convert(value, cls)
        except msgspec.ValidationError:
            continue


def _is_composite(cls: Any) -> bool:
    """Whether values of a list are independent of each other: texts and structs are, counters are not."""
    return cls is str or (isinstance(cls, type) and issubclass(cls, msgspec.Struct))
