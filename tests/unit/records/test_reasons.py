"""Reasons in records: stable values, and the sentences that earlier versions stored instead."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.divergence.explain import REASON_TEXT, reason_text
from ddpcheck.records.reasons import BufferState, UnsyncedReason, WriteWindow, is_stored_as

# Earlier versions did not know these.
NEWER = {UnsyncedReason.IN_BACKWARD, UnsyncedReason.FLAG_OFF, UnsyncedReason.FLAG_SWITCHED}


@pytest.mark.parametrize("reason", [each for each in (*UnsyncedReason, *WriteWindow) if each not in NEWER])
def test_values_and_stored_sentences_mean_the_same(reason: UnsyncedReason | WriteWindow) -> None:
    sentence = REASON_TEXT[reason]
    assert type(reason)(sentence) is reason
    assert is_stored_as(reason.value, reason)
    assert is_stored_as(sentence, reason)
    assert reason_text(reason.value) == reason_text(sentence) == sentence


@pytest.mark.parametrize("reason", sorted(NEWER))
def test_newer_values_have_a_sentence(reason: UnsyncedReason) -> None:
    assert reason_text(reason.value) == REASON_TEXT[reason]
    assert not is_stored_as(REASON_TEXT[reason], reason)


def test_buffers_of_earlier_versions() -> None:
    assert is_stored_as("left alone", BufferState.NOT_SYNCED)
    assert is_stored_as("not_synced", BufferState.NOT_SYNCED)


def test_unknown_text_stays_as_it_is() -> None:
    assert reason_text("of a later version") == "of a later version"
    assert not is_stored_as("of a later version", UnsyncedReason.NO_SYNC)
