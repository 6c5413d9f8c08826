"""Finds external resources that the pages of a built site would load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_ATTRIBUTES = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
    "object": "data",
}
# Browsers do not load links with these relations.
_NOT_LOADED = {"canonical", "next", "prev"}
_EXTERNAL = re.compile(r"(?:https?:)?//")
_IN_STYLES = re.compile(r"(?:url\(|@import\s)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Page(HTMLParser):
    """Collects the external addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        address = attributes.get(_ATTRIBUTES.get(tag, "")) or ""
        if _EXTERNAL.match(address) and attributes.get("rel") not in _NOT_LOADED:
            self.addresses.append(address)


def external_loads(site: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a file of the site and an external address that it loads."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            text = path.read_text(encoding="utf-8")
            page = _Page()
            if path.suffix != ".css":
                page.feed(text)
            for address in [*page.addresses, *_IN_STYLES.findall(text)]:
                yield path.relative_to(site).as_posix(), address
