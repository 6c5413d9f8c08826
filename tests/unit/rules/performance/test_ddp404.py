"""DDP404: bucket sizes that are worth a note."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.overlap.model import BucketAdvice
from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.rules.performance.ddp404 import find
from tests.helpers.overlap_builder import advice, overlap


def findings_of(advised: BucketAdvice | None) -> list[Finding]:
    attempt = Attempt("a")
    for rank in (0, 1):
        header = RankHeader(rank, 2, "node", 1, 1, "a", 0.0)
        attempt.feed(header, header)
        attempt.feed(header, ModuleRecord(0, "Net", [0, 1], 0, [], []))
    profiled = replace(overlap(), advice=advised)
    return find(RuleContext(attempt, 0, Path(), NodeNotes(), (), 0, overlap=profiled))


def test_a_gain_is_reported() -> None:
    [finding] = findings_of(advice(gain_ms=20))
    assert (finding.code, finding.severity, finding.module) == ("DDP404", Severity.NOTE, "0")
    assert "bucket_cap_mb=8 should save 20.0 ms of a 100.0 ms step (20%)" in finding.message
    assert "DistributedDataParallel(model, bucket_cap_mb=8)" in finding.fix


@pytest.mark.parametrize(
    ("first", "cap", "option"),
    [
        (0.5, 0.5, "bucket_cap_mb=0.5"),
        (1, 25, "without bucket_cap_mb"),
        (1, 8, "bucket_cap_mb_list=[1, 8]"),
    ],
)
def test_the_option_for_a_layout(first: float, cap: float, option: str) -> None:
    [finding] = findings_of(advice(first=first, cap=cap))
    assert option in finding.fix


@pytest.mark.parametrize(
    "advised", [None, advice(gain_ms=4), advice(gain_ms=0.9, step_ms=5), advice(gain_ms=0)]
)
def test_silent(advised: BucketAdvice | None) -> None:
    assert findings_of(advised) == []
