"""One event file, written with TensorBoard's protocol buffers, without torch or TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_SCALAR,
    DATA_CLASS_TENSOR,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.image import metadata as image
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.record_writer import RecordWriter

from ddpcheck.analysis.timeseries.model import NamedSeries
from ddpcheck.reports.tensorboard.tags import SHOWN, tag_of

# Created when a tag is first written, not for every value.
Metadata = Callable[[], SummaryMetadata]


class EventFile:
    """One run of TensorBoard; the steps of a tag must be in order."""

    def __init__(self, folder: Path, began: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds files by the word `tfevents` and orders those of one folder by name.
        self._records = RecordWriter((folder / f"events.out.tfevents.{int(began):010d}.ddpcheck").open("wb"))
        self._began = began
        self._known: set[str] = set()
        self._write(Event(wall_time=began, file_version="brain.Event:2"))

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.close()

    def scalars(
        self, step: int, wall_time: float, values: Mapping[str, float], descriptions: Mapping[str, str]
    ) -> None:
        """All values of one step in one record."""
        summary = Summary(
            value=[
                self._value(
                    tag,
                    TensorProto(dtype=DT_FLOAT, float_val=[value]),
                    DATA_CLASS_SCALAR,
                    partial(scalar.create_summary_metadata, tag, descriptions.get(tag, "")),
                )
                for tag, value in values.items()
            ]
        )
        self._write(Event(wall_time=wall_time or self._began, step=step, summary=summary))

    def text(self, tag: str, markdown: str) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
        self._single(tag, tensor, DATA_CLASS_TENSOR, partial(text.create_summary_metadata, tag, ""))

    def histogram(
        self, tag: str, step: int, wall_time: float, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Rows of left edge, right edge and count."""
        rows = [number for row in zip(edges, edges[1:], counts, strict=False) for number in row]
        tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=_shape(len(counts), 3), double_val=rows)
        metadata = partial(histogram.create_summary_metadata, tag, "")
        self._single(tag, tensor, DATA_CLASS_TENSOR, metadata, step, wall_time)

    def image(self, tag: str, png: bytes, width: int, height: int, description: str) -> None:
        content = [str(width).encode(), str(height).encode(), png]
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=_shape(3), string_val=content)
        metadata = partial(image.create_summary_metadata, tag, description)
        self._single(tag, tensor, DATA_CLASS_BLOB_SEQUENCE, metadata)

    def layout(self, layout: Any) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()])
        tag = custom_scalar.CONFIG_SUMMARY_TAG
        self._single(tag, tensor, DATA_CLASS_TENSOR, custom_scalar.create_summary_metadata)

    def _single(
        self,
        tag: str,
        tensor: TensorProto,
        data_class: int,
        metadata: Metadata,
        step: int = 0,
        wall_time: float = 0.0,
    ) -> None:
        summary = Summary(value=[self._value(tag, tensor, data_class, metadata)])
        self._write(Event(wall_time=wall_time or self._began, step=step, summary=summary))

    def _value(self, tag: str, tensor: TensorProto, data_class: int, metadata: Metadata) -> Summary.Value:
        """A value; its metadata is written once for each tag."""
        if tag in self._known:
            return Summary.Value(tag=tag, tensor=tensor)
        self._known.add(tag)
        about = metadata()
        about.data_class = data_class
        return Summary.Value(tag=tag, tensor=tensor, metadata=about)

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def _shape(*sizes: int) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


def write_lines(file: EventFile, lines: Iterable[NamedSeries], when: Callable[[float], float]) -> None:
    """Write all values of a step as one record, with the time at the end of the step."""
    by_step: dict[int, dict[str, float]] = {}
    about: dict[str, str] = {}
    for line in lines:
        shown, tag = SHOWN[line.figure], tag_of(line)
        about[tag] = shown.about
        for step, value in zip(line.steps, line.values, strict=True):
            by_step.setdefault(step, {})[tag] = value / shown.unit
    for step in sorted(by_step):
        file.scalars(step, when(step), by_step[step], about)
