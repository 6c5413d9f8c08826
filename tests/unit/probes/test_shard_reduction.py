"""Sketches of gradients that FSDP2 reduces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddpcheck.agent.shard_reduction import ShardReduction
from ddpcheck.probes import shard_reduction
from ddpcheck.probes.shard_reduction import FIRST_STEPS, SKETCHED_EVERY, ShardReductionProbe
from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.codecs import unpack
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.kinds.shards import ReducedShardsRecord, ShardReductionRecord
from ddpcheck.records.sketch_signs import weight
from tests.helpers.fake_context import FakeContext
from tests.helpers.shard_reductions import receive, reduced_parameter

GRADIENT = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def probe_of(**config: object) -> tuple[ShardReductionProbe, FakeContext]:
    context = FakeContext(**config)
    return ShardReductionProbe(context), context


def reduction(*parameters: object, complete: bool = True) -> ShardReduction:
    return ShardReduction(list(parameters), (0, 1), 2.0, "", complete)  # type: ignore[arg-type]


def step(probe: ShardReductionProbe, steps: int) -> None:
    probe.after_step(SimpleNamespace(modules=[SimpleNamespace(role=ModuleRole.SHARDED)], steps=steps))


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_enter_with_the_weight_of_their_place(dim: int) -> None:
    probe, context = probe_of()
    parameter = reduced_parameter(GRADIENT, 1, 3, dim)
    probe.shards_reducing(reduction(parameter))
    receive(parameter, GRADIENT)
    probe.shards_reduced()
    [described] = context.of(ReducedShardsRecord)
    assert (described.name, described.numel, described.shards, described.position) == (
        "layer.weight",
        21,
        3,
        1,
    )
    [record] = context.of(ShardReductionRecord)
    parts = [sketch(part) for part in GRADIENT.chunk(3, dim)]
    expected = sum(weight(position) * part.value for position, part in enumerate(parts))
    assert unpack(record.local)[0].value == pytest.approx(expected, abs=1e-6)
    assert unpack(record.reduced)[0].value == pytest.approx(parts[1].value, abs=1e-6)
    assert record.kept == []


def test_gradients_that_are_kept_back_enter_the_next_result() -> None:
    probe, context = probe_of()
    parameter = reduced_parameter(GRADIENT, 0, 2)
    probe.shards_reducing(reduction(parameter, complete=False))
    probe.shards_reduced()
    assert not context.of(ShardReductionRecord)
    probe.shards_reducing(reduction(parameter))
    receive(parameter, 2 * GRADIENT)
    probe.shards_reduced()
    [record] = context.of(ShardReductionRecord)
    twice = 2 * sum(weight(position) * sketch(part).value for position, part in enumerate(GRADIENT.chunk(2)))
    assert unpack(record.local)[0].value == pytest.approx(twice, abs=1e-6)


def test_a_shard_that_has_a_gradient_is_sketched_before_the_result_is_added() -> None:
    probe, context = probe_of()
    parameter = reduced_parameter(GRADIENT, 0, 2)
    for _ in range(2):
        probe.shards_reducing(reduction(parameter))
        receive(parameter, GRADIENT)
        probe.shards_reduced()
    first, second = context.of(ShardReductionRecord)
    assert (first.kept, second.kept) == ([], second.indices)
    assert unpack(second.before)[0].value == unpack(first.reduced)[0].value


def test_the_first_steps_are_sketched_and_then_some() -> None:
    probe, context = probe_of()
    for number in range(2 * SKETCHED_EVERY + 1):
        parameter = reduced_parameter(GRADIENT, 0, 2)
        probe.shards_reducing(reduction(parameter))
        receive(parameter, GRADIENT)
        probe.shards_reduced()
        step(probe, number)
    steps = [record.step for record in context.of(ShardReductionRecord)]
    assert steps == [*range(FIRST_STEPS), SKETCHED_EVERY, 2 * SKETCHED_EVERY]


def test_parameters_take_turns_where_there_are_many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reduction, "MOST_PARTS", 4)
    probe, context = probe_of()
    parameters = [reduced_parameter(GRADIENT, 0, 2) for _ in range(4)]
    for number in range(2):
        probe.shards_reducing(reduction(*parameters))
        for parameter in parameters:
            receive(parameter, GRADIENT)
        probe.shards_reduced()
        step(probe, number)
    assert [record.indices for record in context.of(ShardReductionRecord)] == [[0, 2], [1, 3]]
    names = {record.name for record in context.of(ReducedShardsRecord)}
    assert names == {"layer.weight", "layer.weight (2)", "layer.weight (3)", "layer.weight (4)"}


def test_a_shard_whose_gradient_was_taken_away_is_left_out() -> None:
    probe, context = probe_of()
    parameter = reduced_parameter(GRADIENT, 0, 2)
    probe.shards_reducing(reduction(parameter))
    probe.shards_reduced()
    probe.before_exit()
    assert not context.of(ShardReductionRecord)
