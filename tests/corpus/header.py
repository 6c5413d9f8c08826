"""The header of a corpus script: `key: value` lines at the end of its docstring, with the expected findings."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOTHING = "nothing"
_CODE = re.compile(r"DDP\d{3}")
_VERSION = re.compile(r"\d+\.\d+")
_LINE = re.compile(r"([a-z][a-z ]*):\s*(.*)")
_KEYS = {
    "bug",
    "seen in",
    "ranks",
    "expect",
    "severity",
    "cause",
    "stage",
    "step",
    "outliers",
    "parameter",
    "also",
    "launcher",
    "options",
    "hangs",
    "exit",
    "variant of",
    "cases",
    "torch",
}
_OF_FINDINGS = (
    "bug",
    "severity",
    "cause",
    "stage",
    "step",
    "outliers",
    "parameter",
    "also",
    "hangs",
    "variant of",
)
_LAUNCHERS = ("fork", "torchrun", "environment", "python")


class HeaderError(ValueError):
    """An invalid header; the message gives the file, the line and what to write instead."""


@dataclass(frozen=True)
class Header:
    """Subject and expected findings of a script; empty values are not compared."""

    path: Path
    title: str
    expect: str  # a code, or NOTHING
    ranks: tuple[int, ...]  # world sizes to run it with
    bugs: tuple[int, ...] = ()
    seen_in: str = ""
    # The finding is a note: there is nothing at warning or above.
    note: bool = False
    cause: str = ""
    stage: str = ""
    # None: not compared. -1: the finding must have no step.
    step: int | None = None
    outliers: tuple[int, ...] | None = None
    parameter: str = ""
    also: tuple[str, ...] = ()
    # fork: ranks are forked from a parent that has imported torch. environment: one `python script` per rank, with RANK
    # and WORLD_SIZE set. python: the script starts its ranks itself.
    launcher: str = "fork"
    options: tuple[str, ...] = ()
    hangs: bool = False
    fails: bool = False
    variant_of: str = ""
    cases: tuple[str, ...] = ()
    # The first version of torch that has what the script uses; empty: any that ddpcheck supports.
    torch: tuple[int, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.expect == NOTHING

    @property
    def name(self) -> str:
        return self.path.stem

    def lacks(self, torch: str) -> str:
        """Why the script cannot run with this version of torch; empty if it can."""
        found = re.match(r"(\d+)\.(\d+)", torch)
        if found is None or (int(found[1]), int(found[2])) >= self.torch:
            return ""
        return f"needs torch {'.'.join(map(str, self.torch))}"


def read_header(path: Path) -> Header:
    """The header of the script at `path`."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    if not docstring:
        raise HeaderError(f"{path}: there is no docstring to read the header from")
    return parse_header(path, docstring)


def parse_header(path: Path, docstring: str) -> Header:
    """The header in a docstring: its first line and its last paragraph."""
    raw = _fields(path, docstring)
    return _checked(path, docstring.splitlines()[0], raw)


def _fields(path: Path, docstring: str) -> dict[str, str]:
    block = docstring.strip().split("\n\n")[-1]
    found: dict[str, str] = {}
    key = ""
    for line in block.splitlines():
        if key and line.startswith(" "):  # continues the previous line
            found[key] = f"{found[key]} {line.strip()}"
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise HeaderError(
                f"{path}: {line.strip()!r} in the docstring's last paragraph is not `key: value`"
            )
        key, value = match.groups()
        if key not in _KEYS:
            raise HeaderError(f"{path}: there is no key {key!r}; known are {', '.join(sorted(_KEYS))}")
        if key in found:
            raise HeaderError(f"{path}: {key!r} is there twice")
        found[key] = value.strip()
    return found


def _checked(path: Path, title: str, raw: Mapping[str, str]) -> Header:
    expect = raw.get("expect", "")
    if expect != NOTHING and not _CODE.fullmatch(expect):
        raise HeaderError(f"{path}: `expect` is {expect!r}; write a code such as DDP202, or {NOTHING!r}")
    if expect == NOTHING:
        for key in _OF_FINDINGS:
            if key in raw:
                raise HeaderError(f"{path}: a script that expects nothing has no {key!r}")
    elif "cause" not in raw or "step" not in raw or "outliers" not in raw:
        raise HeaderError(f"{path}: a script that expects {expect} says `cause`, `step` and `outliers` too")
    if not raw.get("ranks"):
        raise HeaderError(f"{path}: `ranks` is missing: how many ranks to run it with")
    also = tuple(raw.get("also", "").split())
    for code in also:
        if not _CODE.fullmatch(code):
            raise HeaderError(f"{path}: `also` has {code!r}, which is no code")
    launcher = raw.get("launcher", "fork")
    if launcher not in _LAUNCHERS:
        raise HeaderError(f"{path}: `launcher` is {launcher!r}; known are {', '.join(_LAUNCHERS)}")
    if raw.get("severity", "note") != "note":
        raise HeaderError(f"{path}: `severity` is {raw['severity']!r}; write `note`, or leave it out")
    if raw.get("exit", "0") not in ("0", "fails"):
        raise HeaderError(f"{path}: `exit` is {raw['exit']!r}; write `fails` where the job itself fails")
    if not _VERSION.fullmatch(raw.get("torch", "2.0")):
        raise HeaderError(
            f"{path}: `torch` is {raw['torch']!r}; write the first version that has it, such as 2.6"
        )
    return Header(
        path=path,
        title=title,
        expect=expect,
        ranks=_numbers(path, raw, "ranks", least=1),
        bugs=_numbers(path, raw, "bug", least=1),
        seen_in=raw.get("seen in", "-"),
        note="severity" in raw,
        cause=raw.get("cause", ""),
        stage=raw.get("stage", ""),
        step=_step(path, raw),
        outliers=_numbers(path, raw, "outliers") if "outliers" in raw else None,
        parameter=raw.get("parameter", ""),
        also=also,
        launcher=launcher,
        options=tuple(raw.get("options", "").split()),
        hangs=raw.get("hangs", "no") == "yes",
        fails=raw.get("exit") == "fails",
        variant_of=raw.get("variant of", "").removeprefix("-"),
        cases=tuple(raw.get("cases", "").split()),
        torch=tuple(map(int, raw["torch"].split("."))) if "torch" in raw else (),
    )


def _numbers(path: Path, raw: Mapping[str, str], key: str, least: int = 0) -> tuple[int, ...]:
    words = raw.get(key, "").replace(",", " ").split()
    if words in (["none"], ["-"]):
        return ()
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise HeaderError(f"{path}: `{key}` is {raw[key]!r}; write numbers from {least} on")
    return tuple(int(word) for word in words)


def _step(path: Path, raw: Mapping[str, str]) -> int | None:
    word = raw.get("step", "")
    if not word:
        return None
    if word in ("none", "-1", "-"):
        return -1
    if not word.isdecimal():
        raise HeaderError(f"{path}: `step` is {word!r}; write a number from 0 on, or `none`")
    return int(word)
