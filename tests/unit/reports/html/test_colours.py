"""The colours of the page: contrast of text and marks in light and dark (WCAG 2.2, AA)."""

from __future__ import annotations

import re

import pytest

from tests.helpers.paths import ROOT

STYLE = (ROOT / "reports" / "html" / "assets" / "page.css").read_text()
LIGHT, DARK = re.findall(r"body(?:\S*) \{\s*(--paper:.*?)\}", STYLE, re.DOTALL)
THEMES = {
    name: dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    for name, block in (("light", LIGHT), ("dark", DARK))
}
SOFT = ("ok-soft", "error-soft", "warning-soft")
# Which text comes on what.
TEXT = [
    *((text, behind) for text in ("ink", "quiet", "link") for behind in ("paper", "card")),
    *((text, behind) for text in ("ok", "error", "warning", "note") for behind in ("paper", "card")),
    *(("ink", behind) for behind in SOFT),
]
MARKS = [
    *("ink", "ok", "error", "warning", "note", "absent", "hidden", "exposed", "waiting", "compute"),
    *(f"line-{number}" for number in range(1, 9)),
]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_computed_as_in_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
def test_both_themes_have_every_colour(theme: str) -> None:
    assert set(THEMES[theme]) == set(THEMES["light"])
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE)) - {"mark", "soft"}
    assert used <= set(THEMES[theme])


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("text", "behind"), TEXT)
def test_text_can_be_read(theme: str, text: str, behind: str) -> None:
    colours = THEMES[theme]
    assert contrast(colours[text], colours[behind]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("mark", MARKS)
def test_marks_can_be_seen(theme: str, mark: str) -> None:
    colours = THEMES[theme]
    assert contrast(colours[mark], colours["paper"]) >= 3


@pytest.mark.parametrize("theme", THEMES)
def test_the_shades_of_heat_maps_go_one_way(theme: str) -> None:
    """They can be distinguished without colour."""
    shades = [luminance(THEMES[theme][f"heat-{number}"]) for number in range(1, 7)]
    assert shades == sorted(shades, reverse=theme == "light")
