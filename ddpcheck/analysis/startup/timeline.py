"""One rank's way to its first step: how long each stage took, what it read and what it held afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from ddpcheck.records.kinds.startup import StartupRecord, StartupStage

# A load is taken for a direct one if nearly all of it came to the device and nearly nothing went through the host.
MOST_OF_IT, NEXT_TO_NOTHING = 0.9, 0.1
LEAST_TO_TELL = 1 << 20


class LoadedFile(TypedDict):
    """A file that was loaded before training."""

    path: str
    bytes: int
    # "read" into memory, "mapped": read as it is used, or asked for through "cufile".
    how: str


class RankTimeline(TypedDict):
    """A row of the table. Seconds; null: not seen."""

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
    # Whatever else came before wrapping: other imports, building the model, preparing data.
    script: float | None
    wrap: float | None
    # Of `wrap`: waiting for the last rank, and the broadcast.
    waited: float | None
    broadcast: float | None
    batch: float | None
    step: float | None
    loaded_bytes: int
    # Of them, what storage had to be asked for; the rest was in the page cache.
    storage_bytes: int
    files: list[LoadedFile]
    # What was called, as "torch.load".
    ways: list[str]
    # The files came to the device without passing through the host's memory.
    direct: bool
    copied_bytes: int
    broadcast_bytes: int
    # Bytes held after each stage, by the process and on its device.
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
    """Bytes of a load: of its files where they have a name, else what was read meanwhile."""
    return record.bytes or (record.read if record.via == "torch.load" else 0)


def is_direct(record: StartupRecord) -> bool:
    """Storage to device, told by what was measured: the device's memory grew, the host's never did."""
    return (
        record.bytes >= LEAST_TO_TELL
        and record.moved >= MOST_OF_IT * record.bytes
        and record.staged <= NEXT_TO_NOTHING * record.bytes
        and record.read <= NEXT_TO_NOTHING * record.bytes
    )


def _of(records: Iterable[StartupRecord], stage: StartupStage) -> list[StartupRecord]:
    return [record for record in records if record.stage == stage.value]


def _seconds(records: Sequence[StartupRecord], stage: StartupStage) -> float | None:
    found = _of(records, stage)
    return round(sum(record.seconds for record in found), 4) if found else None


def _total(records: Sequence[StartupRecord]) -> float | None:
    last = _of(records, StartupStage.STEP)
    if not last:
        return None
    return round(last[-1].time + last[-1].seconds - min(record.time for record in records), 4)


def _script(records: Sequence[StartupRecord]) -> float | None:
    """Between the process's start and wrapping, all that is none of the other stages."""
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
                case [str(path), int(size), "cufile"] if path in files:  # told in several goes
                    files[path]["bytes"] += size
                case [str(path), int(size), str(how)]:
                    files[path] = LoadedFile(path=path, bytes=size, how=how)
    return list(files.values())
