"""What a built site would fetch from elsewhere: the site must need nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
# Says where a page belongs; nobody fetches it.
_SPOKEN = {"canonical", "next", "prev"}
_ELSEWHERE = re.compile(r"(?:https?:)?//")
_IN_STYLES = re.compile(r"(?:url\(|@import\s)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Page(HTMLParser):
    """Collects the addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        address = attributes.get(_LOADING.get(tag, "")) or ""
        if _ELSEWHERE.match(address) and attributes.get("rel") not in _SPOKEN:
            self.found.append(address)


def loads_from_elsewhere(site: Path) -> Iterator[tuple[str, str]]:
    """File of the site and the foreign address it asks for."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            text = path.read_text(encoding="utf-8")
            page = _Page()
            if path.suffix != ".css":
                page.feed(text)
            for address in [*page.found, *_IN_STYLES.findall(text)]:
                yield path.relative_to(site).as_posix(), address
