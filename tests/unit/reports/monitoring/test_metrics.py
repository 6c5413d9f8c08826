"""Metrics of running and finished jobs, and the messages that are posted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.live.tracker import LiveAgreement, LiveRank, LiveState, LiveStepTime
from ddpcheck.reports.monitoring.metrics import MOST_RANKS, NAMES, Metric, flat, live_metrics, report_metrics
from ddpcheck.reports.monitoring.notification import finding_message, post, verdict_message
from tests.helpers.paths import ROOT
from tests.helpers.sample_reports import attacking, stored
from tests.unit.reports.views.test_timing import built

PARTS = {"data": 1_000, "forward": 2_000, "backward": 4_000, "optimizer": 500, "other": 500, "wait": 2_000}
STATE = LiveState(
    name="train",
    world_size=2,
    ranks=tuple(LiveRank(rank, "node0", "running", 40, 10_000, PARTS, 5_000, 6_000) for rank in range(2)),
    agreement=LiveAgreement(compared=40),
    step_time=LiveStepTime(10_000, (10_000,), 0.2, 0.05, 1),
    cost_share=0.01,
)


def value(metrics: list[Metric], name: str, **labels: str) -> float | None:
    samples = [sample for metric in metrics if metric.name == name for sample in metric.samples]
    return next((number for found, number in samples if dict(found) == labels), None)


def test_a_running_job() -> None:
    metrics = live_metrics(STATE)
    assert value(metrics, "ddpcheck_steps") == 40
    assert value(metrics, "ddpcheck_replicas_agree") == 1
    assert value(metrics, "ddpcheck_step_seconds") == 0.01
    assert value(metrics, "ddpcheck_phase_seconds", rank="1", phase="backward") == 0.004
    assert value(metrics, "ddpcheck_exposed_communication_ratio") == 0.2
    assert value(metrics, "ddpcheck_overhead_ratio") == 0.01
    assert value(metrics, "ddpcheck_memory_bytes", rank="0") == 5_000
    diverged = replace(STATE, agreement=LiveAgreement(compared=40, diverged=True))
    assert value(live_metrics(diverged), "ddpcheck_replicas_agree") == 0


def test_nothing_is_claimed_before_the_first_comparison() -> None:
    metrics = live_metrics(replace(STATE, agreement=LiveAgreement(), step_time=None))
    assert value(metrics, "ddpcheck_replicas_agree") is None
    assert value(metrics, "ddpcheck_step_seconds") is None


def test_the_report_adds_findings_and_the_cost_of_a_straggler(tmp_path: Path) -> None:
    report = built(tmp_path, 2).report()
    metrics = report_metrics(report, live_metrics(STATE))
    [table] = report.time
    assert table.straggler is not None
    assert value(metrics, "ddpcheck_straggler_seconds", rank="1") == table.straggler.cost_us / 1e6
    assert value(metrics, "ddpcheck_findings", code="DDP402", severity="warning") == 1
    # The same number as in the report, not the last live one.
    assert value(metrics, "ddpcheck_step_seconds") == table.step_us / 1e6
    assert value(metrics, "ddpcheck_memory_bytes", rank="0") == 5_000
    assert value(report_metrics(stored("1-learning-rate"), []), "ddpcheck_replicas_agree") == 0


def test_series_are_bounded_and_names_are_unique() -> None:
    many = tuple(replace(STATE.ranks[0], rank=rank) for rank in range(4096))
    assert sum(len(metric.samples) for metric in live_metrics(replace(STATE, ranks=many))) < 10 * MOST_RANKS
    numbers = flat(live_metrics(STATE))
    assert numbers["phase_seconds/backward/rank1"] == 0.004
    assert "run_info/train" not in numbers


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "ddpcheck.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert all(any(name in query for name in NAMES) for query in queries)
    shown = {name for name in NAMES if any(name in query for query in queries)}
    assert set(NAMES) - shown == {"ddpcheck_run_info"}


def test_a_message_is_json_and_text_for_slack() -> None:
    finding = Finding(
        "DDP201", Severity.ERROR, "Parameters diverged", "At step 3 <b>", step=3, ranks=(1,), fix="x"
    )
    message = finding_message("train", replace(finding, evidence={"elements": [0.5]}))
    assert message["text"].startswith("ddpcheck: train\nerror DDP201 at step 3: Parameters diverged (rank 1)")
    assert "&lt;b&gt;" in message["text"]
    assert message["finding"]["code"] == "DDP201"
    assert "evidence" not in json.dumps(message)
    verdict = verdict_message("train", attacking())
    assert verdict["verdict"] == "findings"
    assert "<" not in verdict["text"]


def test_a_failed_post_says_why_without_the_address() -> None:
    reason = post("http://127.0.0.1:9/secret", {"text": "x"})
    assert reason
    assert "secret" not in reason
