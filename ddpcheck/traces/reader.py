"""Reads rank traces from files, folders and archives, and reports files that are not traces."""

from __future__ import annotations

import gc
import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import IO, Any, cast

from ddpcheck.errors import TraceIsTimeline, TraceUnreadable, TraceWithoutCommunication, UserError
from ddpcheck.traces.build import EventFilter, Identity, build
from ddpcheck.traces.events import EventReader
from ddpcheck.traces.rank_trace import RankTrace

_TRACE = (".json", ".json.gz")
_ARCHIVE = (".tar", ".tar.gz", ".tgz")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Source:
    """One trace file: its name for messages, and a function that opens it."""

    name: str
    open: Callable[[], IO[bytes]]
    # A file that the user named must be a trace; other files of a folder may be something else.
    named_by_user: bool = True


def sources(given: Sequence[Path]) -> Iterator[Source]:
    """Every trace file in the given paths, in natural order of the names."""
    for path in given:
        if path.is_dir():
            yield from _in_folder(path)
        elif not path.exists():
            raise TraceUnreadable(f"there is no file {path}")
        elif path.name.endswith(_ARCHIVE):
            yield from _in_archive(path)
        else:
            yield Source(str(path), _opener(path))


def _in_folder(folder: Path) -> Iterator[Source]:
    inside = [path for path in folder.iterdir() if path.is_file() and _is_trace(path.name)]
    if not inside:
        raise TraceUnreadable(f"there is no trace in the folder {folder}: no file ends in .json or .json.gz")
    for path in sorted(inside, key=lambda path: natural_key(path.name)):
        yield Source(str(path), _opener(path), named_by_user=False)


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        try:
            with path.open("rb") as file:
                compressed = _is_gzip(file)
            return cast(IO[bytes], gzip.open(path)) if compressed else path.open("rb")
        except OSError as error:
            raise TraceUnreadable(f"{path} cannot be read: {error.strerror or error}") from None

    return opened


def _is_gzip(file: IO[bytes]) -> bool:
    """By content, not by name."""
    compressed = file.read(2) == _GZIP
    file.seek(0)
    return compressed


def _in_archive(path: Path) -> Iterator[Source]:
    """In the order of the archive, while it is open: seeking in a compressed archive is slow."""
    has_trace = False
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and _is_trace(member.name):
                    has_trace = True
                    yield Source(
                        f"{path}:{member.name}", _member_opener(archive, member), named_by_user=False
                    )
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise TraceUnreadable(f"{path} is not a complete tar archive ({error})") from None
    if not has_trace:
        raise TraceUnreadable(f"there is no trace in {path}: nothing in it ends in .json or .json.gz")


def _is_trace(name: str) -> bool:
    # macOS adds an entry that begins with ._ for each file.
    return name.endswith(_TRACE) and not Path(name).name.startswith("._")


def _member_opener(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        file = archive.extractfile(member)
        if file is None:
            raise TraceUnreadable(f"{member.name} in the archive is not a file")
        try:
            compressed = _is_gzip(file)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise TraceUnreadable(f"{member.name} in the archive is cut off ({error})") from None
        return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if compressed else file

    return opened


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key that puts rank 10 after rank 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


_RANK_IN_NAME = re.compile(r"(?:rank|worker|(?<![a-z])r)[-_.]?(\d+)", re.IGNORECASE)


def rank_of(file: str, info: Any, rank_in_args: int | None) -> int | None:
    """The rank, or None if it is unknown."""
    if isinstance(info, Mapping) and isinstance(info.get("rank"), int):
        return int(info["rank"])
    if rank_in_args is not None:
        return rank_in_args
    named = _RANK_IN_NAME.search(PurePath(file).name)
    return int(named[1]) if named else None


def world_size_of(info: Any) -> int | None:
    """The number of ranks of the job, if the trace contains it."""
    size = info.get("world_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) else None


_UNKNOWN_RANK = -1


@dataclass(frozen=True)
class LoadedTraces:
    """The traces by rank, and one message for each file that could not be read."""

    traces: tuple[RankTrace, ...]
    left_out: tuple[str, ...]


def load(given: Sequence[Path]) -> LoadedTraces:
    """Read all traces in `given`.

    A named file that is not a trace is an error. Other files in a folder or archive are skipped and reported,
    unless there is no trace at all.
    """
    traces: list[RankTrace] = []
    left_out: list[UserError] = []
    with _without_garbage_collection():
        for source in sources(given):
            try:
                traces.append(read_trace(source))
            except TraceIsTimeline:
                # The folder may contain an earlier result of `--merged`.
                if source.named_by_user:
                    raise
            except (TraceUnreadable, TraceWithoutCommunication) as error:
                if source.named_by_user:
                    raise
                left_out.append(error)
    if not traces:
        raise _no_traces_error(left_out)
    return LoadedTraces(_by_rank(traces), tuple(map(str, left_out)))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Reading creates millions of objects and no cycles, so garbage collection would only take time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_trace(source: Source) -> RankTrace:
    """The trace in one file."""
    event_filter, facts = _filtered(source, EventFilter())
    if not event_filter.kernels and event_filter.collective_spans:
        # A CPU job: read again with its operations, which are many and not needed otherwise.
        event_filter, facts = _filtered(source, EventFilter(with_operations=True))
    if "ddpcheck" in facts:
        raise TraceIsTimeline(
            f"{source.name} is a timeline written by ddpcheck: pass the original traces instead"
        )
    if not (event_filter.collective_kernels or event_filter.collective_spans):
        raise _no_communication(source, event_filter)
    info = facts.get("distributed_info")
    rank = rank_of(source.name, info, event_filter.rank_in_args)
    base = facts.get("base_time_nanoseconds")
    identity = Identity(
        rank=_UNKNOWN_RANK if rank is None else rank,
        file=source.name,
        world_size=world_size_of(info),
        base_ns=base if isinstance(base, int) else 0,
    )
    return build(event_filter, identity)


def _filtered(source: Source, event_filter: EventFilter) -> tuple[EventFilter, dict[str, Any]]:
    with source.open() as file:
        reader = EventReader(file, source.name, event_filter.prefilter)
        for events in reader:
            try:
                event_filter.add(events)
            except (ValueError, TypeError, AttributeError) as error:
                raise TraceUnreadable(f"{source.name} contains an invalid event: {error}") from None
    return event_filter, reader.facts


def _no_communication(source: Source, event_filter: EventFilter) -> TraceWithoutCommunication:
    if any(mark.name.startswith("nccl:") for marks in event_filter.marks.values() for mark in marks):
        return TraceWithoutCommunication(
            f"{source.name} contains calls of NCCL but no GPU kernels: record the trace with "
            "ProfilerActivity.CUDA as well"
        )
    return TraceWithoutCommunication(
        f"{source.name} contains no communication: neither NCCL or RCCL kernels nor spans of gloo"
    )


def _no_traces_error(left_out: Sequence[UserError]) -> UserError:
    if not left_out:
        return TraceUnreadable("there is no trace, only a timeline written by ddpcheck")
    more = f" (and {len(left_out) - 1} more unusable files)" if len(left_out) > 1 else ""
    return type(left_out[0])(f"{left_out[0]}{more}")


def _by_rank(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    unknown = sorted(
        (trace for trace in traces if trace.rank == _UNKNOWN_RANK), key=lambda trace: natural_key(trace.file)
    )
    taken = {trace.rank for trace in traces} - {_UNKNOWN_RANK}
    free = (number for number in range(len(traces)) if number not in taken)
    named = [trace for trace in traces if trace.rank != _UNKNOWN_RANK]
    named += [replace(trace, rank=number) for trace, number in zip(unknown, free, strict=False)]
    named.sort(key=lambda trace: trace.rank)
    for one, other in pairwise(named):
        if one.rank == other.rank:
            raise TraceUnreadable(
                f"{one.file} and {other.file} are both of rank {one.rank}: pass one file per rank, "
                "of the same steps"
            )
    return tuple(named)
