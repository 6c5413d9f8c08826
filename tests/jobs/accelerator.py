"""Jobs on the simulated accelerator: `accelerator.py CASE FOLDER`. Each rank leaves what it saw in FOLDER."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.accelerator import device, event_log, graphed_compiler

BACKENDS = f"cpu:gloo,{device.TYPE}:{device.BACKEND}"
STEPS = 8
WARM_STEPS = 3
REPLAYS = 4


@dataclass
class Job:
    """One rank of a job, and what it leaves behind."""

    rank: int
    # Without `set_device`, modules of odd ranks are on a device that is not the current one.
    device: torch.device
    log: list[event_log.Line] = field(default_factory=list)
    # The first parameter after each step.
    first_parameter: list[list[float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def data(self, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 20, device=self.device), torch.arange(rows, device=self.device) % 5

    def end_step(self, number: int) -> None:
        """Keeps the lines of the log so far as those of this step."""
        if device.native.settings().log:
            self.log += event_log.take()
            self.log.append(event_log.step_line(number))


def network(layers: int = 2, width: int = 40) -> nn.Module:
    torch.manual_seed(3)
    hidden = [
        part for _ in range(layers) for part in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
    ]
    return nn.Sequential(nn.Linear(20, width), *hidden, nn.Dropout(0.1), nn.Linear(width, 5))


def train(job: Job, model: DDP, steps: int = STEPS, rate: Callable[[int], float] | None = None) -> None:
    """An ordinary loop that never waits for the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(step)
        inputs, labels = job.data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        job.end_step(step)


def wrap(job: Job, module: nn.Module, **options: Any) -> DDP:
    model = DDP(module.to(job.device), bucket_cap_mb=0.01, **options)
    # Each rank has data of its own.
    torch.manual_seed(100 + job.rank)
    return model


def plain(job: Job) -> DDP:
    device.configure("log")
    model = wrap(job, network())
    main = threading.get_ident()
    threads: set[bool] = set()

    def note_thread(gradient: torch.Tensor) -> None:
        threads.add(threading.get_ident() == main)

    next(model.parameters()).register_hook(note_thread)
    train(job, model)
    job.facts["backward_in_training_thread"] = sorted(threads)
    return model


def views(job: Job) -> DDP:
    """Many parameters: launches must not grow with them."""
    device.configure("log")
    model = wrap(job, network(layers=12), gradient_as_bucket_view=True)
    train(job, model)
    return model


def user_stream(job: Job) -> DDP:
    device.configure("log")
    own = torch.sim.Stream(job.device)  # type: ignore[attr-defined]
    own.wait_stream(torch.sim.current_stream(job.device))  # type: ignore[attr-defined]
    with own:
        model = wrap(job, network())
        train(job, model)
    torch.sim.current_stream(job.device).wait_stream(own)  # type: ignore[attr-defined]
    return model


def other_device(job: Job) -> DDP:
    """Nobody calls `set_device`: the current device of all ranks is 0, the model is on 1."""
    device.configure("log")
    job.device = torch.device(device.TYPE, 1)
    model = wrap(job, network())
    train(job, model)
    job.facts["contexts"] = sorted(device.contexts)
    job.facts["memory"] = [torch.sim.memory_allocated(index) for index in range(2)]  # type: ignore[attr-defined]
    return model


def delayed(job: Job) -> DDP:
    """Streams run on threads, with delays: a missing wait gives wrong values."""
    device.configure("log delay=1500")
    model = wrap(job, network())
    train(job, model)
    return model


def accumulated(job: Job) -> DDP:
    """Two micro-batches, a scaler, clipping, gradients as views."""
    device.configure("delay=800")
    model = wrap(job, network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler(device.TYPE, init_scale=1024.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(nn.functional.cross_entropy(*_outputs(model, job))).backward()
        scaler.scale(nn.functional.cross_entropy(*_outputs(model, job))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model


def mixed(job: Job) -> DDP:
    """Autocast, a scaler and clipping of many parameters: everything is read again after each of them."""
    device.configure("log")
    model = wrap(job, network(layers=12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.TYPE, init_scale=1024.0)
    for step in range(STEPS):
        inputs, labels = job.data()
        optimizer.zero_grad()
        with torch.autocast(device.TYPE, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        job.end_step(step)
    return model


def _outputs(model: DDP, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = job.data()
    return model(inputs), labels


def late(job: Job) -> DDP:
    """The device is a step or more behind the host when rank 1 gets another learning rate."""
    device.configure("lag=600")
    model = wrap(job, network())
    weight = next(model.parameters())
    values = []

    def rate(step: int) -> float:
        # On the device: reading it here would wait.
        values.append(weight.detach().clone())
        return 1e-2 if job.rank == 0 or step < 5 else 2e-2

    train(job, model, steps=14, rate=rate)
    values.append(weight.detach().clone())
    # Those of step N are copied when step N + 1 begins.
    job.first_parameter = [value.flatten().tolist() for value in values[1:]]
    return model


def scattered(job: Job) -> DDP:
    """Each rank steps its own part of the parameters and sends it around, by `.data`, while digests are late."""
    device.configure("lag=600")
    model = wrap(job, network())
    parameters = list(model.parameters())
    size = dist.get_world_size()
    optimizer = torch.optim.AdamW([p for n, p in enumerate(parameters) if n % size == job.rank], lr=1e-2)
    for _ in range(STEPS):
        inputs, labels = job.data()
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=number % size)
    return model


def captured(job: Job) -> DDP:
    """Forward, backward and step in one graph, after a few ordinary steps."""
    own = torch.sim.Stream(job.device)  # type: ignore[attr-defined]
    own.wait_stream(torch.sim.current_stream(job.device))  # type: ignore[attr-defined]
    with own:
        model = wrap(job, network())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        inputs, labels = job.data()

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        for _ in range(WARM_STEPS):
            step()
    graph = torch.sim.SimGraph()  # type: ignore[attr-defined]
    with torch.sim.graph(graph, stream=own):  # type: ignore[attr-defined]
        step()
    for _ in range(REPLAYS):
        graph.replay()
    return model


def graphed(job: Job) -> DDP:
    """`make_graphed_callables` of torch itself: forward and backward of the module are graphs, the rest is not."""
    module = network().to(job.device)
    own = torch.sim.Stream(job.device)  # type: ignore[attr-defined]
    # Its Python code, on this device: it takes everything from `torch.cuda`.
    names = ("Stream", "stream", "current_stream", "synchronize", "graph")
    replaced = {name: getattr(torch.sim, name) for name in names}  # type: ignore[attr-defined]
    replaced["CUDAGraph"] = torch.sim.SimGraph  # type: ignore[attr-defined]
    no_pool = mock.patch.object(torch.cuda.graphs, "graph_pool_handle", return_value=None)
    with mock.patch.multiple(torch.cuda, **replaced), no_pool:
        module = torch.cuda.make_graphed_callables(module, (job.data()[0],))
    own.wait_stream(torch.sim.current_stream(job.device))  # type: ignore[attr-defined]
    with own:
        model = wrap(job, module)
        train(job, model)
    return model


class ThreeLayers(nn.Module):
    """The compiler begins with frames of the program: those of torch's own containers it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh())
        self.head = nn.Linear(40, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def compiled(job: Job) -> DDP:
    """A compiled DDP module whose graphs are captured and replayed inside of its forwards and backwards."""
    torch.manual_seed(3)
    module = ThreeLayers()
    # torch's compiler cuts a graph at each bucket, and expects that the first one is not the largest.
    model = DDP(module.to(job.device), bucket_cap_mb=1)
    torch.manual_seed(100 + job.rank)
    run = torch.compile(model, backend=graphed_compiler.backend())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        inputs, labels = job.data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(inputs), labels).backward()
        optimizer.step()
    job.facts["graphs"] = dict(graphed_compiler.calls)
    return model


def reduced_overhead(job: Job) -> DDP:
    """Torch's own compiler, with `mode="reduce-overhead"`: its kernels, captured in graphs of this device."""
    from tests.accelerator import inductor

    device.configure("delay=800")
    inductor.install()
    torch.manual_seed(3)
    # Gradients lie in the memory of graphs until DDP copies them to its buckets.
    model = DDP(ThreeLayers().to(job.device), bucket_cap_mb=1)
    torch.manual_seed(100 + job.rank)
    run = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        inputs, labels = job.data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(inputs), labels).backward()
        optimizer.step()
    job.facts["graphs"] = dict(inductor.calls)
    return model


def by_hand(job: Job) -> nn.Module:
    """No DDP: gradients are reduced in one buffer."""
    device.configure("log delay=800")
    model = network().to(job.device)
    torch.manual_seed(100 + job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, labels = job.data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
        job.end_step(step)
    return model


def sharded(job: Job) -> nn.Module:
    """FSDP2 in layers, with replicas: its reductions run on streams of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device.configure("log delay=800")
    mesh = init_device_mesh(device.TYPE, (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
    job.device = torch.device(device.TYPE, job.rank)
    model = network().to(job.device)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(100 + job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, labels = job.data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        job.end_step(step)
    return model


def sharded_flat(job: Job) -> nn.Module:
    """FSDP1 in layers."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    device.configure("log delay=800")
    job.device = torch.device(device.TYPE, job.rank)
    torch.sim.set_device(job.rank)  # type: ignore[attr-defined]
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": job.device}
    layers = [
        FullyShardedDataParallel(layer, **options) if isinstance(layer, nn.Linear) else layer
        for layer in network().to(job.device).children()
    ]
    model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
    torch.manual_seed(100 + job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, labels = job.data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        job.end_step(step)
    return model


CASES: dict[str, Callable[[Job], nn.Module]] = {
    case.__name__: case
    for case in (
        plain,
        views,
        user_stream,
        other_device,
        delayed,
        accumulated,
        mixed,
        late,
        scattered,
        captured,
        graphed,
        compiled,
        reduced_overhead,
        by_hand,
        sharded,
        sharded_flat,
    )
}


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(BACKENDS)
    job = Job(dist.get_rank(), torch.device(device.TYPE, 0))
    model = CASES[case](job)
    torch.sim.synchronize(job.device)  # type: ignore[attr-defined]
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().cpu().numpy().tobytes())
    name = f"{case}-{dist.get_world_size()}-{job.rank}"
    result = {
        "weights": digest.hexdigest(),
        "buckets": len(str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))
        if isinstance(model, DDP)
        else 0,
        "first_parameter": job.first_parameter,
        "launches": device.native.launches(1),
        **job.facts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    if job.log:
        event_log.write(folder / f"{name}.jsonl", job.log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
