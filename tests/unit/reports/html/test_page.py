"""The page as text: escaped, well-formed, of limited size, and offline."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.analysis.timeseries.model import (
    AgreementHistory,
    AgreementInterval,
    GradientHistory,
    NamedSeries,
    RunTimeSeries,
    SeriesKind,
)
from ddpcheck.reports.html.components import embedded, tag
from ddpcheck.reports.html.page import to_html
from ddpcheck.reports.views.key_figures import key_figures
from ddpcheck.reports.views.timeseries import finding_marks
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import ATTACK, attacking, of_many_ranks, stored, with_parts

EMPTY = Report(Verdict.INCOMPLETE, 0, 0, (), None, (), (), ())


class Page(HTMLParser):
    """Elements, attributes, text and embedded data of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "rect", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page(report: Report) -> Page:
    read = Page(to_html(report))
    assert not read.open
    return read


@pytest.mark.parametrize(
    "report",
    [stored("1-sound"), stored("1-killed"), stored("1-damaged"), attacking(), of_many_ranks(), EMPTY],
)
def test_every_report_makes_a_page_that_is_well_formed(report: Report) -> None:
    read = page(report)
    titles = [name for name, _ in read.elements if name == "h1"]
    assert titles == ["h1"]


def test_nothing_can_be_loaded_from_anywhere() -> None:
    for name, attributes in page(attacking()).elements:
        assert name not in ("link", "iframe", "object", "embed", "base", "form", "img")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(attribute.startswith("on") or attribute == "style" for attribute in attributes)


def test_the_policy_names_the_very_style_and_script() -> None:
    source = to_html(stored("1-sound"))
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)
    for element, directive in (("style", "style-src"), ("script", "script-src")):
        content = source.rpartition(f"<{element}>")[2].partition(f"</{element}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} &#x27;sha256-{digest}&#x27;" in policy
    assert policy.startswith("default-src &#x27;none&#x27;")


def test_text_of_the_job_stays_text() -> None:
    read = page(attacking())
    assert [name for name, attributes in read.elements if name == "script" and "type" not in attributes] == [
        "script"
    ]
    assert f"0.weight{ATTACK}" in read.text
    assert "window.attacked" in read.text


def test_data_of_charts_cannot_end_its_element() -> None:
    markup = embedded({"name": ATTACK})
    assert markup.count("<") == 2
    assert json.loads(markup.partition(">")[2].rpartition("</")[0]) == {"name": ATTACK}


def test_markup_escapes_unless_it_is_its_own() -> None:
    assert tag("p", "<b>", tag("b", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    assert tag("p", "a\x1b[31m") == "<p>a\\x1b[31m</p>"


def test_evidence_is_side_by_side_with_the_outlier_marked() -> None:
    source = to_html(stored("1-learning-rate"))
    assert (
        '<td class="number">0.001</td><td class="number">0.001</td><td class="number error">0.0001</td>'
        in source
    )


def test_every_chart_has_words_and_a_table() -> None:
    source = to_html(of_many_ranks())
    figures = re.findall(r"<figure.*?</figure>", source, re.S)
    assert len(figures) == 3
    for figure in figures:
        assert re.search(r'role="img" aria-label="[^"]{20,}"', figure)
        assert "<table>" in figure


def test_four_ranks_and_a_thousand_steps_stay_below_two_megabytes() -> None:
    ranks, steps = tuple(range(4)), tuple(range(1000))
    # As bad as it gets: agreement that changes at every step, and numbers of every length.
    intervals = tuple(AgreementInterval(step, step, 1, (step % 4,)) for step in steps)
    series = tuple(float(f"{(step + 1) * 1.2345e-7:.3g}") for step in steps)
    report = Report(
        Verdict.OK, 4, 1000, ("train",), 0, (), (), (),
        agreement=(AgreementHistory("0", "Net", ranks, intervals),),
        gradients=(GradientHistory("0", "Net", 1, steps, {str(r): series for r in ranks}, series, series),),
    )  # fmt: skip
    assert len(to_html(report).encode()) < 500_000


def test_a_thousand_ranks_stay_below_two_megabytes() -> None:
    assert len(to_html(of_many_ranks()).encode()) < 2_000_000


def test_the_head_has_six_figures_whatever_was_recorded() -> None:
    for report in (stored("1-sound"), stored("1-killed"), of_many_ranks(), EMPTY):
        figures = key_figures(report)
        assert len(figures) == len({figure.label for figure in figures}) == 6
        assert all(figure.value and figure.detail for figure in figures)


def test_findings_are_marked_over_the_steps_and_open_what_they_are_about() -> None:
    report = with_parts(of_many_ranks(8), measurements(8))
    report = replace(
        report,
        time=tuple(
            replace(table, ranks=tuple(replace(rank, course_us=(9000, 7000, 8000)) for rank in table.ranks))
            for table in report.time
        ),
    )
    [mark] = finding_marks(report)
    assert (mark.step, mark.label) == (400, "DDP201")
    source = to_html(report)
    assert '"marks":[{"x":400,"label":"DDP201","colour":"error"}]' in source
    order = re.findall(r'<h2 id="([^"]+)"', source)
    assert order[:3] == ["findings", "agreement", "gradients"]
    assert order[-1] == "environment"


def test_long_tables_and_stacks_are_folded() -> None:
    source = to_html(with_parts(of_many_ranks(8), measurements(8)))
    for name in ("checked", "environment"):
        assert re.search(rf'<section aria-labelledby="{name}" class="folded"><details><summary>', source)


def test_the_loss_is_drawn_where_it_was_read() -> None:
    report = stored("1-sound")
    assert "Loss over the steps" not in to_html(report)
    loss = NamedSeries(SeriesKind.LOSS, (0, 1, 2), (2.5, 2.0, 1.5))
    source = to_html(replace(report, course=RunTimeSeries(job=(loss,))))
    assert "Loss over the steps" in source
    assert '"values":[2.5,2.0,1.5]' in source
