"""Compares the gain that DDP404 predicts with the gain measured, on hosts with slow links and sleeping compute.

    python benchmarks/bucket_advice.py [--case N]   # as root: it makes network namespaces and takes them down

Each case is trained with the buckets it has, under `ddpcheck run --profile`, then with those that were advised, then
with those it had once more; the last two without ddpcheck. Exits 1 where a forecast has the wrong direction or is more
than 30 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HOSTS = ("bucket-a", "bucket-b", "bucket-c")
SWITCH = "bucket-switch"
DEVICE = "veth0"
STEPS = 8
WARM_UP = 3
MIB = 1 << 20
MOST_OFF = 0.3


@dataclass(frozen=True)
class Case:
    """A model as its layers' widths, from input to output, with the time that each layer's backward takes."""

    name: str
    rate: str
    widths: tuple[int, ...]
    sleep: float
    limits: tuple[float, ...] = ()
    # Seconds that a packet takes from one host to the other, of which there are two then.
    delay: float = 0.0
    ranks: int = 2

    @property
    def hosts(self) -> tuple[str, ...]:
        return HOSTS[: self.ranks]


# Links are so slow and pauses so long that other CPU load matters little.
CASES = (
    Case("six equal layers, default buckets", "25mbit", (512,) * 7, 0.24),
    Case("twelve equal layers, two buckets", "50mbit", (384,) * 13, 0.12, (5,)),
    Case("the largest layer comes last", "25mbit", (1024, 512, 256, 256, 256, 256), 0.2, (0.25, 25)),
    Case(
        "eight uneven layers, default buckets", "40mbit", (256, 768, 256, 512, 640, 256, 384, 896, 256), 0.16
    ),
    Case("eleven equal layers, two buckets", "80mbit", (640,) * 12, 0.15, (10,)),
    Case("small buckets on a far link", "100mbit", (*(256,) * 6, 512, 512) * 4, 0.004, (0.25,), delay=0.02),
    Case("default buckets on a far link", "20mbit", (384, 512, 384, 512, 384, 512, 384), 0.2, delay=0.01),
    Case("three hosts, default buckets", "40mbit", (512,) * 9, 0.2, ranks=3),
)


def rank_main(rank: int, case: Case, limits: Sequence[float], folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Busy(torch.autograd.Function):
        """Compute that leaves the processor free: a backward that sleeps."""

        @staticmethod
        def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
            return batch.view_as(batch)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(case.sleep)
            return gradient

    class Layer(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.relu(Busy.apply(super().forward(batch)))

    # High priority: sleeping ranks wake up in time on a busy machine.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=case.ranks
    )
    pairs = zip(case.widths, case.widths[1:], strict=False)
    model = nn.Sequential(*(Layer(wide, narrow) for wide, narrow in pairs))
    options: dict[str, Any] = {"bucket_cap_mb": limits[0]} if len(limits) == 1 else {}
    if len(limits) > 1:
        options = {"bucket_cap_mb_list": list(limits)}
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        ddp(torch.randn(4, case.widths[0])).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    if rank == 0:
        (folder / "times").write_text(json.dumps(times))
    dist.destroy_process_group()


def job(case: int, limits: str, folder: str) -> int:
    """All ranks, each on its host: what `ddpcheck run` is given to watch."""
    me = [sys.executable, __file__, "--rank"]
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", host, *me, str(rank), str(case), limits, folder])
        for rank, host in enumerate(CASES[case].hosts)
    ]
    return max(process.wait() for process in ranks)


@contextmanager
def hosts(case: Case) -> Iterator[None]:
    """Namespaces with a device each, and links between them as slow as the case has them."""
    spaces = case.hosts if case.delay else (*case.hosts, SWITCH)
    for space in spaces:
        run("ip", "netns", "add", space)
    try:
        with far_link(case) if case.delay else switch(case):
            for number, host in enumerate(case.hosts):
                run("ip", "-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    run("ip", "-n", host, "link", "set", device, "up")
                shape = ["root", "tbf", "rate", case.rate, "burst", "64kb", "latency", "200ms"]
                run("tc", "-n", host, "qdisc", "add", "dev", DEVICE, *shape)
            yield
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


@contextmanager
def switch(case: Case) -> Iterator[None]:
    """A cable from every host to a switch."""
    run("ip", "-n", SWITCH, "link", "add", "switch", "type", "bridge")
    run("ip", "-n", SWITCH, "link", "set", "switch", "up")
    for number, host in enumerate(case.hosts):
        port = f"port{number}"
        cable = ["link", "add", DEVICE, "type", "veth", "peer", port, "netns", SWITCH]
        run("ip", "-n", host, *cable)
        run("ip", "-n", SWITCH, "link", "set", port, "master", "switch", "up")
    yield


@contextmanager
def far_link(case: Case) -> Iterator[None]:
    command = [sys.executable, Path(__file__).with_name("delayed_link_job.py"), DEVICE, str(case.delay)]
    carrier = subprocess.Popen([*command, *case.hosts], stdout=subprocess.PIPE, text=True)
    try:
        if carrier.stdout is None or carrier.stdout.readline() != "ready\n":
            sys.exit("the far link could not be made")
        for host in case.hosts:
            # Few large packets: forwarding should need little CPU.
            run("ip", "-n", host, "link", "set", DEVICE, "mtu", "9000")
        yield
    finally:
        carrier.kill()
        carrier.wait()


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def train(number: int, limits: Sequence[float], watched: bool) -> tuple[float, dict[str, Any] | None]:
    """The median step in milliseconds, and the advice where it was watched."""
    with tempfile.TemporaryDirectory() as folder:
        said = ",".join(f"{limit:g}" for limit in limits) or "-"
        command = [sys.executable, __file__, "--job", str(number), said, folder]
        out = Path(folder) / "run"
        if watched:
            options = ["--profile-steps", f"{WARM_UP}:{STEPS - 1}", "--out", str(out), "--fail-on", "never"]
            command = [sys.executable, "-m", "ddpcheck", "run", "-q", *options, "--", *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE}
        subprocess.run(command, check=True, env=environment, timeout=300, stderr=subprocess.DEVNULL)
        times = json.loads((Path(folder) / "times").read_text())
        advice = None
        if watched:
            advice = json.loads((out / "report.json").read_text())["overlap"]["advice"]
        return median(times[WARM_UP:]) * 1000, advice


def check(number: int, case: Case) -> bool:
    """Whether the forecast came true."""
    _, advice = train(number, case.limits, watched=True)
    if advice is None:
        print(f"{case.name}: no advice")
        return False
    best = advice["best"]
    if best == advice["now"]:
        print(f"{case.name}: advised to leave them as they are")
        return False
    sizes = [size / MIB for size in dict.fromkeys((best["first_bytes"], best["cap_bytes"]))]
    after, _ = train(number, sizes, watched=False)
    before, _ = train(number, case.limits, watched=False)
    forecast, gain = advice["gain_ns"] / 1e6, before - after
    off = abs(forecast - gain) / abs(gain)
    print(
        f"{case.name}, {case.rate}: {advice['now']['buckets']} buckets -> {best['buckets']} of {sizes} MiB; "
        f"step {before:.0f} -> {after:.0f} ms; forecast {forecast:.0f} ms less, measured {gain:.0f}: "
        f"off by {off:.0%} "
        f"(latency {advice['latency_ns'] / 1e6:.1f} ms, {advice['bandwidth_gbps'] * 1000:.0f} MB/s)",
        flush=True,
    )
    return forecast * gain > 0 and off <= MOST_OFF


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        sys.exit(job(int(sys.argv[2]), sys.argv[3], sys.argv[4]))
    if sys.argv[1:2] == ["--rank"]:
        limits = [] if sys.argv[4] == "-" else [float(size) for size in sys.argv[4].split(",")]
        rank_main(int(sys.argv[2]), CASES[int(sys.argv[3])], limits, Path(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="this one only, counted from 0")
    chosen = parser.parse_args().case
    good = []
    for number, case in enumerate(CASES):
        if chosen in (None, number):
            with hosts(case):
                good.append(check(number, case))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
