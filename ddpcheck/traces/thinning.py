"""Drops events nobody will look at before they are decoded, in files laid out the way Kineto writes them."""

from __future__ import annotations

from collections.abc import Iterable

# Between two events stand these lines. No string can hold them: in JSON a string has no line break.
_BETWEEN = b"\n  },\n  {\n"
_PHASE = b'    "ph": "%s"'
# Keys stand on one line in older files and on one each in newer ones.
_OLDER, _NEWER = b", ", b",\n    "


class Thinner:
    """Drops arrows, and spans by their category and the beginning of their name."""

    def __init__(self, spans: Iterable[tuple[str, str]]) -> None:
        dropped = list(spans)
        self._older, self._newer = (
            tuple(_arrow(gap, phase) for phase in (b"s", b"t", b"f"))
            + tuple(_span(gap, category, name) for category, name in dropped)
            for gap in (_OLDER, _NEWER)
        )

    def thinned(self, events: bytes) -> bytes:
        """`events`, objects with commas between them, without what is to be dropped.

        The first and the last one always stay: whether the text was cut in the right places shows in them.
        """
        pieces = events.split(_BETWEEN)
        if len(pieces) < 3:
            return events
        after_phase = pieces[1][len(_PHASE % b"X") :]
        unwanted = self._newer if after_phase.startswith(_NEWER) else self._older
        kept = [piece for piece in pieces[1:-1] if not piece.startswith(unwanted)]
        return _BETWEEN.join([pieces[0], *kept, pieces[-1]])


def _arrow(gap: bytes, phase: bytes) -> bytes:
    return _PHASE % phase + gap + b'"id": '


def _span(gap: bytes, category: str, name: str) -> bytes:
    begin = _PHASE % b"X" + gap + b'"cat": "%s"' % category.encode()
    return begin + gap + b'"name": "%s' % name.encode() if name else begin
