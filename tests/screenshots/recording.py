"""A recording of a command on a terminal as an animated SVG, which any page can show like a picture."""

from __future__ import annotations

import html
import json
import os
import pty
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.color import Color
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, ROWS = 96, 26
_WIDTH, _HEIGHT, _MARGIN, _BAR = 8.43, 18, 14, 34
_CONSOLE = Console(width=COLUMNS, force_terminal=True, color_system="truecolor")
# Waiting is shortened, and the end stays for a while before the recording begins again.
_LONGEST_PAUSE, _HOLD = 0.9, 6.0
_LINE, _AFTER_COMMAND, _AFTER_JOB = 0.12, 1.2, 3.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]|\x1b\][^\x07]*\x07")
# What torchrun says about threads is not part of the demonstration.
_LEFT_OUT = re.compile(r"OMP_NUM_THREADS|^W\d{4} |^\*{10,}$")


@dataclass(frozen=True)
class Shown:
    """A line of output, with colours, and the second at which it came."""

    when: float
    text: str


def recorded(command: Sequence[object], folder: Path, env: dict[str, str]) -> list[Shown]:
    """Run a command on a terminal; the times of its lines, with pauses shortened."""
    terminal, theirs = pty.openpty()
    # No live view: it redraws lines, and a recording of lines cannot show that.
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "DDPCHECK_LIVE": "0", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [str(word) for word in command], cwd=folder, env={**os.environ, **env, **size}, stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    lines: list[Shown] = []
    rest = b""
    clock, last = 0.0, time.monotonic()
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:
            break
        now = time.monotonic()
        clock, last = clock + min(now - last, _LONGEST_PAUSE), now
        *complete, rest = (rest + data).split(b"\n")
        lines += [
            Shown(clock, _ESCAPES.sub("", line.decode("utf-8", "replace")).rstrip("\r")) for line in complete
        ]
    os.close(terminal)
    if process.wait():
        raise RuntimeError(f"{command} failed with status {process.returncode}")
    return _readable([line for line in lines if not _LEFT_OUT.search(line.text)])


def _readable(lines: Sequence[Shown]) -> list[Shown]:
    """Slow enough to follow: pauses after a command and after its end, and between the lines of a report."""
    shown: list[Shown] = []
    added, before = 0.0, ""
    for line in lines:
        # A line comes after the pause that the line before it asks for.
        added += (
            _AFTER_COMMAND if before.startswith("$ ") else _AFTER_JOB if "exit status" in before else _LINE
        )
        shown.append(Shown(line.when + added, line.text))
        before = line.text
    return shown


def draw_recording(lines: Sequence[Shown], title: str, picture: Path) -> None:
    """Lines appear when they came; the text scrolls when the screen is full."""
    total = lines[-1].when + _HOLD
    width, height = round(COLUMNS * _WIDTH + 2 * _MARGIN), ROWS * _HEIGHT + _BAR + _MARGIN
    styles, rows = [], []
    for number, line in enumerate(lines):
        share = 100 * line.when / total
        styles.append(
            f"@keyframes l{number} {{ 0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
            f" #l{number} {{ animation: l{number} {total:.1f}s infinite }}"
        )
        rows.append(f'<text id="l{number}" y="{(number + 1) * _HEIGHT}">{_spans(line.text)}</text>')
    document = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f"aria-label={json.dumps(title)}><style>text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "
        "monospace; fill: #c5c8c6; white-space: pre }"
        f" #page {{ animation: page {total:.1f}s infinite; transform: translateY({_scrolled(len(lines))}px) }}"
        f" @keyframes page {{ {_scrolling(lines, total)} }} {' '.join(styles)}"
        " @media (prefers-reduced-motion: reduce) { text, #page { animation: none !important } }</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#292929"/>'
        '<circle cx="18" cy="17" r="6" fill="#ff5f57"/><circle cx="38" cy="17" r="6" fill="#febc2e"/>'
        '<circle cx="58" cy="17" r="6" fill="#28c840"/>'
        f'<text x="50%" y="22" text-anchor="middle">{html.escape(title)}</text>'
        f'<svg x="{_MARGIN}" y="{_BAR}" width="{width - _MARGIN}" height="{ROWS * _HEIGHT + 6}"><g id="page">'
        f"{''.join(rows)}</g></svg></svg>\n"
    )
    picture.write_text(document, encoding="utf-8")


def _scrolled(lines: int) -> int:
    return -max(0, lines - ROWS) * _HEIGHT


def _scrolling(lines: Sequence[Shown], total: float) -> str:
    """One step for each time at which lines came."""
    steps = {0.0: 0}
    for number, line in enumerate(lines, start=1):
        steps[100 * line.when / total] = _scrolled(number)
    frames, before = [], 0
    for share, offset in sorted(steps.items()):
        if offset != before:
            frames.append(f"{share:.2f}% {{ transform: translateY({before}px) }}")
            frames.append(f"{share + 0.01:.2f}% {{ transform: translateY({offset}px) }}")
            before = offset
    return (
        f"0% {{ transform: translateY(0) }} {' '.join(frames)} 100% {{ transform: translateY({before}px) }}"
    )


def _spans(line: str) -> str:
    text = Text.from_ansi(line)
    text.truncate(COLUMNS)
    parts = []
    for span in text.render(_CONSOLE):
        style = []
        if span.style is not None and span.style.color is not None:
            style.append(f"fill:{_hex(span.style.color)}")
        if span.style is not None and span.style.bold:
            style.append("font-weight:700")
        if span.style is not None and span.style.dim:
            style.append("opacity:.65")
        content = html.escape(span.text.rstrip("\n"))
        parts.append(f'<tspan style="{";".join(style)}">{content}</tspan>' if style else content)
    return "".join(parts)


def _hex(color: Color) -> str:
    return color.get_truecolor(SVG_EXPORT_THEME).hex
