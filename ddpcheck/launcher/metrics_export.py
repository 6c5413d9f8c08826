"""Exports metrics and findings of a running job: a thread of the launcher, outside the ranks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.live.tracker import LiveState, LiveTracker
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.reports.safe_text import safe_line

INTERVAL_SECONDS = 5.0
# Servers that do not answer must not delay the end of a job for long.
CLOSE_SECONDS = 20.0


class MetricsExport:
    """`tick` computes the state in the launcher's thread; clients, which may wait for a network, run in another one."""

    def __init__(self, config: Config, name: str, folder: Path) -> None:
        from ddpcheck.reports.monitoring import notification, sinks

        self._notification = notification
        self._name = name
        self._url = config.notify
        self._tracker: LiveTracker | None = None
        self._next = 0.0
        self._sent: Finding | None = None
        self._live: LiveState | None = None
        self._closed = False
        sinks.quiet_clients()
        makers: list[Callable[[], sinks.MetricSink]] = []
        if config.prometheus:
            makers.append(lambda: sinks.prometheus_sink(config.prometheus))
        if config.otlp:
            makers.append(lambda: sinks.OtlpSink(config.otlp, name))
        if config.wandb:
            makers.append(lambda: sinks.WandbSink(config.wandb, name, folder))
        if config.mlflow:
            makers.append(lambda: sinks.MlflowSink(config.mlflow, name))
        self._sinks: list[sinks.MetricSink] = []
        for make in makers:
            self._sinks.append(make())
        self._work: Queue[Callable[[], None] | None] = Queue(maxsize=64)
        self._thread = threading.Thread(target=self._run, name="ddpcheck-export", daemon=True)
        self._thread.start()

    def tick(self, run: RunReader) -> None:
        """Every few seconds: hand the state to the clients."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        if self._tracker is None:
            self._tracker = LiveTracker(run, self._name, now)
        state = self._tracker.state(now)
        if not state.ranks:
            return
        self._live = state
        self._put(lambda: self._update(state))
        # Each finding once; a divergence is found anew when its details arrive.
        if self._url and state.finding is not None and self._sent is None:
            self._sent = state.finding
            message = self._notification.finding_message(self._name, state.finding)
            self._put(lambda: self._post(message))

    def finish(self, report: Report) -> None:
        """The report's metrics, and the verdict if there is something to say."""
        self._put(lambda: self._update_report(report))
        if self._url and (report.findings or report.exit_code):
            message = self._notification.verdict_message(self._name, report)
            self._put(lambda: self._post(message))

    def close(self) -> None:
        """Wait until the clients are done, but not for servers that do not answer."""
        if self._closed:
            return
        self._closed = True
        self._put(self._close_sinks)
        self._put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            sys.stderr.write(f"ddpcheck: metrics were not exported completely within {CLOSE_SECONDS:g} s\n")

    def _put(self, work: Callable[[], None] | None) -> None:
        if not self._work.full():
            self._work.put_nowait(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _update(self, state: LiveState) -> None:
        from ddpcheck.reports.monitoring.metrics import live_metrics

        for sink in list(self._sinks):
            self._guarded(sink, lambda sink=sink: sink.update(live_metrics(state), state.steps))  # type: ignore[misc]

    def _update_report(self, report: Report) -> None:
        from ddpcheck.reports.monitoring.metrics import live_metrics, report_metrics

        live = live_metrics(self._live) if self._live is not None else []
        for sink in list(self._sinks):
            self._guarded(
                sink,
                lambda sink=sink: sink.update(report_metrics(report, live), report.steps),  # type: ignore[misc]
            )

    def _close_sinks(self) -> None:
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _guarded(self, sink: object, work: Callable[[], None]) -> None:
        """A client that fails is not asked again; the job and the report do not depend on it."""
        try:
            work()
        except Exception as error:
            self._sinks = [each for each in self._sinks if each is not sink]
            what = type(sink).__name__.strip("_")
            text = safe_line(f"{type(error).__name__}: {error}")
            sys.stderr.write(f"ddpcheck: metrics are no longer exported ({what}: {text})\n")

    def _post(self, message: dict[str, object]) -> None:
        reason = self._notification.post(self._url, message)
        if reason:
            sys.stderr.write(f"ddpcheck: --notify failed: {safe_line(reason)}\n")


@contextmanager
def metrics_export(config: Config, name: str, folder: Path) -> Iterator[MetricsExport | None]:
    """None if nothing is exported. Missing packages and invalid targets are reported before the job starts."""
    if not any((config.prometheus, config.otlp, config.wandb, config.mlflow, config.notify)):
        yield None
        return
    export = MetricsExport(config, name, folder)
    try:
        yield export
    finally:
        export.close()
