"""Parts of the HTML page of a run, as Chromium shows them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.reports.html.page import to_html
from tests.helpers.chromium import Tab

# Pixels per CSS pixel: sharp on most screens, and still small.
SCALE = 1.4
_WIDTH = 900
_MARGIN = 12
# The bounding box of all given elements.
_BOX = """
(() => {
  const boxes = %s.map((one) => document.querySelector(one).getBoundingClientRect());
  const top = Math.min(...boxes.map((box) => box.top)), left = Math.min(...boxes.map((box) => box.left));
  const right = Math.max(...boxes.map((box) => box.right)), bottom = Math.max(...boxes.map((box) => box.bottom));
  return [left + scrollX, top + scrollY, right - left, bottom - top];
})()
"""


def draw_page(
    tab: Tab,
    run: Path,
    picture: Path,
    parts: Sequence[str],
    dark: bool = False,
    width: int = _WIDTH,
    scale: float = SCALE,
) -> None:
    """An image of the bounding box of `parts`, which are CSS selectors."""
    page = run / "report.html"
    page.write_text(to_html(analyse_run(run, loss=True)), encoding="utf-8")
    # An image larger than the window has no scroll bar, so its layout is wider than with one.
    tab.call("Emulation.setScrollbarsHidden", hidden=True)
    tab.open(page, width=width, dark=dark, scale=scale)
    left, top, wide, tall = tab.run(_BOX % list(parts))
    clip = {
        "x": max(0, left - _MARGIN),
        "y": max(0, top - _MARGIN),
        "width": wide + 2 * _MARGIN,
        "height": tall + 2 * _MARGIN,
        "scale": 1,
    }
    shot = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    picture.write_bytes(base64.b64decode(shot["data"]))
