"""Damages files of a run folder: bytes, lines, JSON values, compressed files, names.

It knows no format of ddpcheck except the checksum of blocks, without which no damage in them would be read.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddpcheck.records import blocks

# Appears in no output unless it was escaped: the beginning of an element, and the control sequence of a terminal.
MARKUP = "</script><chaos onload=chaos()>"
CONTROL = "\x1b]0;chaos\x07\x1b[2J"
GZIP = b"\x1f\x8b"
_LARGEST = 4 << 20
_BOMB_BYTES = 256 << 20

_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    255,
    2**31 - 1,
    2**63,
    10**12,
    10**30,
    -(10**30),
    0.5,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "-1",
    "x" * 5000,
    "../../../outside",
    "/etc/passwd",
    MARKUP,
    CONTROL,
    "[red]x[/red] [/] [link=file:///x]",
    "\ud800",
    "\x00\r\n|`\\",
    "'); import os; os.abort()",
    "=1+1|cmd",
    "1" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0] * 1000,
)


def mutate_folder(chance: random.Random, folder: Path, others: Sequence[bytes], outside: Path) -> str:
    """Damage up to three files of `folder`, and say how. `others`: contents to mix in; `outside`: target of links."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    damage = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        path = chance.choice(files)
        if path.is_dir():
            continue
        if chance.random() < 0.1:
            how = chance.choice(_NAMES)
            how(chance, path, outside)
        else:
            data = path.read_bytes() if path.is_file() else b""
            how, damaged = mutate(chance, data, others)
            _replace(path, damaged)
        damage.append(f"{path.relative_to(folder)}: {how.__name__.strip('_')}")
    return "; ".join(damage)


def mutate(chance: random.Random, data: bytes, others: Sequence[bytes]) -> tuple[Callable[..., Any], bytes]:
    if data.startswith(GZIP) and chance.random() < 0.8:
        if chance.random() < 0.05:
            return _bomb, _bomb(data)
        try:
            how, damaged = mutate(chance, gzip.decompress(data), others)
        except (OSError, EOFError, zlib.error):
            return _flip, _flip(chance, data, others)
        return how, gzip.compress(damaged, 1)
    kinds: list[Callable[..., bytes]] = [_cut, _flip, _overwrite, _delete, _repeat, _insert, _empty]
    if data[:1] in (b"{", b"["):
        kinds += [_lines] * 4 + [_values] * 14
    if b"\n" + blocks.MARK in data:
        kinds += [_blocks] * 14
    how = chance.choice(kinds)
    return how, how(chance, data, others)[:_LARGEST]


def _replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# Bytes


def _range(chance: random.Random, data: bytes) -> tuple[int, int]:
    first = chance.randint(0, len(data))
    return first, min(len(data), first + chance.choice((1, 2, 8, 64, 4096)))


def _cut(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: chance.randint(0, len(data))]


def _flip(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 4, 32)) if data else 0):
        damaged[chance.randint(0, len(data) - 1)] ^= 1 << chance.randint(0, 7)
    return bytes(damaged)


def _overwrite(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    first, last = _range(chance, data)
    filler = chance.choice((b"\x00", b"\xff", b"9", b"[", b"\n", b'"'))
    return data[:first] + filler * (last - first) + data[last:]


def _delete(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    first, last = _range(chance, data)
    return data[:first] + data[last:]


def _repeat(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    first, last = _range(chance, data)
    return data[:last] + data[first:last] * chance.choice((1, 2, 100)) + data[last:]


def _insert(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    first, _ = _range(chance, data)
    size = chance.choice((1, 16, 1000))
    own = random.Random(chance.randint(0, 2**32))
    junk = chance.choice(
        (own.randbytes(size), b"[" * 100_000, b"\x00" * size, chance.choice(others)[: size * 8])
    )
    return data[:first] + junk + data[first:]


def _empty(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return chance.choice((b"", b"\n", b"{}", b"[]", b"null", b"0", b'"x"', b"{}\n" * 1000))


# Lines


def _lines(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    number = chance.randint(0, len(lines) - 1)
    kind = chance.randint(0, 6)
    if kind == 0:
        del lines[number]
    elif kind == 1:
        lines[number:number] = [lines[number]] * chance.choice((1, 2, 500))
    elif kind == 2:
        random.Random(chance.randint(0, 2**32)).shuffle(lines)
    elif kind == 3:
        other = chance.choice(others).splitlines(keepends=True)
        lines[number:number] = other[: chance.choice((1, 5, len(other)))]
    elif kind == 4:
        lines[number] = lines[number].rstrip(b"\n")
    elif kind == 5:
        lines[number] = lines[number][: chance.randint(0, len(lines[number]))] + b"\n"
    else:
        lines = [*lines[number:], *lines[:number]]
    return b"".join(lines)


# Values of JSON


def _values(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change values in one document: the file, or one or all of its lines."""
    try:
        return _dump(_changed(chance, json.loads(data)))
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
    # Nothing follows the last newline.
    last = max(0, len(lines) - 2)
    number = chance.randint(0, last)
    for index in {number, min(number + 1, last)} if chance.random() < 0.3 else {number}:
        try:
            lines[index] = _dump(_changed(chance, json.loads(lines[index])))
        except (ValueError, RecursionError):
            continue
    return b"\n".join(lines)


def _blocks(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Damage what is inside of one block of columns, under a checksum that fits."""
    lines = data.split(b"\n")
    number = chance.choice([number for number, line in enumerate(lines) if line[:1] == blocks.MARK])
    try:
        content = blocks._unescaped(lines[number][2:])
        end = 8 + int.from_bytes(content[4:8], "little")
        inflated = zlib.decompressobj(zdict=blocks._DICTIONARY).decompress(content[8:end])
        head, _, columns = inflated.partition(b"\n")
        if chance.random() < 0.6:
            head = _dump(_changed(chance, json.loads(head)))
        else:
            columns = chance.choice((_flip, _cut, _overwrite, _repeat))(chance, columns, others)
    except (ValueError, RecursionError, zlib.error):
        return _flip(chance, data, others)
    packer = zlib.compressobj(1, zdict=blocks._DICTIONARY)
    deflated = packer.compress(head + b"\n" + columns) + packer.flush()
    rest = len(deflated).to_bytes(4, "little") + deflated + content[end:]
    checksum = zlib.crc32(rest).to_bytes(4, "little")
    lines[number] = lines[number][:2] + blocks._escaped(checksum + rest)
    return b"\n".join(lines)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode(errors="surrogatepass")


def _changed(chance: random.Random, value: Any) -> Any:
    """The same value with one part of it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        kind = chance.random()
        if kind < 0.08:
            return {name: part for name, part in value.items() if name != key}
        if kind < 0.12:
            return {(str(_VALUES[16]) + "x" if name == key else name): part for name, part in value.items()}
        return {**value, key: _changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.85:
        index = chance.randint(0, min(len(value), 100_000) - 1)
        kind = chance.random()
        if kind < 0.08:
            return value[:index]
        if kind < 0.12:
            return value * chance.choice((2, 50))
        return [*value[:index], _changed(chance, value[index]), *value[index + 1 :]]
    if isinstance(value, bool) or not isinstance(value, int | float) or chance.random() < 0.5:
        return chance.choice(_VALUES)
    return chance.choice((-value, value + 1, value - 1, value * 1000, value * 10**9, value / 3, str(value)))


# Names and kinds of files


def _remove(chance: random.Random, path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)


def _copy(chance: random.Random, path: Path, outside: Path) -> None:
    if path.is_file() and not path.is_symlink():
        name = chance.choice(
            ("rank-00007.jsonl", "rank-00000.1.jsonl", "node-x.jsonl", "fault-1.jsonl", "report.json")
        )
        if not path.with_name(name).is_dir():
            _replace(path.with_name(name), path.read_bytes())


def _folder(chance: random.Random, path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(exist_ok=True)


def _link(chance: random.Random, path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(outside)


_NAMES = (_remove, _copy, _folder, _link)


def _bomb(data: bytes) -> bytes:
    """The same document, followed by much that compresses well."""
    packer = zlib.compressobj(9, wbits=31)
    blank = b" " * (1 << 20)
    packed = [packer.compress(gzip.decompress(data))]
    packed += [packer.compress(blank) for _ in range(_BOMB_BYTES >> 20)]
    return b"".join([*packed, packer.flush()])
