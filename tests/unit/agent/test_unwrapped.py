"""Parameters outside of DDP: their names and numbers, and the modules that training uses."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ddpcheck.agent import unwrapped
from ddpcheck.agent.unwrapped import Ordinals, find_originals, find_slots, unwrapped_parameters
from ddpcheck.agent.used_modules import OBSERVED_STEPS, UsedModules, track_used
from ddpcheck.records.kinds.coverage import StepCoverageRecord
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.modules import (
    COPIED,
    COPIED_IN_PARTS,
    FIRST_UNWRAPPED,
    ModuleRecord,
    ModuleRole,
    ModuleUseRecord,
    UseEvidence,
)
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture(autouse=True)
def only_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have left modules, which the search for models would find."""
    search, others = unwrapped.live_modules, unwrapped.live_modules()

    def new_modules() -> list[nn.Module]:
        # `others` are alive, so no new module has one of their ids.
        known = set(map(id, others))
        return [each for each in search() if id(each) not in known]

    monkeypatch.setattr(unwrapped, "live_modules", new_modules)


class Margin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.scale


def names(optimizer: torch.optim.Optimizer) -> list[str]:
    found = find_slots(unwrapped_parameters(optimizer, []))
    return [slot.name for slot in found.slots]


def test_parameters_are_named_by_the_path_in_the_outermost_module() -> None:
    head = Margin()
    assert names(torch.optim.SGD(head.parameters(), lr=0.1)) == [
        "Margin.inner.0.bias",
        "Margin.inner.0.weight",
        "Margin.scale",
    ]


def test_a_bare_parameter_is_named_by_its_position() -> None:
    head, bare = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": head.parameters()}, {"params": [bare]}])
    assert names(optimizer) == ["Adam.group1.0", "Linear.bias", "Linear.weight"]


def test_two_modules_of_one_class_have_different_names() -> None:
    heads = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    found = names(torch.optim.SGD([head.weight for head in heads], lr=0.1))
    assert len(set(found)) == 2


def test_slots_follow_a_replaced_parameter() -> None:
    head = nn.Linear(2, 2, bias=False)
    (slot,), holders, _ = find_slots([("x", head.weight)])
    assert slot.holder[slot.key] is head.weight
    assert holders == [head]


def test_shards_are_left_out() -> None:
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    sharded = FullyShardedDataParallel(nn.Linear(2, 2))
    assert names(torch.optim.SGD(sharded.parameters(), lr=0.1)) == []


def test_ordinals_follow_from_the_contents() -> None:
    rows = [("a", torch.zeros(2))]
    one, other = Ordinals(), Ordinals()
    # A module that only this rank has does not shift the others.
    one.of(ModuleRole.STEPPED, "Adam", [("b", torch.zeros(3))])
    first = one.of(ModuleRole.STEPPED, "SGD", rows)
    assert first == other.of(ModuleRole.STEPPED, "SGD", rows)
    assert first >= FIRST_UNWRAPPED
    assert one.of(ModuleRole.STEPPED, "SGD", rows) == first + 1


@pytest.fixture
def observed() -> Iterator[UsedModules]:
    modules = UsedModules()
    yield modules
    modules.end()


def steps(observed: UsedModules, count: int) -> None:
    for _ in range(count):
        observed.step_done()


def test_a_module_that_feeds_the_forward(observed: UsedModules) -> None:
    inside, backbone = nn.Linear(2, 2), Margin()
    observed.begin(inside)
    for _ in range(2):
        features = backbone(torch.zeros(1, 3))
        observed.forward([features])
        inside(features)
        observed.backward()
        observed.step_done()
    ((module, use),) = observed.used()
    assert module is backbone
    assert use.evidence == {UseEvidence.FEEDS_FORWARD}
    assert use.where.startswith(__file__)


def test_a_module_that_reads_the_batch_or_runs_in_the_loss(observed: UsedModules) -> None:
    before, after = nn.Linear(3, 2), Margin()
    observed.begin(nn.Linear(1, 1))
    observed.step_done()
    batch = torch.zeros(1, 3)
    before(batch)
    observed.forward([{"inputs": batch}])
    after(torch.ones(1, 3))
    evidence = {type(module): use.evidence for module, use in observed.used()}
    assert evidence == {nn.Linear: {UseEvidence.SHARES_INPUT}, Margin: {UseEvidence.IN_LOSS}}


def test_memory_that_was_freed_is_no_evidence(observed: UsedModules) -> None:
    actor = Margin()
    observed.begin(nn.Linear(1, 1))
    observed.step_done()
    address = actor(torch.zeros(1, 3)).data_ptr()
    candidates = [torch.empty(1, 2) for _ in range(64)]
    reused = [tensor for tensor in candidates if tensor.data_ptr() == address]
    observed.forward(reused)
    ((_, use),) = observed.used()
    assert UseEvidence.FEEDS_FORWARD not in use.evidence


def test_calls_before_the_first_step_do_not_count(observed: UsedModules) -> None:
    metric = Margin()
    observed.begin(nn.Linear(1, 1))
    metric(torch.zeros(1, 3))
    steps(observed, OBSERVED_STEPS)
    assert observed.used() == []


def test_hooks_are_removed_after_a_few_steps(observed: UsedModules) -> None:
    hooks = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    before = [len(each) for each in hooks]
    observed.begin(nn.Linear(1, 1))
    assert [len(each) for each in hooks] == [count + 1 for count in before]
    assert [observed.step_done() for _ in range(OBSERVED_STEPS + 1)].count(True) == 1
    assert [len(each) for each in hooks] == before


def test_hooks_leave_no_trace_in_the_modules(observed: UsedModules) -> None:
    observed.begin(nn.Linear(1, 1))
    backbone = Margin()
    backbone(torch.zeros(1, 3))
    assert pickle.loads(pickle.dumps(backbone)).state_dict().keys() == backbone.state_dict().keys()


def test_only_untrained_parameters_of_a_used_module_are_compared(observed: UsedModules) -> None:
    model = Margin()
    observed.begin(nn.Linear(1, 1))
    observed.step_done()
    model(torch.zeros(1, 3))
    ((module, use),) = observed.used()
    tracked = track_used(module, use, {id(model.scale)}, 3, (0, 1), Ordinals())
    assert tracked is not None
    assert [slot.name for slot in tracked.parameters] == ["inner.0.weight", "inner.0.bias"]
    trained = set(map(id, model.parameters()))
    assert track_used(module, use, trained, 4, (0, 1), Ordinals()) is None


def test_a_model_that_is_wrapped_as_a_whole_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched() -> list[nn.Module]:
        raise AssertionError("looked at every object of the process")

    monkeypatch.setattr(unwrapped, "live_modules", searched)
    context, module = FakeContext(), Margin()
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job.train(optimizer, OBSERVED_STEPS + 1)
    assert [record.role for record in context.of(ModuleRecord)] == ["ddp"]
    # After the first steps nothing waits for the end of a step.
    assert not job.dispatcher.unwrapped.active


def test_a_group_that_is_added_later_is_followed() -> None:
    context, module, head = FakeContext(), Margin(), nn.Linear(2, 2)
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job.train(optimizer)
    optimizer.add_param_group({"params": head.parameters()})
    job.train(optimizer)
    described = context.of(ModuleRecord)[-1]
    assert [row[0] for row in described.parameters] == ["Linear.bias", "Linear.weight"]
    assert [digest.step for digest in context.digests(Stage.PARAMS) if digest.module == described.module] == [
        1
    ]
    job.dispatcher.close()


def test_the_model_is_found_whose_copy_an_optimizer_steps_in_parts() -> None:
    model, frozen = nn.Linear(40, 40), nn.Linear(7, 7).requires_grad_(False)
    part = nn.Parameter(torch.zeros(821))
    found = find_originals(torch.optim.SGD([part], lr=0.1), [part], ranks=2)
    assert found is not None
    assert ([slot.name for slot in found.slots], found.kind) == (
        ["Linear.bias", "Linear.weight"],
        COPIED_IN_PARTS,
    )
    assert found.modules == [model]
    del frozen


def test_a_whole_copy_of_a_model() -> None:
    model = nn.Linear(40, 40)
    copies = [parameter.detach().float() for parameter in model.parameters()]
    found = find_originals(torch.optim.SGD(copies, lr=0.1), copies, ranks=2)
    assert found is not None
    assert found.kind == COPIED


@pytest.mark.parametrize("elements", [3, 400, 1200, 100_000])
def test_other_parameters_are_no_copies_of_a_model(elements: int) -> None:
    model = nn.Linear(40, 40)
    bare = nn.Parameter(torch.zeros(elements))
    assert find_originals(torch.optim.SGD([bare], lr=0.1), [bare], ranks=2) is None
    del model


def test_a_model_that_another_optimizer_steps_has_no_copy() -> None:
    model, part = nn.Linear(40, 40), nn.Parameter(torch.zeros(821))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    assert find_originals(torch.optim.SGD([part], lr=0.1), [part], ranks=2) is None
    del other


def test_a_model_is_compared_in_place_of_its_copies() -> None:
    context = FakeContext()
    model, part = nn.Linear(40, 40), nn.Parameter(torch.zeros(820))
    job = Job(nn.Linear(1, 1), context)
    # The job wraps nothing.
    job.dispatcher._in_order.clear()
    part.grad = torch.ones_like(part)
    job.step(torch.optim.SGD([part], lr=0.1))
    record = context.of(ModuleRecord)[-1]
    assert [row[0] for row in record.parameters] == ["Linear.bias", "Linear.weight"]
    assert (record.role, record.mesh) == (ModuleRole.STEPPED.value, {"kind": COPIED_IN_PARTS})
    [coverage] = context.of(StepCoverageRecord)
    assert (coverage.compared, coverage.not_compared) == (2, {"copy": 1})
    del model


def test_parameters_that_are_made_anew_for_each_batch_are_recognised() -> None:
    context = FakeContext()
    job = Job(nn.Linear(1, 1), context).wrapped()
    for _ in range(3):
        change = nn.Parameter(torch.zeros(5))
        optimizer = torch.optim.SGD([change], lr=0.1)
        change.grad = torch.ones_like(change)
        job.step(optimizer)
    evidence = [record.evidence for record in context.of(ModuleUseRecord)]
    assert evidence == [[UseEvidence.RECREATED.value]] * 2


def test_a_parameter_that_a_new_optimizer_steps_is_not_made_anew() -> None:
    context = FakeContext()
    job = Job(nn.Linear(1, 1), context).wrapped()
    weights = nn.Parameter(torch.zeros(5))
    for _ in range(3):
        optimizer = torch.optim.SGD([weights], lr=0.1)
        weights.grad = torch.ones_like(weights)
        job.step(optimizer)
    assert context.of(ModuleUseRecord) == []


def test_a_moving_average_of_the_model_is_not_taken_for_it() -> None:
    model, average = nn.Linear(30, 30), nn.Linear(30, 30)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    part = nn.Parameter(torch.zeros(465))
    found = find_originals(torch.optim.SGD([part], lr=0.1), [part], ranks=2)
    assert found is not None
    assert found.modules == [model]
    del average


def test_parameters_of_a_later_training_are_not_those_of_a_batch() -> None:
    """Cross-validation: each fold has its own model and its own weights of the losses."""
    context = FakeContext()
    job = Job(nn.Linear(1, 1), context).wrapped()
    trains = torch.optim.SGD(job.module.parameters(), lr=0.1)
    for _ in range(3):
        weights = nn.Parameter(torch.zeros(5))
        optimizer = torch.optim.SGD([weights], lr=0.1)
        for _ in range(4):
            weights.grad = torch.ones_like(weights)
            job.step(optimizer)
            job.train(trains)
    assert context.of(ModuleUseRecord) == []
