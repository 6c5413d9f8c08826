"""Reads the events of a trace in chunks, so that files of gigabytes need little memory."""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import IO, Any, TypeVar

import msgspec

from ddpcheck.errors import TraceUnreadable

# Text between two events. It cannot occur in a string: JSON strings have no line breaks.
_EVENT_SEPARATOR = b"\n  },\n  {\n"
_PHASE = b'    "ph": "%s"'
# Older files have all keys of an event on one line, newer ones have one per line.
_OLDER, _NEWER = b", ", b",\n    "
# Fits a processor's cache, which saves a fifth of the time.
WINDOW = 512 << 10
# Cut positions to try before reading on; in files of profilers the first one is right.
_MAX_CUT_ATTEMPTS = 16
_EVENTS_BEGIN = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_LONGEST_KEY = 64
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
# Some profilers write NaN and Infinity, which are not JSON; none of them is used here.
_NO_NUMBER = re.compile(rb"(?<=[:\[,])(\s*)-?(?:nan|inf|NaN|Infinity)(?=\s*[,\]}])")
_NOTHING = msgspec.Raw(b"")
T = TypeVar("T")


class EventPrefilter:
    """Drops flow arrows, and spans by category and prefix of the name, before JSON is decoded."""

    def __init__(self, spans: Iterable[tuple[str, str]]) -> None:
        dropped = list(spans)
        self._older, self._newer = (
            tuple(_arrow(gap, phase) for phase in (b"s", b"t", b"f"))
            + tuple(_span(gap, category, name) for category, name in dropped)
            for gap in (_OLDER, _NEWER)
        )

    def filtered(self, events: bytes) -> bytes:
        """`events`, comma-separated objects, without the dropped ones.

        The first and the last one are always kept: they show whether the text was cut correctly.
        """
        pieces = events.split(_EVENT_SEPARATOR)
        if len(pieces) < 3:
            return events
        after_phase = pieces[1][len(_PHASE % b"X") :]
        unwanted = self._newer if after_phase.startswith(_NEWER) else self._older
        kept = [piece for piece in pieces[1:-1] if not piece.startswith(unwanted)]
        return _EVENT_SEPARATOR.join([pieces[0], *kept, pieces[-1]])


def _arrow(gap: bytes, phase: bytes) -> bytes:
    return _PHASE % phase + gap + b'"id": '


def _span(gap: bytes, category: str, name: str) -> bytes:
    begin = _PHASE % b"X" + gap + b'"cat": "%s"' % category.encode()
    return begin + gap + b'"name": "%s' % name.encode() if name else begin


def nanoseconds(written: bytes) -> int:
    """The number of microseconds in `written`, quoted or not, in nanoseconds.

    Without floats: microseconds since 1970 with three decimals need more digits than a float has.
    """
    try:
        # Nearly all times have three decimals or none.
        return int(written.replace(b".", b"")) if written[-4:-3] == b"." else int(written) * 1000
    except ValueError:
        return _rounded(written.strip(b'"'))


def _rounded(written: bytes) -> int:
    try:
        exact = Decimal(written.decode("ascii")) * 1000
        return int(exact.to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, OverflowError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{written!r} is not a time") from error


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments that are used; profilers write dozens more."""

    correlation: Any = None
    stream: Any = None
    rank: Any = msgspec.field(default=None, name="Rank")
    collective_name: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    # The same two in older traces; also numbers of elements, despite the name.
    size_in: Any = msgspec.field(default=None, name="In msg size")
    size_out: Any = msgspec.field(default=None, name="Out msg size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    sequence: Any = msgspec.field(default=None, name="Seq")
    shapes: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """The fields that are used of every event; times stay raw, because a float is not precise enough."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: Args | list[Any] | str | bool | int | float | None = NO_ARGS


class Header(msgspec.Struct, rename="camel"):
    """Metadata of a trace, before or after its events."""

    trace_events: list[Event]
    distributed_info: Any = None
    base_time_nanoseconds: Any = None
    # Only in a merged timeline written by ddpcheck.
    ddpcheck: Any = None


_events = msgspec.json.Decoder(list[Event])
_header = msgspec.json.Decoder(Header)


class EventReader:
    """Iterate once over the chunks of a file; afterwards `facts` holds its metadata."""

    def __init__(self, file: IO[bytes], name: str, prefilter: EventPrefilter, window: int = WINDOW) -> None:
        self.facts: dict[str, Any] = {}
        self._file = file
        self._name = name
        self._prefilter = prefilter
        self._window = window

    def __iter__(self) -> Iterator[list[Event]]:
        try:
            rest, bare = self._find_events()
            yield from self._windows(rest, bare)
        except (EOFError, zlib.error):
            raise TraceUnreadable(f"{self._name} is cut off: its compressed data ends too early") from None
        except tarfile.TarError as error:
            raise TraceUnreadable(f"{self._name} is cut off: the archive ends too early ({error})") from None
        except OSError as error:
            raise TraceUnreadable(f"{self._name} cannot be read: {error.strerror or error}") from None

    def _find_events(self) -> tuple[bytes, bool]:
        """The text after the bracket that opens the events, and whether the file is a bare list of events."""
        head = self._file.read(self._window)
        opening = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if opening == b"[":
            return head[head.index(b"[") + 1 :], True
        if opening != b"{":
            raise TraceUnreadable(f"{self._name} is not a trace: it does not begin like JSON")
        searched = 0
        while not (match := _EVENTS_BEGIN.search(head, searched)):
            # Double the size each time, to avoid quadratic copying. The key may span two chunks.
            searched = max(0, len(head) - _LONGEST_KEY)
            more = self._file.read(max(self._window, len(head)))
            if not more:
                raise self._no_events(head)
            head += more
        self._keep(self._whole(head[: match.end()].lstrip(b"\xef\xbb\xbf") + b"]}"))
        return head[match.end() :], False

    def _windows(self, rest: bytes, bare: bool) -> Iterator[list[Event]]:
        size = self._window
        while more := self._file.read(size):
            # If no event could be cut off, double the chunk, to avoid quadratic copying.
            events, left = self._cut(rest + more)
            size = self._window if len(left) < len(rest) + len(more) else max(self._window, 2 * len(left))
            rest = left
            if events:
                yield events
        document = self._whole(b'{"traceEvents":[' + self._prefilter.filtered(rest) + (b"}" if bare else b""))
        self._keep(document)
        yield document.trace_events

    def _cut(self, text: bytes) -> tuple[list[Event], bytes]:
        """The complete events in `text`, and the rest.

        A cut between two objects may lie in a string or in a list inside an event, but then the text before it has
        an open string or bracket. So text that can be decoded was cut correctly.
        """
        for position in _cut_positions(text):
            try:
                events = _decoded(_events, b"[" + self._prefilter.filtered(text[:position]) + b"]")
            except msgspec.DecodeError as error:
                if _is_truncated(error):
                    continue
                if _has_trailing_data(error):
                    break
                raise self._unreadable(error) from None
            return events, text[position:].lstrip(b" \t\r\n,")
        return [], text

    def _whole(self, text: bytes) -> Header:
        try:
            return _decoded(_header, text)
        except msgspec.DecodeError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: msgspec.DecodeError) -> TraceUnreadable:
        if isinstance(error, msgspec.ValidationError):
            return TraceUnreadable(f"{self._name} is not a trace: its traceEvents are not events")
        if _is_truncated(error):
            return TraceUnreadable(f"{self._name} is cut off: it ends before its events do")
        return TraceUnreadable(f"{self._name} cannot be read: it is not valid JSON")

    def _no_events(self, head: bytes) -> TraceUnreadable:
        try:
            json.loads(head)
        except ValueError:
            return TraceUnreadable(f"{self._name} is not a trace, or cut off before its first event")
        return TraceUnreadable(f"{self._name} is JSON but not a trace: it has no traceEvents")

    def _keep(self, header: Header) -> None:
        for name in ("distributed_info", "base_time_nanoseconds", "ddpcheck"):
            if (value := getattr(header, name)) is not None:
                self.facts[name] = value


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes) -> T:
    """Decode `text`; known errors of profilers are corrected."""
    try:
        return decoder.decode(text)
    except UnicodeDecodeError:
        pass
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError) or _is_truncated(error) or _has_trailing_data(error):
            raise
    return decoder.decode(_NO_NUMBER.sub(rb"\1null", text.decode("utf-8", "replace").encode()))


def _is_truncated(error: msgspec.DecodeError) -> bool:
    return "truncated" in str(error)


def _has_trailing_data(error: msgspec.DecodeError) -> bool:
    """True if something else follows the list of events."""
    return "trailing" in str(error)


def _cut_positions(text: bytes) -> Iterator[int]:
    """Positions between two objects, the last first."""
    position = len(text)
    for _ in range(_MAX_CUT_ATTEMPTS):
        while (position := text.rfind(b"}", 0, position)) >= 0:
            if _BETWEEN.match(text, position):
                yield position + 1
                break
        else:
            return
