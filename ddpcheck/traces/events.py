"""Events of a trace, read window by window: a file of gigabytes never stands in memory as a whole."""

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

# Between two events stand these lines. No string can hold them: in JSON a string has no line break.
_THINNING_BETWEEN = b"\n  },\n  {\n"
_PHASE = b'    "ph": "%s"'
# Keys stand on one line in older files and on one each in newer ones.
_OLDER, _NEWER = b", ", b",\n    "


class EventPrefilter:
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
        pieces = events.split(_THINNING_BETWEEN)
        if len(pieces) < 3:
            return events
        after_phase = pieces[1][len(_PHASE % b"X") :]
        unwanted = self._newer if after_phase.startswith(_NEWER) else self._older
        kept = [piece for piece in pieces[1:-1] if not piece.startswith(unwanted)]
        return _THINNING_BETWEEN.join([pieces[0], *kept, pieces[-1]])


def _arrow(gap: bytes, phase: bytes) -> bytes:
    return _PHASE % phase + gap + b'"id": '


def _span(gap: bytes, category: str, name: str) -> bytes:
    begin = _PHASE % b"X" + gap + b'"cat": "%s"' % category.encode()
    return begin + gap + b'"name": "%s' % name.encode() if name else begin


def nanoseconds(written: bytes) -> int:
    """The number in `written`, quoted or not, times a thousand.

    Never through a float: microseconds since 1970 with three decimals need more digits than a float holds.
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


# Small enough for a processor's cache, which is worth a fifth of the time.
WINDOW = 512 << 10
# How many places to try before reading on; in files that profilers write, the first one fits.
_MOST_CUTS = 16
_EVENTS_BEGIN = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_LONGEST_KEY = 64
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
# Some profilers write numbers that JSON does not know; no figure here depends on one.
_NO_NUMBER = re.compile(rb"(?<=[:\[,])(\s*)-?(?:nan|inf|NaN|Infinity)(?=\s*[,\]}])")
_NOTHING = msgspec.Raw(b"")
T = TypeVar("T")


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments that matter; profilers write dozens more."""

    correlation: Any = None
    stream: Any = None
    rank: Any = msgspec.field(default=None, name="Rank")
    collective_name: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    # The same two in older traces; elements there too, whatever the name says.
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
    """What is looked at of every event; times stay as written, because a float cannot hold them."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: Args | list[Any] | str | bool | int | float | None = NO_ARGS


class Header(msgspec.Struct, rename="camel"):
    """What a trace says of itself, before or after its events."""

    trace_events: list[Event]
    distributed_info: Any = None
    base_time_nanoseconds: Any = None
    # Only in a timeline that ddpcheck itself wrote.
    ddpcheck: Any = None


_events = msgspec.json.Decoder(list[Event])
_header = msgspec.json.Decoder(Header)


class EventReader:
    """Iterate once over the windows of a file; afterwards `facts` holds what stood around the events."""

    def __init__(self, file: IO[bytes], name: str, thinner: EventPrefilter, window: int = WINDOW) -> None:
        self.facts: dict[str, Any] = {}
        self._file = file
        self._name = name
        self._thinner = thinner
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
        """What follows the bracket that opens the events, and whether nothing stands around them."""
        head = self._file.read(self._window)
        opening = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if opening == b"[":
            return head[head.index(b"[") + 1 :], True
        if opening != b"{":
            raise TraceUnreadable(f"{self._name} is not a trace: it does not begin like JSON")
        searched = 0
        while not (found := _EVENTS_BEGIN.search(head, searched)):
            # Twice as much each time: what stands before the events may be long, and is not to be copied over
            # and over. The key may lie across the seam.
            searched = max(0, len(head) - _LONGEST_KEY)
            more = self._file.read(max(self._window, len(head)))
            if not more:
                raise self._no_events(head)
            head += more
        self._keep(self._whole(head[: found.end()].lstrip(b"\xef\xbb\xbf") + b"]}"))
        return head[found.end() :], False

    def _windows(self, rest: bytes, bare: bool) -> Iterator[list[Event]]:
        size = self._window
        while more := self._file.read(size):
            # While nothing could be cut off, windows grow, so that no text is read over and over.
            events, left = self._cut(rest + more)
            size = self._window if len(left) < len(rest) + len(more) else max(self._window, 2 * len(left))
            rest = left
            if events:
                yield events
        whole = self._whole(b'{"traceEvents":[' + self._thinner.thinned(rest) + (b"}" if bare else b""))
        self._keep(whole)
        yield whole.trace_events

    def _cut(self, text: bytes) -> tuple[list[Event], bytes]:
        """The events that `text` surely holds whole, and what is left of it.

        A cut between two objects could lie in a string or in a list inside an event. But then an unfinished
        string or bracket stands before it. So a text that can be decoded was cut rightly.
        """
        for position in _cuts(text):
            try:
                events = _decoded(_events, b"[" + self._thinner.thinned(text[:position]) + b"]")
            except msgspec.DecodeError as error:
                if _is_cut(error):
                    continue
                if _goes_on(error):
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
            return TraceUnreadable(f"{self._name} is not a trace: its traceEvents are no events")
        if _is_cut(error):
            return TraceUnreadable(f"{self._name} is cut off: it ends before its events do")
        return TraceUnreadable(f"{self._name} is not a trace that can be read: it is broken JSON")

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
    """What `text` says; where it says it wrongly in a way that is known of profilers, that is set right."""
    try:
        return decoder.decode(text)
    except UnicodeDecodeError:
        pass
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError) or _is_cut(error) or _goes_on(error):
            raise
    return decoder.decode(_NO_NUMBER.sub(rb"\1null", text.decode("utf-8", "replace").encode()))


def _is_cut(error: msgspec.DecodeError) -> bool:
    return "truncated" in str(error)


def _goes_on(error: msgspec.DecodeError) -> bool:
    """Whether the list of events ended, and something else follows."""
    return "trailing" in str(error)


def _cuts(text: bytes) -> Iterator[int]:
    """Places right after an object that another one follows, the last ones first."""
    position = len(text)
    for _ in range(_MOST_CUTS):
        while (position := text.rfind(b"}", 0, position)) >= 0:
            if _BETWEEN.match(text, position):
                yield position + 1
                break
        else:
            return
