"""What the page is made of: the finished report, and the same as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.reports.json_report import to_json


@dataclass(frozen=True)
class PageContext:
    """`document` is report.json, for sections of which the typed report knows nothing."""

    report: Report
    document: Mapping[str, Any]

    @property
    def named_ranks(self) -> list[int]:
        """Ranks that findings are about, the gravest first: those that people want to see among many."""
        ordered = sorted(self.report.findings, key=lambda finding: -finding.severity.weight)
        return list(dict.fromkeys(rank for finding in ordered for rank in finding.ranks))


def page_context(report: Report) -> PageContext:
    return PageContext(report, json.loads(to_json(report)))
