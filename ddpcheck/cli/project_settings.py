"""Settings of a project: `[tool.ddpcheck]` in the nearest pyproject.toml, with findings to ignore."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcheck.config import flags, options
from ddpcheck.errors import UsageError

FILE = "pyproject.toml"
_SHAPE = 'ignore = [{ code = "DDP304", reason = "why this is intended" }]'


@dataclass(frozen=True)
class ProjectSettings:
    """`options` by the name of the setting; `ignore`: codes and why they are ignored."""

    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ignore: Mapping[str, str] = field(default_factory=dict)


def project_settings(folder: Path | None = None) -> ProjectSettings:
    """From the nearest pyproject.toml with a table for ddpcheck, in `folder` (the working directory) or above it."""
    here = (folder or Path.cwd()).absolute()
    for path in (parent / FILE for parent in (here, *here.parents)):
        table = _table(path)
        if table is not None:
            return _settings(path, table)
    return ProjectSettings()


def _table(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    # Most projects have none: parsing takes longer than looking.
    if "tool.ddpcheck" not in text:
        return None
    try:
        table = _parse(text).get("tool", {}).get("ddpcheck")
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: tool.ddpcheck is not a table")
    return table


def _parse(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    parsed: dict[str, Any] = tomllib.loads(text)
    return parsed


def _settings(path: Path, table: dict[str, Any]) -> ProjectSettings:
    known = {_key(name, declared): name for name, declared in options()}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "ignore":
            continue
        name = known.get(key)
        if name is None:
            raise UsageError(f"{path}: tool.ddpcheck has no option {key!r}; `ddpcheck run --help` lists all")
        if not isinstance(value, (str, int, float, bool)):
            raise UsageError(f"{path}: tool.ddpcheck.{key} must be a string, a number, true or false")
        # `html = true` means `--html` without a file.
        values[name] = ("" if value else None) if name == "html" and isinstance(value, bool) else value
    return ProjectSettings(path, values, _ignored(path, table.get("ignore", [])))


def _key(name: str, declared: Any) -> str:
    """The long option without its dashes: `fail-on`."""
    return flags(name, declared)[0].partition("/")[0].removeprefix("--")


def _ignored(path: Path, entries: Any) -> dict[str, str]:
    from ddpcheck.rules.rule import rule_of

    ignored: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        code = entry.get("code") if isinstance(entry, dict) else None
        reason = entry.get("reason") if isinstance(entry, dict) else None
        if not isinstance(code, str) or not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"{path}: each entry of tool.ddpcheck.ignore has a code and a reason: {_SHAPE}")
        rule = rule_of(code)
        if rule is None:
            raise UsageError(f"{path}: there is no finding {code!r}; `ddpcheck explain` lists all codes")
        if not rule.can_be_ignored:
            raise UsageError(
                f"{path}: {code} cannot be ignored, because the verdict is about it; "
                "`fail-on` and `allow-incomplete` choose what fails a run"
            )
        ignored[code] = " ".join(reason.split())
    return ignored
