"""report.json: the finished analysis as strict JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import REPORT_SCHEMA, AttemptSummary, Check, DataEpoch, Report, Verdict
from ddpcheck.analysis.timeseries.model import AgreementHistory, EnvironmentRow, GradientHistory
from ddpcheck.analysis.timing.clock_offsets import HostClock
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.errors import RunUnreadable

# The order of the keys: the verdict and the findings first, the bulk last.
_TOP_LEVEL = (
    "schema",
    "verdict",
    "world_size",
    "steps",
    "command",
    "exit_code",
    "findings",
    "attempts",
    "checks",
    "data",
    "hardware",
    "traffic",
    "links",
    "time",
    "memory",
    "startup",
    "overlap",
    "agreement",
    "gradients",
    "environment",
    "hosts",
    "run",
)


def to_json(report: Report) -> str:
    """The text of report.json, ending in a newline."""
    document = {name: plain(getattr(report, name)) for name in _TOP_LEVEL}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True)
class _Version:
    schema: int


@dataclass(frozen=True)
class _Document:
    """report.json as it is stored; keys without a default are in every file of schema 1."""

    schema: int
    verdict: Verdict
    world_size: int
    steps: int
    command: tuple[str, ...]
    exit_code: int | None
    findings: tuple[Finding, ...]
    attempts: tuple[AttemptSummary, ...]
    checks: tuple[Check, ...]
    run: dict[str, Any]
    data: tuple[DataEpoch, ...] = ()
    hardware: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, Any] = field(default_factory=dict)
    links: dict[str, Any] = field(default_factory=dict)
    time: tuple[TimeTable, ...] = ()
    memory: dict[str, Any] | None = None
    startup: dict[str, Any] | None = None
    overlap: Overlap | None = None
    agreement: tuple[AgreementHistory, ...] = ()
    gradients: tuple[GradientHistory, ...] = ()
    environment: tuple[EnvironmentRow, ...] = ()
    hosts: tuple[HostClock, ...] = ()


def from_json(text: str) -> Report:
    """The report in `text`; unknown keys are ignored, keys that older versions did not write get their defaults."""
    # Only readers of report.json need it; a run that writes one starts without.
    import msgspec

    try:
        schema = msgspec.json.decode(text, type=_Version).schema
        if schema > REPORT_SCHEMA:
            raise RunUnreadable(
                f"report.json has schema {schema} and this ddpcheck reads up to {REPORT_SCHEMA}: "
                "read it with the version of ddpcheck that wrote it, or a later one"
            )
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise RunUnreadable(f"this is not a report.json that ddpcheck wrote ({error})") from error
    return Report(**{each.name: getattr(document, each.name) for each in fields(document)})


def plain(value: Any) -> Any:
    """`value` in the types of JSON only; values that JSON cannot hold become strings."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _well_formed(value)
    if isinstance(value, Mapping):
        return {_well_formed(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return _well_formed(str(value))


def _well_formed(text: str) -> str:
    # A file name that is not UTF-8 has lone surrogates, which strict readers refuse.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
