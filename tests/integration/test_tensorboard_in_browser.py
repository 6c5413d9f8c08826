"""A real run in TensorBoard, served by `ddpcheck view` and opened in Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.timeseries.nodes import link_matrices
from ddpcheck.launcher.viewer import CHARTS_FRAGMENT
from ddpcheck.reports.tensorboard.folder import link_image
from tests.helpers.chromium import Tab, opened
from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.tensorboard_run import links
from tests.helpers.watched_run import WatchedRun, run_watched

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

JOB = JOBS / "for_tensorboard.py"
RUNS = ["job", "rank-0000", "rank-0001"]
TIMEOUT_SECONDS = 300.0
# A folder for screenshots, if set.
PICTURES = os.environ.get("DDPCHECK_PICTURES", "")
# All visible text, in shadow roots and in the frames of plugins too.
TEXT = """
(() => {
  const parts = [];
  const walk = (node) => {
    if (node.nodeType === 3 && node.data.trim()) parts.push(node.data.trim());
    if (["SCRIPT", "STYLE", "TEMPLATE"].includes(node.nodeName)) return;
    if (node.shadowRoot) walk(node.shadowRoot);
    if (node.nodeName === "IFRAME" && node.contentDocument) walk(node.contentDocument);
    for (const child of node.childNodes) walk(child);
  };
  walk(document.body);
  return parts.join("\\n");
})()
"""
# The number of charts that have something drawn.
DRAWN = """
(() => {
  let count = 0;
  const walk = (node) => {
    if (node.shadowRoot) walk(node.shadowRoot);
    if (node.nodeName === "IFRAME" && node.contentDocument) walk(node.contentDocument);
    if (node.nodeName === "path" && (node.getAttribute("d") || "").length > 20) count += 1;
    if (node.nodeName === "CANVAS" && node.width > 0) count += 1;
    for (const child of node.childNodes || []) walk(child);
  };
  walk(document);
  return count;
})()
"""
IMAGES = """
(() => {
  const found = [];
  const walk = (node) => {
    if (node.shadowRoot) walk(node.shadowRoot);
    if (node.nodeName === "IMG" && node.naturalWidth > 0) found.push([node.naturalWidth, node.naturalHeight]);
    for (const child of node.childNodes || []) walk(child);
  };
  walk(document);
  return found;
})()
"""
# The value of the smoothing control.
SMOOTHING = """
(() => {
  let found = null;
  const walk = (node) => {
    if (node.nodeName === "TF-SMOOTHING-INPUT") found = node.weight;
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.childNodes || []) walk(child);
  };
  walk(document);
  return found;
})()
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    options = ["--profile", "--save-gradients", "0,10,20,30", "--tensorboard", "--sample-hz", "10"]
    run = run_watched(prepared(JOB), tmp_path_factory.mktemp("job"), options=options)
    (run.folder / "links.json").write_text(links().to_json())
    return run


@pytest.fixture(scope="module")
def server(watched: WatchedRun) -> Iterator[str]:
    """The address that `ddpcheck view` prints."""
    process = subprocess.Popen(
        [BIN / "ddpcheck", "view", watched.folder], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            line = process.stdout.readline()
            findings = re.search(rf"(http://\S+?){re.escape(CHARTS_FRAGMENT)}", line)
            assert findings, line
            _wait_until_read(findings[1])
            yield findings[1]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def _wait_until_read(server: str) -> None:
    """TensorBoard responds before it has read everything."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    before, now = None, ask(server, "scalars/tags")
    while (before != now or set(now) != set(RUNS)) and time.monotonic() < deadline:
        time.sleep(1)
        before, now = now, ask(server, "scalars/tags")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with opened() as tab:
        tab.set_view(1400, 1000)
        yield tab


def ask(server: str, path: str) -> Any:
    """The response of a plugin, once it is not empty."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        with urllib.request.urlopen(f"{server}data/plugin/{path}", timeout=300) as answer:
            findings = json.load(answer)
        if findings or time.monotonic() > deadline:
            return findings
        time.sleep(0.2)


def shows(tab: Tab, server: str, where: str, *words: str) -> str:
    """Open a dashboard and wait until it shows all of these words."""
    tab.events.clear()
    tab.call("Page.navigate", url=f"{server}?{time.monotonic_ns()}#{where}")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        text = str(tab.run(TEXT)) if tab.run("document.body !== null") else ""
        if all(word in text for word in words):
            break
        missing = [word for word in words if word not in text]
        assert time.monotonic() < deadline, f"{where} does not show {missing}:\n{text[:3000]}"
        time.sleep(0.2)
    if PICTURES:
        time.sleep(3)
        tab.screenshot(Path(PICTURES) / f"{re.split('[^a-z_]', where)[0]}.png", whole=False)
    return text


def test_recorded_losses_are_those_that_the_job_printed(watched: WatchedRun) -> None:
    assert watched.status == 10, str(watched)
    assert f"ddpcheck view {watched.folder}" in watched.stderr
    printed = re.findall(r"^loss (\d) (\d+) (\S+)$", watched.stdout, re.MULTILINE)
    recorded = {
        (rank, record["step"] + number): value
        for rank in (0, 1)
        for record in watched.records(rank)
        if record["kind"] == "loss"
        for number, value in enumerate(record["values"])
    }
    assert recorded == {(int(rank), int(step)): float(value) for rank, step, value in printed}
    assert len(recorded) == 2 * 40


def test_scalars_of_all_runs(watched: WatchedRun, tab: Tab, server: str) -> None:
    shows(tab, server, "scalars", *RUNS, "agreement/agree", "agreement/parameters_that_differ")
    assert tab.run(DRAWN) > 0
    tags = {run: set(findings) for run, findings in ask(server, "scalars/tags").items()}
    assert {"agreement/agree", "gradients/mean_check_error", "communication/exposed_ms"} <= tags["job"]
    ranks = {"loss/loss", "step_time/step_ms", "memory/after_step_MiB", "profiled/overlap_percent"}
    assert ranks <= tags["rank-0000"] == tags["rank-0001"]
    assert any(tag.startswith("loopback/sent_MB_per_s/") for tag in tags["job"])
    points = ask(server, "scalars/scalars?run=job&tag=agreement/agree")
    assert [(step, value) for _, step, value in points] == [(step, float(step < 30)) for step in range(40)]
    overlap = ask(server, "scalars/scalars?run=rank-0001&tag=profiled/overlap_percent")
    measured = watched.report["overlap"]["ranks"][1]["by_step"]
    assert {step: value for _, step, value in overlap} == pytest.approx(
        {each["step"]: each["overlap_pct"] for each in measured}
    )


def test_custom_scalars_put_all_ranks_in_one_chart(tab: Tab, server: str) -> None:
    layout = ask(server, "custom_scalars/layout")
    categories = [category["title"] for category in layout["category"]]
    assert len(categories) >= 3
    # The first category is open.
    charts = [chart["title"] for chart in layout["category"][0]["chart"]]
    shows(tab, server, CHARTS_FRAGMENT.removeprefix("#"), *categories, *charts, *RUNS)
    # Smoothing would turn the step from 1 to 0 into a slope.
    assert tab.run(SMOOTHING) == 0
    tag = "gradients%2Fnorm_(before|after)_allreduce"
    norms = {run: ask(server, f"custom_scalars/scalars?run={run}&tag={tag}")["tag_to_events"] for run in RUNS}
    assert {run: list(findings) for run, findings in norms.items()} == {
        "job": ["gradients/norm_after_allreduce"],
        "rank-0000": ["gradients/norm_before_allreduce"],
        "rank-0001": ["gradients/norm_before_allreduce"],
    }


def test_text_with_the_verdict(tab: Tab, server: str) -> None:
    shows(tab, server, "text", "report/findings_about_this_rank", "step 30", "DDP206", "steps 5-7")


def test_histograms_of_the_saved_gradients(tab: Tab, server: str) -> None:
    shows(tab, server, "histograms", "gradients/0.weight/before_allreduce", *RUNS)
    tags = ask(server, "histograms/tags")
    assert set(tags["rank-0000"]) == set(tags["rank-0001"])
    assert "gradients/0.weight/after_allreduce" in tags["job"]
    findings = ask(server, "histograms/histograms?run=rank-0001&tag=gradients/0.weight/before_allreduce")
    assert [step for _, step, _ in findings] == [0, 10, 20, 30]
    assert all(sum(row[2] for row in rows) == 256 * 256 for _, _, rows in findings)


def test_the_map_of_links_is_an_image(watched: WatchedRun, tab: Tab, server: str) -> None:
    [matrix] = link_matrices(NodeLinks(), watched.folder)
    _, *size = link_image(matrix)
    shows(tab, server, "images", "links/0", "job")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not tab.run(IMAGES) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert size in tab.run(IMAGES)


def test_the_profiler_shows_the_traces(watched: WatchedRun, tab: Tab, server: str) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while ask(server, "pytorch_profiler/runs")["runs"] != ["job"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ask(server, "pytorch_profiler/runs")["runs"] == ["job"]
    workers = ask(server, "pytorch_profiler/workers?run=job&view=Overview")
    names = [name.partition(".")[0] for name in watched.files("traces/*")]
    assert workers == names
    overview = ask(server, f"pytorch_profiler/overview?run=job&worker={names[0]}&span=1&view=Overview")
    assert [row[0] for row in overview["steps"]["rows"]] == ["5", "6", "7"]
    # Its charts need a library from the network; its menus do not.
    shows(tab, server, "pytorch_profiler", "Runs", "job", "Views", "Overview", "Workers", names[0])
