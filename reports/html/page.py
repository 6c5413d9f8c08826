"""The whole page: sections in the order people ask, style and script inside, no request to anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.context import PageContext, page_context
from ddpcheck.reports.html.markup import Html, joined, tag
from ddpcheck.reports.html.sections import (
    agreement,
    checks,
    data,
    environment,
    findings,
    gradients,
    hardware,
    links,
    memory,
    overlap,
    ranks,
    startup,
    step_time,
    traffic,
    verdict,
)
from ddpcheck.version import VERSION

# Title and what makes it, top to bottom; a section that returns None is left out.
_SECTIONS: tuple[tuple[str, Callable[[PageContext], Html | None]], ...] = (
    ("Findings", findings.section),
    ("Agreement", agreement.section),
    ("Gradients", gradients.section),
    ("Step time", step_time.section),
    ("Overlap", overlap.section),
    ("Memory", memory.section),
    ("Traffic", traffic.section),
    ("Links", links.section),
    ("Hardware", hardware.section),
    ("Start-up", startup.section),
    ("Ranks", ranks.section),
    ("Data", data.section),
    ("Checked", checks.section),
    ("Environment", environment.section),
)
_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = (
    "theme.js", "numbers.js", "plot.js", "rows.js", "strip.js", "lanes.js", "grid.js", "lines.js", "page.js"
)  # fmt: skip


def to_html(report: Report) -> str:
    """One document that works from a file, without a network."""
    return render(page_context(report))


def render(made: PageContext) -> str:
    """The same, where report.json is at hand as plain data."""
    title, head = verdict.section(made)
    sections = [(name, content) for name, make in _SECTIONS if (content := _made(make, made)) is not None]
    body = tag(
        "body",
        tag("a", "To the report", href="#report", class_="skip"),
        tag("header", head, _contents([name for name, _ in sections])),
        tag("main", *(_section(name, content) for name, content in sections), id="report"),
        tag(
            "footer", tag("p", f"Made by ddpcheck {VERSION}. Nothing on this page was loaded from elsewhere.")
        ),
        Html(f"<script>{_script()}</script>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{_head(title)}{body}</html>\n'


def _made(make: Callable[[PageContext], Html | None], made: PageContext) -> Html | None:
    """A part of the report in a shape that this version does not know costs its own section, never the page."""
    try:
        return make(made)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return tag("p", f"This part of report.json could not be shown ({type(error).__name__}: {error}).")


def _section(name: str, content: Html) -> Html:
    anchor = _anchor(name)
    return tag("section", tag("h2", name, id=anchor), content, aria_labelledby=anchor)


def _contents(names: list[str]) -> Html:
    links = [tag("li", tag("a", name, href=f"#{_anchor(name)}")) for name in names]
    return tag("nav", tag("ul", *links), aria_label="Sections")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _head(title: str) -> Html:
    # The page may not load, send or run anything but its own style and script: a second lock behind escaping.
    policy = (
        f"default-src 'none'; style-src {_hash(_style())}; script-src {_hash(_script())}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{_style()}</style>"),
    )


@cache
def _style() -> str:
    return "\n".join(map(_asset, _STYLES))


@cache
def _script() -> str:
    own = "\n".join(map(_asset, _SCRIPTS))
    return joined([Html(_asset("uplot.min.js")), Html(f'\n(() => {{\n"use strict";\n{own}}})();\n')])


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
