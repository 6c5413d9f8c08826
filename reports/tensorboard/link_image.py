"""The throughput of the links of a job as an image: darker links are slower."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw, ImageFont

from ddpcheck.analysis.timeseries.model import LinkMatrix
from ddpcheck.links.model import megabits
from ddpcheck.reports.safe_text import safe_line, shortened

# Up to this many nodes cells have numbers; beyond that only colours and names.
_MOST_FIGURES = 12
_MOST_NAMES = 128
_WIDE, _HIGH, _SMALL = 76, 32, 12
_MARGIN, _TITLE, _NAME = 10, 62, 84
_BACKGROUND, _TEXT, _UNKNOWN = (255, 255, 255), (30, 34, 40), (232, 234, 238)
_FAST, _SLOW = (222, 238, 226), (178, 24, 43)
# Links that are this many times slower have the darkest colour.
_SLOWEST = 5.0
Colour = tuple[int, int, int]


def link_image(matrix: LinkMatrix) -> tuple[bytes, int, int]:
    """The image as PNG, its width and its height."""
    names = matrix.names[:_MOST_NAMES]
    figures = len(names) <= _MOST_FIGURES
    wide, high = (_WIDE, _HIGH) if figures else (_SMALL, _SMALL)
    width = max(_MARGIN * 2 + _NAME + wide * len(names), 380)
    height = _MARGIN * 2 + _TITLE + high * (len(names) + (1 if figures else 0))
    image = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(image)
    title, small = ImageFont.load_default(15), ImageFont.load_default(12 if figures else 10)
    draw.text((_MARGIN, _MARGIN), matrix.title, _TEXT, title)
    legend = f"from row to column, darker is slower;\nusual throughput {megabits(matrix.usual)}"
    draw.multiline_text((_MARGIN, _MARGIN + 21), legend, _TEXT, small)
    top = _MARGIN + _TITLE
    for row, name in enumerate(names):
        y = top + high * (row + (1 if figures else 0))
        draw.text((_MARGIN, y + high / 2), _short(name, 11), _TEXT, small, anchor="lm")
        for column, other in enumerate(names):
            x = _MARGIN + _NAME + wide * column
            if figures and row == 0:
                draw.text((x + wide / 2, top + high / 2), _short(other, 10), _TEXT, small, anchor="mm")
            rate = matrix.rates[row][column]
            colour = _colour(rate, matrix.usual)
            draw.rectangle((x + 1, y + 1, x + wide - 1, y + high - 1), fill=colour)
            if figures and rate is not None:
                draw.text(
                    (x + wide / 2, y + high / 2), megabits(rate), _text_colour(colour), small, anchor="mm"
                )
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue(), width, height


def _colour(rate: float | None, usual: float) -> Colour:
    if rate is None:
        return _UNKNOWN
    slower = usual / rate if rate > 0 else _SLOWEST
    share = min(1.0, max(0.0, (slower - 1) / (_SLOWEST - 1)))
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(_FAST, _SLOW, strict=True))
    return red, green, blue


def _text_colour(colour: Colour) -> Colour:
    light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return _TEXT if light > 140 else _BACKGROUND


def _short(name: str, most: int) -> str:
    text = safe_line(name)
    return text if len(text) <= most else shortened(text, most)[: most - 1] + "…"
