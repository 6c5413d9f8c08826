"""`python -m tests.screenshots`: runs the jobs and draws every picture into docs/images."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import browser, opened
from tests.lab.lab import missing
from tests.screenshots import jobs
from tests.screenshots.page import draw_page
from tests.screenshots.terminal import draw_report, draw_text

IMAGES = jobs.ROOT / "docs" / "images"
_COMMAND = "ddpcheck run -- torchrun --nproc-per-node 4 train.py"
_TOP = ".verdict"
_AGREEMENT = "section[aria-labelledby=agreement]"
_TIME = "section[aria-labelledby=step-time]"
_OVERLAP = "section[aria-labelledby=overlap]"


def main() -> None:
    if browser() is None or missing():
        sys.exit(f"pictures cannot be made here: {missing() or 'there is no Chromium'}")
    with tempfile.TemporaryDirectory() as name, opened() as tab:
        folder = Path(name)
        healthy = jobs.healthy(folder / "healthy")
        draw_report(healthy, _COMMAND, IMAGES / "healthy.svg")
        draw_page(tab, healthy, IMAGES / "page-healthy.png", [_TOP, _AGREEMENT])
        draw_page(tab, healthy, IMAGES / "page-overlap.png", [f"{_OVERLAP} figure"])
        diverging = jobs.diverging(folder / "diverging")
        draw_report(diverging, _COMMAND, IMAGES / "finding.svg")
        draw_page(tab, diverging, IMAGES / "page-divergence.png", [_TOP, _AGREEMENT])
        straggling = jobs.straggling(folder / "straggling")
        draw_report(straggling, _COMMAND, IMAGES / "straggler.svg")
        draw_page(tab, straggling, IMAGES / "page-straggler.png", [_TIME])
        draw_page(tab, straggling, IMAGES / "page-straggler-dark.png", [_TIME], dark=True)
        said = jobs.slow_link(folder / "lab")
        draw_text(said, "ddpcheck links -- torchrun --nnodes 4 ...", IMAGES / "slow-link.svg")
    for picture in sorted([*IMAGES.glob("*.svg"), *IMAGES.glob("*.png")]):
        print(f"{picture.relative_to(jobs.ROOT)}  {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
