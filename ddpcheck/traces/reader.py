"""From paths to rank traces, and a clear word about every file that is none."""

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
from ddpcheck.traces.build import Identity, build
from ddpcheck.traces.event_filter import EventFilter
from ddpcheck.traces.events import EventReader
from ddpcheck.traces.rank_trace import RankTrace

_TRACE = (".json", ".json.gz")
_ARCHIVE = (".tar", ".tar.gz", ".tgz")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Source:
    """One file with events: where it is, in words, and how to open it, as often as needed."""

    name: str
    open: Callable[[], IO[bytes]]
    # What the user pointed at by name must be a trace; of a folder's files some may be something else.
    asked_for: bool = True


def sources(given: Sequence[Path]) -> Iterator[Source]:
    """Every trace that the paths lead to, in the order of their names."""
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
    for path in sorted(inside, key=lambda path: in_order(path.name)):
        yield Source(str(path), _opener(path), asked_for=False)


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        try:
            with path.open("rb") as file:
                compressed = _is_compressed(file)
            return cast(IO[bytes], gzip.open(path)) if compressed else path.open("rb")
        except OSError as error:
            raise TraceUnreadable(f"{path} cannot be read: {error.strerror or error}") from None

    return opened


def _is_compressed(file: IO[bytes]) -> bool:
    """By what it holds, whatever its name says."""
    compressed = file.read(2) == _GZIP
    file.seek(0)
    return compressed


def _in_archive(path: Path) -> Iterator[Source]:
    """As they lie in the archive, while it is open: jumping about in a compressed one costs a run each."""
    found = False
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and _is_trace(member.name):
                    found = True
                    yield Source(f"{path}:{member.name}", _member_opener(archive, member), asked_for=False)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise TraceUnreadable(f"{path} is not a whole tar archive ({error})") from None
    if not found:
        raise TraceUnreadable(f"there is no trace in {path}: nothing in it ends in .json or .json.gz")


def _is_trace(name: str) -> bool:
    # macOS adds an entry of its own, which begins with ._, for each file.
    return name.endswith(_TRACE) and not Path(name).name.startswith("._")


def _member_opener(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        file = archive.extractfile(member)
        if file is None:
            raise TraceUnreadable(f"{member.name} in the archive is not a file")
        try:
            compressed = _is_compressed(file)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise TraceUnreadable(f"{member.name} in the archive is cut off ({error})") from None
        return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if compressed else file

    return opened


def in_order(name: str) -> list[tuple[int, str]]:
    """A key that puts rank 10 after rank 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


_IN_NAMES = re.compile(r"(?:rank|worker|(?<![a-z])r)[-_.]?(\d+)", re.IGNORECASE)


def rank_of(file: str, info: Any, in_args: int | None) -> int | None:
    """The rank, or None where nothing tells it."""
    if isinstance(info, Mapping) and isinstance(info.get("rank"), int):
        return int(info["rank"])
    if in_args is not None:
        return in_args
    named = _IN_NAMES.search(PurePath(file).name)
    return int(named[1]) if named else None


def world_size_of(info: Any) -> int | None:
    """How many ranks the job had, where the trace says so."""
    size = info.get("world_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) else None


_UNKNOWN_RANK = -1


@dataclass(frozen=True)
class Loaded:
    """The traces that could be read, by rank, and one sentence for each file that could not."""

    traces: tuple[RankTrace, ...]
    left_out: tuple[str, ...]


def load(given: Sequence[Path]) -> Loaded:
    """Read everything that `given` leads to.

    A file that was named and is no trace is an error. A folder or an archive may hold other files as well:
    those are left out and named, unless nothing else is there.
    """
    traces: list[RankTrace] = []
    left_out: list[UserError] = []
    with _no_garbage():
        for source in sources(given):
            try:
                traces.append(read_trace(source))
            except TraceIsTimeline:
                # A folder may hold what `--merged` wrote there before.
                if source.asked_for:
                    raise
            except (TraceUnreadable, TraceWithoutCommunication) as error:
                if source.asked_for:
                    raise
                left_out.append(error)
    if not traces:
        raise _nothing_left(left_out)
    return Loaded(_by_rank(traces), tuple(map(str, left_out)))


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Millions of small objects are made here and no cycle of them: looking for some takes time for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_trace(source: Source) -> RankTrace:
    """The trace in one file."""
    sieve, facts = _sifted(source, EventFilter())
    if not sieve.kernels and sieve.collective_spans:
        # The processor did the computing. Its operations are many, and nobody else needs them.
        sieve, facts = _sifted(source, EventFilter(with_operations=True))
    if "ddpcheck" in facts:
        raise TraceIsTimeline(
            f"{source.name} is a timeline that ddpcheck wrote: give the traces it was made from"
        )
    if not (sieve.collective_kernels or sieve.collective_spans):
        raise _no_communication(source, sieve)
    info = facts.get("distributed_info")
    rank = rank_of(source.name, info, sieve.rank_in_args)
    base = facts.get("base_time_nanoseconds")
    identity = Identity(
        rank=_UNKNOWN_RANK if rank is None else rank,
        file=source.name,
        world_size=world_size_of(info),
        base_ns=base if isinstance(base, int) else 0,
    )
    return build(sieve, identity)


def _sifted(source: Source, sieve: EventFilter) -> tuple[EventFilter, dict[str, Any]]:
    with source.open() as file:
        reader = EventReader(file, source.name, sieve.thinner)
        for events in reader:
            try:
                sieve.take(events)
            except (ValueError, TypeError, AttributeError) as error:
                raise TraceUnreadable(f"{source.name} holds an event that makes no sense: {error}") from None
    return sieve, reader.facts


def _no_communication(source: Source, sieve: EventFilter) -> TraceWithoutCommunication:
    if any(mark.name.startswith("nccl:") for marks in sieve.marks.values() for mark in marks):
        return TraceWithoutCommunication(
            f"{source.name} shows that NCCL was called but no GPU kernel of it: record the trace with "
            "ProfilerActivity.CUDA too"
        )
    return TraceWithoutCommunication(
        f"{source.name} holds no communication: neither NCCL or RCCL kernels nor spans of gloo"
    )


def _nothing_left(left_out: Sequence[UserError]) -> UserError:
    if not left_out:
        return TraceUnreadable("there is no trace here, only a timeline that ddpcheck wrote")
    more = f" (and {len(left_out) - 1} more files that are of no use)" if len(left_out) > 1 else ""
    return type(left_out[0])(f"{left_out[0]}{more}")


def _by_rank(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    unknown = sorted(
        (trace for trace in traces if trace.rank == _UNKNOWN_RANK), key=lambda trace: in_order(trace.file)
    )
    taken = {trace.rank for trace in traces} - {_UNKNOWN_RANK}
    free = (number for number in range(len(traces)) if number not in taken)
    named = [trace for trace in traces if trace.rank != _UNKNOWN_RANK]
    named += [replace(trace, rank=number) for trace, number in zip(unknown, free, strict=False)]
    named.sort(key=lambda trace: trace.rank)
    for one, other in pairwise(named):
        if one.rank == other.rank:
            raise TraceUnreadable(
                f"{one.file} and {other.file} are both of rank {one.rank}: give one file a rank, "
                "of the same steps"
            )
    return tuple(named)
