"""Collects the start-up of each rank: duration of each stage, bytes read and memory afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypedDict

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.records.kinds.startup import StartupRecord, StartupStage

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# A load is direct if at least this share of its bytes arrived on the device, and at most this share passed the host.
LEAST_ON_DEVICE, MOST_THROUGH_HOST = 0.9, 0.1
# Smaller loads are not classified.
LEAST_BYTES = 1 << 20


class LoadedFile(TypedDict):
    """A file that was loaded before training."""

    path: str
    bytes: int
    # "read" into memory, "mapped" (read on access), or read by "cufile".
    how: str


class RankTimeline(TypedDict):
    """A row of the table. Times in seconds; null: not observed."""

    rank: int
    host: str
    began: float | None
    # From the start of the process to the end of the first step.
    total: float | None
    interpreter: float | None
    torch: float | None
    group: float | None
    load: float | None
    copy: float | None
    # Everything else before wrapping: other imports, building the model, preparing data.
    script: float | None
    wrap: float | None
    # Parts of `wrap`: waiting for the last rank, and the broadcast.
    waited: float | None
    broadcast: float | None
    batch: float | None
    step: float | None
    loaded_bytes: int
    # Of these, bytes from storage; the rest was in the page cache.
    storage_bytes: int
    files: list[LoadedFile]
    # Functions that loaded them, such as "torch.load".
    ways: list[str]
    # The files were read to the device without a copy in host memory.
    direct: bool
    copied_bytes: int
    broadcast_bytes: int
    # Memory after each stage in bytes, of the process and on its device.
    host_memory: dict[str, int]
    device_memory: dict[str, int]


def timeline(rank: int, host: str, records: Sequence[StartupRecord]) -> RankTimeline:
    loads = _of(records, StartupStage.LOAD)
    copies = _of(records, StartupStage.COPY)
    files = _files(loads)
    return RankTimeline(
        rank=rank,
        host=host,
        began=min((record.time for record in records), default=None),
        total=_total(records),
        interpreter=_seconds(records, StartupStage.INTERPRETER),
        torch=_seconds(records, StartupStage.TORCH),
        group=_seconds(records, StartupStage.GROUP),
        load=_seconds(records, StartupStage.LOAD),
        copy=_seconds(records, StartupStage.COPY),
        script=_script(records),
        wrap=_seconds(records, StartupStage.WRAP),
        waited=_seconds(records, StartupStage.MEET),
        broadcast=_seconds(records, StartupStage.BROADCAST),
        batch=_seconds(records, StartupStage.BATCH),
        step=_seconds(records, StartupStage.STEP),
        loaded_bytes=sum(loaded(record) for record in loads),
        storage_bytes=sum(record.storage for record in loads),
        files=files,
        ways=sorted({record.via for record in loads if loaded(record)}),
        direct=bool(files) and all(is_direct(record) for record in loads if record.bytes),
        copied_bytes=sum(record.bytes for record in copies),
        broadcast_bytes=sum(record.bytes for record in _of(records, StartupStage.BROADCAST)),
        host_memory={record.stage: record.host for record in records if record.host},
        device_memory={record.stage: record.device for record in records if record.device},
    )


def loaded(record: StartupRecord) -> int:
    """Bytes of a load: the size of its files, or the bytes read where the files are not known."""
    return record.bytes or (record.read if record.via == "torch.load" else 0)


def is_direct(record: StartupRecord) -> bool:
    """Whether a load went from storage to the device: memory of the device grew, memory of the host did not."""
    return (
        record.bytes >= LEAST_BYTES
        and record.moved >= LEAST_ON_DEVICE * record.bytes
        and record.staged <= MOST_THROUGH_HOST * record.bytes
        and record.read <= MOST_THROUGH_HOST * record.bytes
    )


def _of(records: Iterable[StartupRecord], stage: StartupStage) -> list[StartupRecord]:
    return [record for record in records if record.stage == stage.value]


def _seconds(records: Sequence[StartupRecord], stage: StartupStage) -> float | None:
    matching = _of(records, stage)
    return round(sum(record.seconds for record in matching), 4) if matching else None


def _total(records: Sequence[StartupRecord]) -> float | None:
    last = _of(records, StartupStage.STEP)
    if not last:
        return None
    return round(last[-1].time + last[-1].seconds - min(record.time for record in records), 4)


def _script(records: Sequence[StartupRecord]) -> float | None:
    """Time between the start of the process and wrapping that belongs to no other stage."""
    wraps = _of(records, StartupStage.WRAP)
    if not wraps:
        return None
    began, wrapped = min(record.time for record in records), wraps[0].time
    known = sum(record.seconds for record in records if record.time < wrapped)
    return round(max(0.0, wrapped - began - known), 4)


def _files(loads: Iterable[StartupRecord]) -> list[LoadedFile]:
    files: dict[str, LoadedFile] = {}
    for record in loads:
        for entry in record.files:
            match entry:
                case [str(path), int(size), "cufile"] if path in files:  # one file in several reads
                    files[path]["bytes"] += size
                case [str(path), int(size), str(how)]:
                    files[path] = LoadedFile(path=path, bytes=size, how=how)
    return list(files.values())


MOST_RECORDS = 512


class StartupCollector(Collector):
    """The first records of each rank."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, list[StartupRecord]] = {}

    @collects(StartupRecord)
    def add(self, rank: RankData, record: StartupRecord) -> None:
        records = self.ranks.setdefault(rank.number, [])
        if len(records) < MOST_RECORDS:
            records.append(record)
