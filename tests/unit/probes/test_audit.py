"""The audit of one rank: what it hands over, replays and records, and when it says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpcheck.config import Config, parse_audit
from ddpcheck.errors import UsageError
from ddpcheck.probes.audit import AuditProbe, audited_by
from ddpcheck.probes.replay.capture import search_graph
from tests.helpers.fake_context import FakeContext, Job


def test_the_option() -> None:
    assert (parse_audit(""), parse_audit("every=25"), parse_audit("every = 1")) == (0, 25, 1)
    for wrong in ("25", "every=0", "every=", "every=x", "each=3"):
        with pytest.raises(UsageError):
            Config.from_options({"audit": wrong})
    with pytest.raises(UsageError):
        Config.from_options({"audit": "every=3", "gradients": "off"})


@pytest.mark.parametrize("size", [3, 4, 7])
def test_every_rank_is_audited_by_two_others(size: int) -> None:
    audited = {rank: audited_by(range(size), rank, {}) for rank in range(size)}
    for rank in range(size):
        assert sum(rank in others for others in audited.values()) == 2
        assert rank not in audited[rank]


def test_one_or_two_ranks_replay_their_own_too() -> None:
    assert audited_by([5], 5, {}) == [5]
    assert audited_by([2, 4], 2, {}) == [4, 2]


def test_ranks_of_a_node_audit_each_other_if_they_are_three() -> None:
    def on_nodes(of: int) -> dict[int, list[int]]:
        return {
            rank: audited_by(range(12), rank, {"LOCAL_RANK": str(rank % of), "LOCAL_WORLD_SIZE": str(of)})
            for rank in range(12)
        }

    assert all(rank // 4 == other // 4 for rank, others in on_nodes(4).items() for other in others)
    assert on_nodes(2)[1] == [2, 3]


def _no_other_way(net: nn.Linear, out: torch.Tensor) -> torch.Tensor:
    return out.square().sum() + out.mean()


def _penalty(net: nn.Linear, out: torch.Tensor) -> torch.Tensor:
    return out.sum() + net.bias.square().sum()


def _detached(net: nn.Linear, out: torch.Tensor) -> torch.Tensor:
    return out.detach().sum() + net.weight.sum()


def _gradient_penalty(net: nn.Linear, out: torch.Tensor) -> torch.Tensor:
    # The gradient of the output's square contains the weight.
    inputs = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)
    return out.sum() + gradient.square().sum()


@pytest.mark.parametrize(
    ("loss", "found", "reached"),
    [
        (_no_other_way, set(), True),
        (_penalty, {1}, True),
        (_detached, {0}, False),
        (_gradient_penalty, {0, 1}, True),
    ],
)
def test_other_ways_to_the_parameters(
    loss: Callable[[nn.Linear, torch.Tensor], torch.Tensor], found: set[int], reached: bool
) -> None:
    net = nn.Linear(3, 2)
    out = net(torch.randn(4, 3))
    known = {id(parameter): index for index, parameter in enumerate(net.parameters())}
    search = search_graph([loss(net, out)], {out.grad_fn}, known)
    assert search is not None
    assert (search.parameters, bool(search.stops)) == (found, reached)


def test_a_file_stays_until_the_second_audit_after_it(tmp_path: Path) -> None:
    """Another rank may still be at its replays of the audit before."""
    context = FakeContext(tmp_path, audit="every=1")
    module = nn.Linear(3, 2)
    tracked = Job(module, context, probes=[AuditProbe]).wrapped().tracked
    (probe,) = context.probes
    assert isinstance(probe, AuditProbe)
    module.weight.register_hook(lambda gradient: probe.backward_begun(tracked))
    kept = []
    for step in range(4):
        tracked.steps = step
        module.zero_grad()
        inputs = torch.ones(4, 3)
        probe.forward_inputs(tracked, (inputs,), {})
        loss = module(inputs).sum()
        probe.after_forward(tracked)
        probe.backward_called(loss)
        loss.backward()
        probe.backward_returned()
        kept.append([path.name.split("-")[3] for path in sorted((tmp_path / "audit").iterdir())])
    assert kept == [
        ["00000000"],
        ["00000000", "00000001"],
        ["00000001", "00000002"],
        ["00000002", "00000003"],
    ]
