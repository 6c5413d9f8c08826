"""Gives the simulated accelerator to a job that knows nothing of it: torch imports it by an entry point.

`environment` makes the variables for such a job. With `placed=True` a script written for the CPU runs on the device: it
is the default device, DDP modules are moved to it before they are wrapped, autocast is that of the device, and process
groups have its backend.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENV_PLACE = "SIM_ACCELERATOR_PLACE"
_METADATA = "Metadata-Version: 2.1\nName: sim-accelerator\nVersion: 0\n"
_ENTRY_POINTS = "[torch.backends]\nsim = tests.accelerator.autoload:load\n"


def environment(modes: str = "", placed: bool = False) -> dict[str, str]:
    """Variables to add to those of a job."""
    from tests.accelerator.device import ENV

    folder = ROOT / "build" / "accelerator" / "entry_point"
    metadata = folder / "sim_accelerator-0.dist-info"
    if not (metadata / "entry_points.txt").exists():
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text(_METADATA, encoding="utf-8")
        (metadata / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), ENV: modes}
    if placed:
        variables[ENV_PLACE] = "1"
        variables[ENV] += " unified"
    return variables


def load() -> None:
    """Called by torch at the end of its import."""
    from tests.accelerator import device

    device.install()
    # ddpcheck installs itself while torch is imported.
    if "ddpcheck.agent.install" in sys.modules:
        from tests.accelerator import kernel, ownership

        kernel.register()
        ownership.mark_guarded_calls()
    if os.environ.get(ENV_PLACE):
        _place_modules()


def _place_modules() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from tests.accelerator.device import BACKEND, TYPE

    torch.set_default_device(TYPE)
    wrap: Any = DistributedDataParallel.__init__
    distributed: Any = torch.distributed

    def wrap_on_device(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, module.to(TYPE), *args, **kwargs)

    DistributedDataParallel.__init__ = wrap_on_device  # type: ignore[method-assign]

    autocast = torch.autocast.__init__

    def autocast_on_device(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, TYPE if device_type == "cpu" else device_type, *args, **kwargs)

    torch.autocast.__init__ = autocast_on_device  # type: ignore[method-assign]

    def with_device_backend(original: Any, position: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], both, *args[position + 1 :])
            else:
                kwargs["backend"] = both
            return original(*args, **kwargs)

        return call

    def init_with_device_backend(*args: Any, **kwargs: Any) -> Any:
        _set_up_script(Path(sys.argv[0]).stem)
        return init(*args, **kwargs)

    def on_device_mesh(original: Any) -> Any:
        return lambda device_type, *args, **kwargs: original(TYPE, *args, **kwargs)

    both = f"cpu:gloo,{TYPE}:{BACKEND}"
    init = with_device_backend(distributed.init_process_group, 0)
    distributed.init_process_group = init_with_device_backend
    meshes = importlib.import_module("torch.distributed.device_mesh")
    for module in (distributed, meshes):
        module.init_device_mesh = on_device_mesh(module.init_device_mesh)


def _set_up_script(name: str) -> None:
    """What a script of the corpus needs on a device, beside its place."""
    import torch

    from tests.accelerator.device import TYPE
    from tests.corpus import on_device

    if name in on_device.DETERMINISTIC:
        torch.use_deterministic_algorithms(True)
    if name in on_device.MOVED:
        torch.__future__.set_swap_module_params_on_conversion(True)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        # They name the CPU, and FSDP does not move modules away from an accelerator.
        sharded, shard = fsdp.FullyShardedDataParallel, fsdp.FullyShardedDataParallel.__init__

        def shard_on_device(self: Any, *args: Any, **kwargs: Any) -> None:
            if "device_id" in kwargs:
                kwargs["device_id"] = torch.device(TYPE, 0)
            shard(self, *args, **kwargs)

        sharded.__init__ = shard_on_device
    if name in on_device.SINGLE_TENSOR:
        from torch.optim import optimizer

        optimizer._get_foreach_kernels_supported_devices = list  # type: ignore[assignment]
