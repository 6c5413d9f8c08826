"""`python -m tests.screenshots`: runs the jobs and writes every image to docs/images."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.helpers.chromium import opened
from tests.helpers.commands import BIN
from tests.helpers.requirements import missing
from tests.screenshots import jobs
from tests.screenshots.page import draw_page
from tests.screenshots.recording import Shown, draw_recording, recorded
from tests.screenshots.terminal import draw_report, draw_text

IMAGES = jobs.ROOT / "docs" / "images"
# Larger images make a page slow to load.
MOST_BYTES = 300_000
_RUN = "ddpcheck run -- torchrun --nproc-per-node 4 train.py"
_ON_HOSTS = "ddpcheck run -- torchrun --nnodes 4 --node-rank 0 --master-addr node0 train.py"
_LINKS = "ddpcheck links -- torchrun --nnodes 4 --node-rank 0 --master-addr node0"
_HEAD = "header"
_PROGRESS = "section[aria-labelledby=progress]"
# Two columns.
_WIDE = 1500
_LINKS_MAP = "section[aria-labelledby=links]"
_TIME = "section[aria-labelledby=step-time]"
_BUCKETS = "section[aria-labelledby=overlap] figure"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.screenshots", description=__doc__)
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder and use those that exist")
    runs = parser.parse_args().runs
    for need in ("chromium", "lab"):
        if reason := missing(need):
            sys.exit(f"make screenshots {reason}")
    with tempfile.TemporaryDirectory(prefix="ddpcheck-") as temporary:
        folder = (runs or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        draw(folder)
    large = [path.name for path in IMAGES.iterdir() if path.stat().st_size > MOST_BYTES]
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.relative_to(jobs.ROOT)}  {path.stat().st_size:,} bytes")
    if large:
        sys.exit(f"larger than {MOST_BYTES:,} bytes: {', '.join(large)}")


def draw(folder: Path) -> None:
    """All images, from runs in `folder`."""
    # Reports shorten paths below the working directory.
    os.chdir(folder)
    healthy, profiled = jobs.healthy(folder / "healthy"), jobs.profiled(folder / "profiled")
    draw_recording(demo(), "make demo", IMAGES / "demo.svg")
    diverging, straggling = jobs.diverging(folder / "diverging"), jobs.straggling(folder / "straggling")
    draw_text(jobs.slow_link(folder / "lab"), _LINKS, IMAGES / "slow-link.svg")
    held_up = jobs.held_up(folder / "hosts")
    draw_report(held_up, _ON_HOSTS, IMAGES / "slow-link-run.svg")
    draw_report(healthy, _RUN, IMAGES / "healthy.svg")
    draw_report(diverging, _RUN, IMAGES / "finding.svg")
    draw_report(straggling, _RUN, IMAGES / "straggler.svg")
    with opened() as tab:
        draw_page(tab, healthy, IMAGES / "page-healthy.png", [_HEAD, _PROGRESS], width=_WIDE, scale=1)
        draw_page(tab, profiled, IMAGES / "page-overlap.png", [_BUCKETS])
        draw_page(tab, straggling, IMAGES / "page-straggler.png", [_TIME])
        draw_page(tab, straggling, IMAGES / "page-straggler-dark.png", [_TIME], dark=True)
        draw_page(tab, held_up, IMAGES / "page-slow-link.png", [_LINKS_MAP])


def demo() -> list[Shown]:
    """The output of `make demo`."""
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    return recorded(["bash", "examples/demo.sh"], jobs.ROOT, environment)


if __name__ == "__main__":
    main()
