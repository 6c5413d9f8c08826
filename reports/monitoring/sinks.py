"""Where metrics go: Prometheus, OTLP, Weights & Biases, MLflow. Each needs its official client, an optional package."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ddpcheck.errors import PackageMissing, UsageError
from ddpcheck.reports.monitoring.metrics import Metric, flat

# By extra: the package to look for, and what it is called.
_PACKAGES = {
    "prometheus": ("prometheus_client", "prometheus-client"),
    "otlp": ("opentelemetry.exporter.otlp.proto.http", "the SDK of OpenTelemetry"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}


class MetricSink(Protocol):
    """Receives all metrics of a run every few seconds, and once more at its end."""

    def update(self, metrics: list[Metric], step: int) -> None: ...

    def close(self) -> None: ...


def require(extra: str) -> None:
    """Fails before the job starts if the client is not installed."""
    module, called = _PACKAGES[extra]
    installed = False
    with contextlib.suppress(ModuleNotFoundError):
        installed = find_spec(module) is not None
    if not installed:
        raise PackageMissing(f"{called} is not installed: install it with `pip install 'ddpcheck[{extra}]'`")


def prometheus_sink(target: str) -> MetricSink:
    """`9400` or `HOST:9400` serves the metrics; anything else is a file for the textfile collector."""
    require("prometheus")
    host, _, port = target.rpartition(":")
    if port.isdecimal():
        return _Endpoint(host or "127.0.0.1", int(port))
    return _TextFile(Path(target))


class _Registry:
    """What prometheus_client collects: the metrics of the last update."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self._metrics: list[Metric] = []
        self.registry.register(self)

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for metric in self._metrics:
            names = list(metric.samples[0][0])
            family = GaugeMetricFamily(metric.name, metric.help, labels=names)
            for labels, value in metric.samples:
                family.add_metric([labels[name] for name in names], value)
            yield family

    def update(self, metrics: list[Metric], step: int) -> None:
        self._metrics = metrics


class _Endpoint(_Registry):
    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise UsageError(
                f"--prometheus {host}:{port}: {(error.strerror or str(error)).lower()}"
            ) from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _TextFile(_Registry):
    def __init__(self, path: Path) -> None:
        super().__init__()
        if path.suffix != ".prom" or not path.absolute().parent.is_dir():
            raise UsageError(
                f"--prometheus {path}: give a port, HOST:PORT, or a file in an existing folder that ends in .prom"
            )
        self._path = path

    def update(self, metrics: list[Metric], step: int) -> None:
        from prometheus_client import write_to_textfile

        super().update(metrics, step)
        write_to_textfile(str(self._path), self.registry)

    def close(self) -> None:
        """The file stays."""


class OtlpSink:
    """Gauges to an OpenTelemetry collector, by OTLP over HTTP."""

    def __init__(self, url: str, name: str) -> None:
        require("otlp")
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        # Failures are reported once, by ddpcheck.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # No interval: the SDK sends at each update, when it is flushed.
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=url, timeout=5), export_interval_millis=float("inf")
        )
        resource = Resource.create({"service.name": "ddpcheck", "ddpcheck.run": name})
        self._provider = MeterProvider([reader], resource=resource)
        self._meter = self._provider.get_meter("ddpcheck")
        self._gauges: dict[str, Any] = {}

    def update(self, metrics: list[Metric], step: int) -> None:
        for metric in metrics:
            gauge = self._gauges.get(metric.name)
            if gauge is None:
                gauge = self._meter.create_gauge(metric.name, unit=metric.unit, description=metric.help)
                self._gauges[metric.name] = gauge
            for labels, value in metric.samples:
                gauge.set(value, dict(labels))
        if not self._provider.force_flush(5_000):
            raise OSError("the collector does not answer")

    def close(self) -> None:
        self._provider.shutdown()


class WandbSink:
    """A run of Weights & Biases in this project. WANDB_MODE=offline keeps it on disk."""

    def __init__(self, project: str, name: str, folder: Path) -> None:
        require("wandb")
        import wandb

        # Its process may not install handlers of signals, which belong to the job.
        settings = wandb.Settings(console="off", quiet=True, silent=True)
        self._run = wandb.init(
            project=project, name=name, dir=str(folder), settings=settings, job_type="ddpcheck"
        )

    def update(self, metrics: list[Metric], step: int) -> None:
        self._run.log({f"ddpcheck/{name}": value for name, value in flat(metrics).items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """A run of MLflow in this experiment; MLFLOW_TRACKING_URI says where, a local folder too."""

    def __init__(self, experiment: str, name: str) -> None:
        require("mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric as TrackedMetric

        self._client: Any = MlflowClient()
        self._metric: Callable[..., Any] = TrackedMetric
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run = self._client.create_run(number, run_name=name, tags={"ddpcheck": "true"}).info.run_id

    def update(self, metrics: list[Metric], step: int) -> None:
        import time

        now = int(time.time() * 1000)
        rows = [
            self._metric(f"ddpcheck/{_allowed(name)}", value, now, step)
            for name, value in flat(metrics).items()
        ]
        self._client.log_batch(self._run, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _allowed(name: str) -> str:
    """MLflow accepts letters, digits and a few marks."""
    return "".join(character if character.isalnum() or character in "_-./ " else "_" for character in name)


def quiet_clients() -> None:
    """Without these variables the clients print to the terminal of the job."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
