"""The analysis of traces as strict JSON, for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddpcheck.traces.model import TRACE_SCHEMA, CollectiveResult, RankResult, Shares, TraceResult


def to_json(result: TraceResult, left_out: Sequence[str] = ()) -> str:
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
