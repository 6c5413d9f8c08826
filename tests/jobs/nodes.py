"""One node of a multi-node job: forks its ranks and trains a layer of known size at a steady pace."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import forking
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
            # Sleep takes the same time however busy the machine is; all nodes run on it.
            loss.register_hook(lambda gradient: time.sleep(late))
        loss.backward()
        optimizer.step()
        # A pause of fixed length. If each rank waited for points on its own clock instead, the rank that started last
        # would delay the others at every step.
        time.sleep(options.pace)
    forking.keep(model)
    dist.destroy_process_group()


def provide(options: argparse.Namespace) -> None:
    """Node 0 writes the checkpoint; the other nodes wait for it."""
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
    parser.add_argument("--late", type=float, default=0.0, help="seconds added to each of its backwards")
    parser.add_argument("--checkpoint", type=Path, help="weights that every rank reads; node 0 writes them")
    options = parser.parse_args()
    if options.checkpoint:
        provide(options)
    forking.prepare()
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
