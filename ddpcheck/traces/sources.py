"""Where traces come from: files, compressed files, archives of many ranks, folders."""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ddpcheck.errors import TraceUnreadable

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
