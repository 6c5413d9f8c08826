"""Draws the picture in the README from a real run: `python docs/images/render.py RUN`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from ddpcheck.analysis.analyse import analyse_run
from ddpcheck.reports.terminal import render

PICTURE = Path(__file__).parent / "finding.svg"


def main(run: str) -> None:
    console = Console(
        record=True, width=96, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    render(analyse_run(Path(run)), console)
    drawn = console.export_svg(title="ddpcheck run -- torchrun train.py")
    # The picture must not fetch anything when it is looked at: any monospaced font will do.
    drawn = re.sub(r"@font-face\s*{.*?}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    PICTURE.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
