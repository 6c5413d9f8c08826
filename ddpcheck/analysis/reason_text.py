"""Sentences for the reasons that records hold as stable values."""

from __future__ import annotations

from ddpcheck.records.reasons import UnsyncedReason, WriteWindow

REASON_TEXT: dict[UnsyncedReason | WriteWindow, str] = {
    UnsyncedReason.NO_SYNC: "no_sync open",
    UnsyncedReason.FORWARD_IN_NO_SYNC: "forward inside no_sync, backward outside",
    UnsyncedReason.BYPASS: "wrapper bypassed",
    UnsyncedReason.TWO_FORWARDS: "two forwards before two backwards",
    UnsyncedReason.SECOND_BACKWARD: "second backward on one forward",
    WriteWindow.BEFORE_FORWARD: "before the forward",
    WriteWindow.IN_FORWARD: "inside the forward",
    WriteWindow.AFTER_BACKWARD: "between backward and step",
}
_BY_VALUE = {reason.value: text for reason, text in REASON_TEXT.items()}


def reason_text(stored: str) -> str:
    """The sentence for a stored value; text that is not such a value, as of earlier versions, stays as it is."""
    return _BY_VALUE.get(stored, stored)
