"""The folder for TensorBoard, read back by TensorBoard itself."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.util import tensor_util

from ddpcheck.analysis.overlap.model import RankStepOverlap
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.analysis.timeseries.model import LinkMatrix, RunTimeSeries, SeriesKind
from ddpcheck.errors import UsageError
from ddpcheck.formatting import percent_text
from ddpcheck.reports.tensorboard.folder import (
    is_current,
    link_image,
    plain_text,
    verdict_text,
    write_tensorboard,
)
from ddpcheck.reports.tensorboard.tags import SHOWN, safe_name
from tests.helpers.overlap_builder import overlap
from tests.helpers.run_builder import RunBuilder
from tests.helpers.sample_reports import attacking, of_many_ranks
from tests.helpers.tensorboard_run import DIVERGENCE_STEP, STEPS, WAITS, build


def read(folder: Path) -> EventAccumulator:
    """Everything, and not a sample of it."""
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def values(events: EventAccumulator, tag: str) -> dict[int, Any]:
    return {event.step: tensor_util.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)}


def scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    assert events.SummaryMetadata(tag).plugin_data.plugin_name == scalar.PLUGIN_NAME
    return {step: float(value) for step, value in values(events, tag).items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = build(tmp_path_factory.mktemp("run"))
    write_tensorboard(analyse_run(run, course=True), run, run / "tensorboard")
    return run / "tensorboard"


@pytest.fixture(scope="module")
def runs(written: Path) -> dict[str, EventAccumulator]:
    return {path.name: read(path) for path in written.iterdir() if path.is_dir()}


def test_one_run_for_the_job_and_one_for_each_rank(runs: dict[str, EventAccumulator]) -> None:
    assert sorted(runs) == ["job", "rank-0000", "rank-0001", "rank-0002"]


def test_scalars_come_back_as_they_were(runs: dict[str, EventAccumulator]) -> None:
    job, late = runs["job"], runs["rank-0002"]
    agree = {step: float(step < DIVERGENCE_STEP) for step in range(STEPS)}
    assert scalars(job, "agreement/agree") == scalars(late, "agreement/agree") == agree
    assert scalars(runs["rank-0000"], "agreement/agree") == dict.fromkeys(range(STEPS), 1.0)
    assert scalars(job, "agreement/parameters_that_differ") == {s: 2 * (1 - a) for s, a in agree.items()}
    losses = scalars(job, "loss/loss")
    assert math.isnan(losses.pop(2))
    assert losses == {0: 1.0, 1: 0.5, 3: 1.0, 4: 2.0, 5: 3.0}
    assert scalars(late, "step_time/step_ms") == dict.fromkeys(range(1, STEPS), 10.0)
    waits = {step: wait / 1000 for step, wait in enumerate(WAITS[2], 1)}
    assert scalars(late, "step_time/wait_ms") == pytest.approx(waits, rel=1e-6)
    assert scalars(late, "memory/after_step_MiB") == dict.fromkeys((0, 1, 2, 5), 3.0)
    assert scalars(late, "gradients/norm_before_allreduce")[0] == pytest.approx(3.0, rel=0.2)
    assert scalars(job, "gradients/norm_after_allreduce")[0] == pytest.approx(2.0, rel=0.2)
    assert "rounding" in job.SummaryMetadata("gradients/mean_check_error").summary_description


def test_histograms_of_gradients(runs: dict[str, EventAccumulator]) -> None:
    tag = "gradients/body.weight/before_allreduce"
    rows = values(runs["rank-0001"], tag)
    assert runs["rank-0001"].SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    assert list(rows) == [0, 4]
    assert rows[0].shape == (30, 3)
    assert (rows[0][0, 0], rows[0][-1, 1], rows[0][:, 2].tolist()) == (1.0, 60.0, [2.0] * 30)
    after = "gradients/body.weight/after_allreduce"
    assert list(values(runs["job"], after)) == [0]
    assert [list(values(runs[f"rank-000{rank}"], after)) for rank in range(3)] == [[4]] * 3


def test_verdict_findings_and_findings_by_rank(runs: dict[str, EventAccumulator]) -> None:
    [verdict] = values(runs["job"], "report/verdict").values()
    assert "Replicas diverge at step 4" in verdict.item().decode()
    assert "DDP201" in verdict.item().decode()
    [about] = values(runs["rank-0002"], "report/findings_about_this_rank").values()
    assert "DDP201" in about.item().decode()
    assert "report/findings_about_this_rank" not in runs["rank-0000"].Tags()["tensors"]


def test_links_are_an_image(runs: dict[str, EventAccumulator]) -> None:
    [(width, height, png)] = values(runs["job"], "links/0").values()
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (int(width), int(height))
    assert runs["job"].SummaryMetadata("links/0").plugin_data.plugin_name == "images"


def test_slow_links_are_darker_and_unknown_ones_grey() -> None:
    matrix = LinkMatrix("Links", ("a", "b"), ((None, 1e8), (1e7, None)), 1e8)
    png, _, _ = link_image(matrix)
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = {colour for _, colour in picture.getcolors(1 << 16) or ()}
    assert {(232, 234, 238), (222, 238, 226), (178, 24, 43)} <= colours
    many = tuple(f"node-with-a-long-name-{number}" for number in range(200))
    _, width, height = link_image(LinkMatrix("Links", many, ((1e8,) * 200,) * 200, 1e8))
    assert max(width, height) < 2000


def test_the_layout_puts_all_ranks_in_one_chart(runs: dict[str, EventAccumulator]) -> None:
    [raw] = values(runs["job"], custom_scalar.CONFIG_SUMMARY_TAG).values()
    layout = Layout.FromString(raw.item())
    patterns = [
        tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag
    ]
    tags = {tag for events in runs.values() for tag in events.Tags()["tensors"]}
    shown = {tag for tag in tags for pattern in patterns if re.match(pattern, tag)}
    assert {"agreement/agree", "loss/loss", "step_time/step_ms", "memory/after_step_MiB"} <= shown
    # Nothing is drawn that this job does not have, and related series are in one chart.
    assert not any("nvlink" in pattern or "profiled" in pattern for pattern in patterns)
    [norms] = [c for cat in layout.category for c in cat.chart if c.title.startswith("Gradient norms")]
    assert len(norms.multiline.tag) == 2
    assert re.match("x(/.*)?$", "x/node0")


def test_every_figure_has_a_tag_of_its_own() -> None:
    assert set(SHOWN) == set(SeriesKind)
    assert len({shown.tag for shown in SHOWN.values()}) == len(SeriesKind)
    assert safe_name("a/b c<d>.weight") == "a_b_c_d_.weight"


def test_profiled_steps_and_their_traces(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", 2).wrap().train(3).end().save()
    (run / "traces").mkdir()
    elsewhere = tmp_path / "mine.json"
    elsewhere.write_text("{}")
    own = run / "traces" / "host_7_rank0.123.pt.trace.json.gz"
    own.write_bytes(b"x")
    profiled = overlap()
    first, second = profiled.ranks[:2]
    steps = (RankStepOverlap(5, 100, 900, 80, 20, 80.0), RankStepOverlap(6, 0, 900, 0, 0, 0.0))
    profiled = replace(
        profiled,
        ranks=(
            replace(first, rank=0, file="traces/host_7_rank0.123.pt.trace.json.gz", by_step=steps),
            replace(second, rank=1, file=str(elsewhere)),
            replace(second, rank=2, file="traces/gone.pt.trace.json"),
        ),
    )
    report = replace(analyse_run(run, course=True), overlap=profiled)
    write_tensorboard(report, run, run / "tensorboard")
    links = sorted((run / "tensorboard" / "job").glob("*.pt.trace.json*"))
    assert [link.resolve() for link in links] == [own, elsewhere]
    assert links[0].name == own.name
    assert links[1].name.startswith("rank1.")
    # A run folder may be moved.
    moved = (run.rename(tmp_path / "moved")) / "tensorboard" / "job" / own.name
    assert moved.read_bytes() == b"x"
    [text] = values(read(tmp_path / "moved" / "tensorboard" / "job"), "report/overlap").values()
    assert "hidden behind itself" in text.item().decode()
    assert f"| {percent_text(first.overlap_pct)} |" in unescape(text.item().decode())


def test_text_of_the_job_stays_text(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard import plugin_util
    html = plugin_util.markdown_to_safe_html(verdict_text(attacking()))
    assert "<img" not in html
    assert "<script" not in html
    assert "onerror" in html
    nasty = "a | b *c* _d_ [e](http://f) ![g](http://h) <img src=http://i> # `j` &amp; 1. k\n- l ~~m~~"
    html = plugin_util.markdown_to_safe_html(plain_text(nasty))
    assert not any(tag in html for tag in ("<img", "<a ", "<em", "<code", "<strong", "<li"))
    shown = html.removeprefix("<p>").removesuffix("</p>")
    assert unescape(shown) == nasty.replace("\n", "\\n")
    for text in ("1. first", "- one", "# head", "> said", "    code", "=== a", "+ b"):
        html = plugin_util.markdown_to_safe_html(plain_text(text))
        assert not any(tag in html for tag in ("<ol", "<ul", "<h1", "<block", "<pre")) or text[0] == " "


def test_a_thousand_ranks_make_few_runs(tmp_path: Path) -> None:
    course = RunTimeSeries()
    write_tensorboard(replace(of_many_ranks(), course=course), tmp_path, tmp_path / "tensorboard")
    assert [path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == ["job"]


def test_only_a_folder_of_ddpcheck_is_replaced(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", 2).wrap().train(3).end().save()
    report = analyse_run(run, course=True)
    out = tmp_path / "out"
    out.mkdir()
    write_tensorboard(report, run, out)
    (out / "rank-0077").mkdir()
    write_tensorboard(report, run, out)
    assert sorted(path.name for path in out.iterdir()) == ["ddpcheck.json", "job", "rank-0000", "rank-0001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    stranger = tmp_path / "thesis"
    stranger.mkdir()
    (stranger / "chapter1.tex").write_text("x")
    with pytest.raises(UsageError, match="was not created by ddpcheck"):
        write_tensorboard(report, run, stranger)
    assert [path.name for path in stranger.iterdir()] == ["chapter1.tex"]


def test_whether_it_still_shows_the_run(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", 2).wrap().train(3).end().save()
    out = run / "tensorboard"
    assert not is_current(run, out)
    write_tensorboard(analyse_run(run, course=True), run, out)
    assert is_current(run, out)
    (run / "links.json").write_text("{}")
    assert not is_current(run, out)
    (run / "links.json").unlink()
    assert is_current(run, out)
    os.utime(run / "rank-00001.jsonl", (2e9, 2e9))
    assert not is_current(run, out)
    (out / "ddpcheck.json").write_text("torn")
    assert not is_current(run, out)


def test_neither_torch_nor_tensorflow_is_needed(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", 2).wrap().train(3).end().save()
    check = (
        "import sys\nsys.modules.update(dict.fromkeys(('torch', 'tensorflow')))\n"
        "from ddpcheck.__main__ import main\n"
        f"main(['report', {str(run)!r}, '--tensorboard'])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"`ddpcheck view {run}`" in done.stdout
    assert json.loads((run / "tensorboard" / "ddpcheck.json").read_text())["files"] == 4
