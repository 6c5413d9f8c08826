"""Parts of the HTML page of a run, as Chromium shows them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from ddpcheck.analysis.analyse import analyse_run
from ddpcheck.reports.html.page import to_html
from tests.browser.chromium import Tab

# Above this a picture makes a page of documentation slow to load.
MOST_BYTES = 300_000
# Sharp on screens with more dots than one a pixel, and still small.
SCALE = 1.5
_MARGIN = 12
# The least box around all that is asked for.
_BOX = """
(() => {
  const boxes = %s.map((one) => document.querySelector(one).getBoundingClientRect());
  const top = Math.min(...boxes.map((box) => box.top)), left = Math.min(...boxes.map((box) => box.left));
  const right = Math.max(...boxes.map((box) => box.right)), bottom = Math.max(...boxes.map((box) => box.bottom));
  return [left + scrollX, top + scrollY, right - left, bottom - top];
})()
"""


def draw_page(
    tab: Tab, run: Path, picture: Path, parts: Sequence[str], width: int = 900, dark: bool = False
) -> None:
    """The box around `parts`, which are selectors of CSS."""
    page = run / "report.html"
    page.write_text(to_html(analyse_run(run)), encoding="utf-8")
    tab.open(page, width=width, dark=dark)
    left, top, wide, tall = tab.run(_BOX % list(parts))
    clip = {
        "x": max(0, left - _MARGIN),
        "y": max(0, top - _MARGIN),
        "width": wide + 2 * _MARGIN,
        "height": tall + 2 * _MARGIN,
        "scale": SCALE,
    }
    shot = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    data = base64.b64decode(shot["data"])
    if len(data) > MOST_BYTES:
        raise SystemExit(
            f"{picture.name} has {len(data)} bytes, more than {MOST_BYTES}: picture less of the page"
        )
    picture.write_bytes(data)
