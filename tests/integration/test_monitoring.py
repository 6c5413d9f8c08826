"""Metrics and notifications of a real job, and the dashboard against a real Prometheus."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.reports.monitoring import sinks
from ddpcheck.reports.monitoring.metrics import live_metrics, report_metrics
from tests.helpers.launchers import forked
from tests.helpers.paths import JOBS, ROOT
from tests.helpers.watched_run import run_watched
from tests.unit.reports.monitoring.test_metrics import STATE
from tests.unit.reports.monitoring.test_sinks import Receiver
from tests.unit.reports.views.test_timing import built

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 180.0


def test_a_diverging_job_is_exported_and_posted(tmp_path: Path) -> None:
    path = tmp_path / "ddpcheck.prom"
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        run = run_watched(
            forked(2, JOBS / "ci_broken.py"),
            tmp_path,
            options=["--prometheus", str(path), "--notify", f"{receiver.url}/secret"],
        )
        receiver.shutdown()
        thread.join()
    assert run.status == 10, run.stderr
    text = path.read_text()
    assert 'ddpcheck_findings{code="DDP206",severity="error"} 1.0' in text
    assert "ddpcheck_replicas_agree 0.0" in text
    message = json.loads(receiver.bodies[-1])
    assert (message["event"], message["verdict"]) == ("verdict", "findings")
    assert "DDP206" in message["text"]
    # The address is a secret.
    assert "secret" not in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.needs("prometheus")
def test_every_panel_of_the_dashboard_has_data(tmp_path: Path) -> None:
    report = built(tmp_path / "run", 2).report()
    links = {"links": [{"source": "a", "target": "b", "bandwidth": 1e9}]}
    finding = Finding("DDP201", Severity.ERROR, "x", "x")
    report = replace(report, links=links, findings=(*report.findings, finding))
    endpoint = sinks.prometheus_sink("127.0.0.1:0")
    endpoint.update(report_metrics(report, live_metrics(STATE)), 40)
    target = f"127.0.0.1:{endpoint._server.server_address[1]}"  # type: ignore[attr-defined]
    config = tmp_path / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [{"job_name": "ddpcheck", "static_configs": [{"targets": [target]}]}],
            }
        )
    )
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not result(port, "ddpcheck_steps"):
                assert time.monotonic() < deadline, "Prometheus has not scraped the endpoint"
                time.sleep(0.2)
            dashboard = json.loads((ROOT / "docs" / "grafana" / "ddpcheck.json").read_text())
            for panel in dashboard["panels"]:
                for query in panel["targets"]:
                    assert result(port, query["expr"]), (panel["title"], query["expr"])
        finally:
            server.terminate()
    endpoint.close()


def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def result(port: int, query: str) -> list[Any]:
    """What Prometheus answers; empty before it listens."""
    address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []
