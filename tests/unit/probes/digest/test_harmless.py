"""Hashing does not change the tensors, the generators, autograd or the settings of torch."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import xxhash

from ddpcheck.probes.digest import Digester, make_digester
from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.digest.tensor_bytes import SERIAL_ELEMENTS, dense
from tests.helpers.paths import ROOT


@pytest.fixture(params=["xxh3-128", "multilinear-128"])
def digester(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Digester:
    monkeypatch.delenv("DDPCHECK_HASH", raising=False)
    if request.param == "multilinear-128":
        return MultilinearDigester()
    pytest.importorskip("xxhash")
    return make_digester("cpu")


def specimens() -> list[torch.Tensor]:
    base = torch.arange(12000, dtype=torch.float32)
    parameter = torch.nn.Parameter(base.view(100, 120).clone())
    unaligned = torch.arange(5001, dtype=torch.uint8)[1:]
    complex_ones = torch.ones(30, dtype=torch.complex64)
    return [
        base,
        parameter,
        parameter.t(),
        base[::3],
        unaligned,
        complex_ones.conj(),
        base[:1].expand(400),
        base.to_sparse(),
    ]


def stored(tensor: torch.Tensor) -> list[object]:
    tensor = tensor.detach()
    return [
        tensor.to_dense().resolve_conj().tolist(),
        tensor.stride(),
        tensor.storage_offset() if not tensor.is_sparse else 0,
    ]


def test_tensors_and_version_counters_stay_as_they_are(digester: Digester) -> None:
    tensors = specimens()
    before = [(stored(tensor), tensor._version, tensor.grad_fn, tensor.requires_grad) for tensor in tensors]
    digester.submit(tensors).result()
    assert [
        (stored(tensor), tensor._version, tensor.grad_fn, tensor.requires_grad) for tensor in tensors
    ] == before


def test_backward_still_works_through_a_hashed_tensor(digester: Digester) -> None:
    weight = torch.ones(4, requires_grad=True)
    product = weight * weight
    digester.submit([weight, product, product[::2]]).result()
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4


def test_generators_and_settings_stay_as_they_are(digester: Digester) -> None:
    tensors = specimens()
    before = (
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )
    digester.submit(tensors).result()
    after = (
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )
    assert after == before


def test_leaves_are_the_same_in_every_mode(digester: Digester) -> None:
    tensors = specimens()
    plain = digester.submit(tensors).result()
    with torch.no_grad():
        assert digester.submit(tensors).result() == plain
    with torch.inference_mode():
        assert type(digester)(*_arguments(digester)).submit(tensors).result() == plain
        made_inside = [tensor.clone() for tensor in tensors[:2]]
        assert digester.submit(made_inside).result() == plain[:2]
    assert digester.submit(made_inside).result() == plain[:2]
    with torch.device("meta"):
        assert digester.submit(tensors).result() == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert digester.submit(tensors).result() == plain
    torch.use_deterministic_algorithms(True)
    try:
        assert digester.submit(tensors).result() == plain
    finally:
        torch.use_deterministic_algorithms(False)


def _arguments(digester: Digester) -> list[object]:
    return [xxhash] if digester.algorithm == "xxh3-128" else []


def test_keys_made_in_inference_mode_serve_outside_it() -> None:
    script = """
import torch
from ddpcheck.probes.digest.multilinear import MultilinearDigester
tensor, digester = torch.ones(5000), MultilinearDigester()
with torch.inference_mode():
    first = digester.submit([tensor]).result()
assert digester.submit([tensor]).result() == first
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True, timeout=300)


def test_a_ticket_and_a_digester_keep_no_tensor_alive(digester: Digester) -> None:
    tensors = [torch.ones(1000), torch.ones(10, 10)[:, ::2], torch.eye(3).to_sparse()]
    gone = [weakref.ref(tensor) for tensor in tensors]
    ticket = digester.submit(tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert len(ticket.result()) == 3


def test_leaves_are_the_same_on_another_thread(digester: Digester) -> None:
    tensors, leaves = specimens(), []
    thread = threading.Thread(target=lambda: leaves.extend(digester.submit(tensors).result()))
    thread.start()
    thread.join()
    assert leaves == digester.submit(tensors).result()


@pytest.mark.parametrize("shape", [(40, 3001), (3, 70000), (1, 100001), (100001,), (2, 1, 50001)])
def test_a_copy_in_serial_pieces_is_complete(shape: tuple[int, ...]) -> None:
    wide = torch.arange(2 * torch.Size(shape).numel()).view(*shape, 2)
    gapped = wide[..., 0]
    assert gapped.numel() > SERIAL_ELEMENTS
    assert torch.equal(dense(gapped), gapped.contiguous())
