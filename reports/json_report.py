"""Finished results as strict JSON: report.json and back, comparisons of two runs, analyses of traces."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from ddpcheck.analysis.cost.model import CostTable
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import REPORT_SCHEMA, AttemptSummary, Check, DataEpoch, Report, Verdict
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.analysis.timeseries.model import AgreementHistory, EnvironmentRow, GradientHistory
from ddpcheck.analysis.timing.collector import HostClock
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.diff.model import Comparison
from ddpcheck.errors import RunUnreadable
from ddpcheck.traces.model import TRACE_SCHEMA, CollectiveResult, RankResult, Shares, TraceResult

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
    "coverage",
    "not_judged",
    "data",
    "hardware",
    "traffic",
    "links",
    "time",
    "cost",
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
    coverage: Coverage | None = None
    not_judged: dict[str, str] = field(default_factory=dict)
    data: tuple[DataEpoch, ...] = ()
    hardware: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, Any] = field(default_factory=dict)
    links: dict[str, Any] = field(default_factory=dict)
    time: tuple[TimeTable, ...] = ()
    cost: CostTable | None = None
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


# The order of the keys: the verdict and the first difference first, the bulk last.
_DIFF_TOP_LEVEL = (
    "schema",
    "verdict",
    "method",
    "first",
    "cause",
    "suspects",
    "then",
    "notes",
    "a",
    "b",
    "compared",
    "growth",
    "speed",
)


def diff_to_json(comparison: Comparison) -> str:
    """One document, ending in a newline."""
    fields = asdict(comparison)
    document = {name: plain(fields[name]) for name in _DIFF_TOP_LEVEL}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def trace_to_json(result: TraceResult, left_out: Sequence[str] = ()) -> str:
    """The text of the document, ending in a newline."""
    document = {
        "schema": TRACE_SCHEMA,
        "world_size": result.world_size,
        "origin_ns": result.origin_ns,
        "headline": asdict(result.headline),
        "ranks": [_rank(rank) for rank in result.ranks],
        "transfer_ns": result.transfer_ns,
        "matched": result.matched,
        "unmatched": result.unmatched,
        "operations": [asdict(each) for each in result.operations],
        "buckets": [asdict(each) for each in result.buckets],
        "collectives": [_collective(each) for each in result.collectives],
        "left_out": list(left_out),
    }
    text = json.dumps(document, indent=2, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def _rank(rank: RankResult) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "file": rank.file,
        "source": rank.source,
        "collectives": rank.collectives,
        **_shares(rank.shares),
        "wait_ns": rank.wait_ns,
        "last_arrivals": rank.last_arrivals,
        "clock": None if rank.clock is None else asdict(rank.clock),
        "steps": [
            {"step": each.step, "start_ns": each.start_ns, **_shares(each.shares)} for each in rank.steps
        ],
    }


def _shares(shares: Shares) -> dict[str, Any]:
    return {**asdict(shares), "overlap_pct": shares.overlap_pct}


def _collective(each: CollectiveResult) -> dict[str, Any]:
    return asdict(each)
