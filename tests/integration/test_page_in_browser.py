"""The HTML page in a real browser: safe against injection, offline, usable by keyboard, on phones and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.page import to_html
from tests.helpers.chromium import Tab, opened
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import ATTACK, attacked, attacking, of_many_ranks, stored, with_parts

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

PHONE = 390
# The lowest contrast between text and background over all elements, and the element.
CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 200)];
  }
  return worst;
})()
"""
# The number of charts that have something on their canvas.
DRAWN = """
[...document.querySelectorAll("figure.live canvas")].filter((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return pixels.some((value) => value > 0);
}).length
"""
UNFOLD = "document.querySelectorAll('main details, header details').forEach((one) => (one.open = true))"
CHARTS = "document.querySelectorAll('figure[data-chart]').length"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with opened() as tab:
        yield tab


def saved(folder: Path, report: Report, ranks: int = 0) -> Path:
    """The page of a report; with measurements of `ranks` ranks, if given."""
    path = folder / "report.html"
    measured = with_parts(report, measurements(ranks)) if ranks else report
    path.write_text(to_html(measured), encoding="utf-8")
    return path


def test_markup_from_the_job_is_shown_as_text_and_nothing_is_loaded(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(to_html(with_parts(attacking(), attacked("", measurements(4)))))
    tab.open(page)
    assert tab.run("typeof window.attacked") == "undefined"
    tab.run(UNFOLD)
    shown = tab.run("document.body.innerText")
    assert all(f"{name}{ATTACK}" in shown for name in ("0.weight", "node0", "eth0", "A100"))
    assert "could not be shown" not in shown
    assert tab.run("document.querySelectorAll('img, link, iframe').length") == 0
    # The page itself is the only request, and its security policy blocked nothing.
    assert tab.requests() == [page.as_uri()]
    assert tab.errors() == []


def test_the_security_policy_blocks_injected_scripts(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(to_html(stored("1-sound")).replace("<main", "<script>window.attacked=1</script><main"))
    tab.open(page)
    assert tab.run("typeof window.attacked") == "undefined"
    assert any("Content Security Policy" in message for message in tab.errors())


def test_charts_and_contrast_in_light_and_dark(tab: Tab, tmp_path: Path) -> None:
    page = saved(tmp_path, of_many_ranks(64), ranks=64)
    for dark in (False, True):
        tab.open(page, dark=dark)
        tab.run(UNFOLD)
        assert tab.errors() == []
        assert "could not be shown" not in tab.run("document.body.innerText")
        assert tab.run(DRAWN) == tab.run(CHARTS) == 11
        ratio, element = tab.run(CONTRAST)
        assert ratio >= 4.5, element


@pytest.mark.parametrize("width", [PHONE, 1100])
def test_no_page_is_wider_than_the_screen(tab: Tab, tmp_path: Path, width: int) -> None:
    for number, report in enumerate([attacking(), of_many_ranks(1024), stored("1-killed")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        tab.open(saved(folder, report, ranks=4), width=width)
        assert tab.run("document.documentElement.scrollWidth") <= width


def test_a_thousand_ranks_can_be_opened_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    tab.open(saved(tmp_path, of_many_ranks()))
    tab.run("document.querySelector('figure[data-chart=strip] .plot').focus()")
    readout = "document.querySelector('figure[data-chart=strip] .readout').textContent"
    for _ in range(20):
        tab.press("ArrowUp", 38)
    tab.press("ArrowRight", 39)
    assert re.match(r"step 50\d, ranks 0-31, 1 of 32", tab.run(readout))
    tab.press("Enter", 13)
    assert tab.run("document.querySelector('figure[data-chart=strip] .back').checkVisibility()")
    tab.press("ArrowRight", 39)
    assert "rank 1" in tab.run(readout)
    assert " of 32" not in tab.run(readout)
    tab.run("document.querySelector('figure[data-chart=strip] .back').click()")
    assert not tab.run("document.querySelector('figure[data-chart=strip] .back').checkVisibility()")


def test_lines_of_chosen_ranks(tab: Tab, tmp_path: Path) -> None:
    tab.open(saved(tmp_path, of_many_ranks()))
    legend = "document.querySelector('figure[data-chart=lines] .u-legend').innerText"
    assert "median rank" in tab.run(legend)
    assert "rank 17" in tab.run(legend)  # the finding is about it
    tab.run(
        "(() => { const field = document.querySelector('.asked input'); field.value = '3, 500-501, 9999';"
        "field.dispatchEvent(new Event('change')); })()"
    )
    shown = tab.run(legend)
    assert all(f"rank {rank}" in shown for rank in (3, 500, 501))
    assert "rank 17" not in shown
    assert "9999" not in shown


def test_the_heat_map_starts_with_the_slowest_ranks_and_shows_every_rank(tab: Tab, tmp_path: Path) -> None:
    tab.open(saved(tmp_path, of_many_ranks(128), ranks=128))
    figure = "document.querySelector('figure[data-chart=grid]')"
    choices = tab.run(f"[...{figure}.querySelectorAll('option')].map((one) => one.textContent)")
    assert choices[0].startswith("24 ranks")  # the slowest
    assert choices[1] == "ranks 0-47"
    assert choices[-1] == "ranks 96-127"
    tab.run(
        f"(() => {{ const choice = {figure}.querySelector('select'); choice.selectedIndex = 1;"
        "choice.dispatchEvent(new Event('change')); })()"
    )
    tab.run(
        f"(() => {{ const press = (key, times) => {{ for (; times > 0; times--) {figure}.querySelector('.plot')"
        ".dispatchEvent(new KeyboardEvent('keydown', { key, shiftKey: true })); };"
        "press('ArrowUp', 60); press('ArrowDown', 2); press('ArrowLeft', 30); })()"
    )
    readout = tab.run(f"{figure}.querySelector('.readout').textContent")
    assert all(words in readout for words in ("rank 2", "data", "4.997 ms"))


def test_every_chart_and_line_can_be_used_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    tab.open(saved(tmp_path, stored("1-learning-rate"), ranks=4))
    charts = tab.run(CHARTS)
    reached, labels = set(), 0
    for _ in range(200):
        tab.press("Tab", 9)
        at = tab.run(
            "(() => { const at = document.activeElement; const figures = [...document.querySelectorAll('figure')];"
            "return [at.className, at.tagName, figures.indexOf(at.closest('figure'))]; })()"
        )
        if at[0] == "plot":
            reached.add(at[2])
        labels += at[1] == "TH"
    assert len(reached) == charts
    assert labels >= 4
    tab.run("document.querySelector('.u-legend th').focus()")
    for shown in ("false", "true"):
        tab.press("Enter", 13)
        assert tab.run("document.querySelector('.u-legend th').getAttribute('aria-pressed')") == shown


def test_printing_is_light_and_fits_the_paper(tab: Tab, tmp_path: Path) -> None:
    tab.open(saved(tmp_path, stored("1-learning-rate"), ranks=4), dark=True)
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert (
        tab.run("Math.max(...[...document.querySelectorAll('.uplot')].map((one) => one.clientWidth))") <= 660
    )
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    tab.print_pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_tables_remain_without_scripts(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "still.html"
    page.write_text(to_html(stored("1-learning-rate")).replace("<script>", '<script type="text/plain">'))
    tab.call("Page.navigate", url=page.as_uri())
    tab.run(
        "new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', done))"
    )
    assert not tab.run("document.querySelector('.plot').checkVisibility()")
    assert tab.run("document.querySelector('figure summary').checkVisibility()")
    tab.run("document.querySelector('figure details').open = true")
    assert "step 5 to 10" in tab.run("document.querySelector('figure table').innerText")


def test_wide_screens_have_two_columns_and_links_open_folded_sections(tab: Tab, tmp_path: Path) -> None:
    page = saved(tmp_path, of_many_ranks(8), ranks=8)
    tab.open(page, width=1680)
    assert (
        len(set(tab.run("[...document.querySelectorAll('main > section')].map((one) => one.offsetLeft)")))
        == 2
    )
    assert tab.run("document.documentElement.scrollWidth") <= 1680
    content = "document.querySelector('section[aria-labelledby=checked] table').checkVisibility()"
    assert not tab.run(content)
    tab.run(
        "document.querySelector('nav a[href=\"#checked\"]').click(); new Promise((go) => setTimeout(go, 50))"
    )
    assert tab.run(content)


def test_paper_shows_what_is_folded(tab: Tab, tmp_path: Path) -> None:
    tab.open(saved(tmp_path, of_many_ranks(8), ranks=8))
    shown = "document.querySelector('section[aria-labelledby=checked] table').checkVisibility()"
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run(shown)
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert not tab.run(shown)
