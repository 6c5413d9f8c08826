"""One node of a job of several: forks its ranks and trains a layer of a known size at a steady pace."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # DDP's constructor would, once in every rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Kept until the process is gone: the last reference to a process group inside a DDP module, dropped while gloo's
# threads still want the interpreter, now and then never returns.
KEPT: list[DistributedDataParallel] = []


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    world_size = options.nnodes * options.per_node
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo")
    layer = nn.Linear(options.width, options.width, bias=False)
    if options.checkpoint:
        layer.load_state_dict(torch.load(options.checkpoint))
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    late = options.late if options.node_rank == options.late_node else 0.0
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(2, options.width)).square().mean()
        if late:
            # Asleep: so it takes as long however busy the machine is, on which all nodes run together.
            loss.register_hook(lambda gradient: time.sleep(late))
        loss.backward()
        optimizer.step()
        # Not until a moment of each rank's own: the one that began last would hold up the others at every step.
        time.sleep(options.pace)
    KEPT.append(model)
    dist.destroy_process_group()


def provide(options: argparse.Namespace) -> None:
    """The other nodes wait until it is there."""
    if options.node_rank == 0:
        unfinished = options.checkpoint.with_suffix(".unfinished")
        torch.save(nn.Linear(options.width, options.width, bias=False).state_dict(), unfinished)
        unfinished.rename(options.checkpoint)
    while not options.checkpoint.exists():
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds between steps")
    parser.add_argument("--late-node", type=int, default=-1, help="the node whose backwards take longer")
    parser.add_argument("--late", type=float, default=0.0, help="by so many seconds")
    parser.add_argument("--checkpoint", type=Path, help="weights that every rank reads; node 0 makes them")
    options = parser.parse_args()
    if options.checkpoint:
        provide(options)
    children = []
    for local in range(options.per_node):
        pid = os.fork()
        if pid == 0:
            try:
                train(options.node_rank * options.per_node + local, options)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            sys.exit(0)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))


if __name__ == "__main__":
    main()
