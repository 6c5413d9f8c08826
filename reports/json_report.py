"""report.json: the finished analysis as strict JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import (
    REPORT_SCHEMA,
    AttemptSummary,
    Check,
    DataEpoch,
    RankStatus,
    RankSummary,
    Report,
    Verdict,
)
from ddpcheck.analysis.timing.clock_offsets import HostClock
from ddpcheck.errors import RunUnreadable
from ddpcheck.reports.json_history import agreement_from, environment_from, gradients_from
from ddpcheck.reports.json_overlap import overlap_from
from ddpcheck.reports.time_json import time_table

# The order people read in: the verdict and what it is about first, the bulk last.
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


def from_json(text: str) -> Report:
    """The report behind `text`; keys that this version does not know are left out."""
    try:
        return _report(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunUnreadable(f"this is not a report.json that ddpcheck wrote ({error!r})") from error


def _report(raw: Mapping[str, Any]) -> Report:
    if raw["schema"] > REPORT_SCHEMA:
        raise RunUnreadable(
            f"report.json has schema {raw['schema']} and this ddpcheck reads up to {REPORT_SCHEMA}: "
            "read it with the version of ddpcheck that wrote it, or a later one"
        )
    return Report(
        verdict=Verdict(raw["verdict"]),
        world_size=raw["world_size"],
        steps=raw["steps"],
        command=tuple(raw["command"]),
        exit_code=raw["exit_code"],
        findings=tuple(_finding(item) for item in raw["findings"]),
        attempts=tuple(_attempt(item) for item in raw["attempts"]),
        checks=tuple(Check(**_known(Check, item)) for item in raw["checks"]),
        data=tuple(DataEpoch(**_known(DataEpoch, item)) for item in raw.get("data", ())),
        hardware=dict(raw.get("hardware", {})),
        traffic=dict(raw.get("traffic", {})),
        links=dict(raw.get("links", {})),
        time=tuple(time_table(item) for item in raw.get("time", ())),
        memory=raw.get("memory"),
        startup=raw.get("startup"),
        overlap=overlap_from(raw.get("overlap")),
        agreement=agreement_from(raw.get("agreement", ())),
        gradients=gradients_from(raw.get("gradients", ())),
        environment=environment_from(raw.get("environment", ())),
        hosts=tuple(_host(item) for item in raw.get("hosts", ())),
        run=dict(raw["run"]),
        schema=raw["schema"],
    )


def _finding(raw: Mapping[str, Any]) -> Finding:
    known = _known(Finding, raw)
    known["severity"] = Severity(known["severity"])
    known["ranks"] = tuple(known["ranks"])
    return Finding(**known)


def _attempt(raw: Mapping[str, Any]) -> AttemptSummary:
    known = _known(AttemptSummary, raw)
    known["ranks"] = tuple(_rank(item) for item in known["ranks"])
    return AttemptSummary(**known)


def _rank(raw: Mapping[str, Any]) -> RankSummary:
    known = _known(RankSummary, raw)
    known["status"] = RankStatus(known["status"])
    return RankSummary(**known)


def _host(raw: Mapping[str, Any]) -> HostClock:
    known = _known(HostClock, raw)
    known["ranks"] = tuple(known["ranks"])
    return HostClock(**known)


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in raw.items() if key in names}


def plain(value: Any) -> Any:
    """`value` in JSON's own types only; what JSON has no word for becomes a string."""
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
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return _well_formed(str(value))


def _well_formed(text: str) -> str:
    # A file name that is not UTF-8 arrives with lone surrogates, which strict readers refuse.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
