"""Every client receives the metrics: Prometheus, OTLP, Weights & Biases offline, MLflow in a local store."""

from __future__ import annotations

import gzip
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ddpcheck.errors import PackageMissing, UsageError
from ddpcheck.reports.monitoring import sinks
from ddpcheck.reports.monitoring.metrics import live_metrics
from tests.unit.reports.monitoring.test_metrics import STATE

METRICS = live_metrics(STATE)
LINE = 'ddpcheck_phase_seconds{phase="backward",rank="1"} 0.004'


class Receiver(HTTPServer):
    """Keeps what is posted."""

    def __init__(self) -> None:
        bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = bodies
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_prometheus_scrapes_the_endpoint() -> None:
    sink = sinks.prometheus_sink("127.0.0.1:0")
    sink.update(METRICS, 40)
    port = sink._server.server_address[1]  # type: ignore[attr-defined]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert LINE in answer.read().decode().replace(
            'rank="1",phase="backward"', 'phase="backward",rank="1"'
        )
    sink.close()


def test_a_file_for_the_textfile_collector(tmp_path: Path) -> None:
    path = tmp_path / "ddpcheck.prom"
    sink = sinks.prometheus_sink(str(path))
    sink.update(METRICS, 40)
    sink.close()
    assert "ddpcheck_replicas_agree 1.0" in path.read_text()


@pytest.mark.parametrize("target", ["metrics.txt", "nowhere/a.prom"])
def test_a_wrong_target_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match=target):
        sinks.prometheus_sink(target)


def test_a_port_in_use_is_said() -> None:
    first = sinks.prometheus_sink("127.0.0.1:0")
    port = first._server.server_address[1]  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="in use"):
        sinks.prometheus_sink(f"127.0.0.1:{port}")
    first.close()


def test_an_opentelemetry_collector(receiver: Receiver) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    sink = sinks.OtlpSink(f"{receiver.url}/v1/metrics", "train")
    sink.update(METRICS, 40)
    sink.close()
    body = receiver.bodies[0]
    request = ExportMetricsServiceRequest()
    request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    [resource] = request.resource_metrics
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["ddpcheck.run"] == "train"
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    assert found["ddpcheck_step_seconds"].gauge.data_points[0].as_double == 0.01
    assert len(found["ddpcheck_phase_seconds"].gauge.data_points) == 12


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = sinks.WandbSink("ddp", "train", tmp_path)
    sink.update(METRICS, 40)
    sink.close()
    [log] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # A process of the client writes the file.
    deadline = time.monotonic() + 120
    while b"ddpcheck/step_seconds" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_bytes()
        time.sleep(0.1)


def test_mlflow_in_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    sink = sinks.MlflowSink("ddp", "train")
    sink.update(METRICS, 40)
    sink.close()
    [metric] = (tmp_path / "mlruns").rglob("metrics/ddpcheck/step_seconds")
    assert metric.read_text().split()[1:] == ["0.01", "40"]


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcheck.reports.monitoring.sinks.find_spec", lambda name: None)
    for extra in ("prometheus", "otlp", "wandb", "mlflow"):
        with pytest.raises(PackageMissing, match=rf"ddpcheck\[{extra}\]"):
            sinks.require(extra)
