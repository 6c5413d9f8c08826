"""Every private name of torch that ddpcheck uses, in one table, and the only code that looks them up.

A release of torch may rename any of them. A missing name is reported once as a fault record (DDP605) with what is not
checked, and the code that needs the name works without it. No module is imported that torch has not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ddpcheck.patches import Patches

# Called once for each missing name with (name, message).
Reporter = Callable[[str, str], None]
TABLE: list[PrivateName] = []
_ABSENT = object()


@dataclass(eq=False)
class PrivateName:
    """A private attribute of torch: of a module or class (`torch.x:Class`), or of the instances of one."""

    owner: str
    name: str
    # The consequence if it is missing: usually what is not checked.
    check: str
    # Set on instances, so it can be looked up only on an instance.
    on_instances: bool = False
    # Present only in some cases: its absence is not reported.
    optional: bool = False
    # The first version that has it. Its absence from earlier ones, which never had it, is not reported.
    since: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        TABLE.append(self)


_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
_C10D = "torch.distributed.distributed_c10d"
_ITERATOR = "torch.utils.data.dataloader:_BaseDataLoaderIter"
_WORKER_ITERATOR = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
_PROFILER = "torch.autograd.profiler"

# DDP's forward and backward.
PRE_FORWARD = PrivateName(_DDP, "_pre_forward", "the start of a forward is taken from `forward` itself")
POST_FORWARD = PrivateName(
    _DDP, "_post_forward", "the end of a forward is not observed, so its duration is not measured"
)
SYNC_BUFFERS = PrivateName(_DDP, "_sync_buffers", "buffers are not compared after DDP broadcasts them")
LOGGING_DATA = PrivateName(
    _DDP, "_get_ddp_logging_data", "DDP's own averages of compute and overlap are not recorded"
)
JOIN_CONFIG = PrivateName(_DDP, "_join_config", "training inside join() is not recognised", on_instances=True)
COMM_HOOKS = PrivateName(_DDP, "_comm_hooks", "communication hooks are not recognised", on_instances=True)
DIVIDE_BY_INITIAL = PrivateName(
    _DDP, "_divide_by_initial_world_size", "the divisor of join() is taken as the world size", True, True
)
PYTHON_REDUCER = PrivateName(
    _DDP, "_use_python_reducer", "gradients of a reducer in Python are read after their reduction", True, True
)
OPTIMIZE_DDP = PrivateName(
    "torch._dynamo.utils",
    "get_optimize_ddp_mode",
    "the reason why gradients of a compiled backward are not checked is not reported",
    optional=True,
)
IGNORED_NAMES = PrivateName(
    "torch.nn:Module", "_ddp_params_and_buffers_to_ignore", "ignored tensors are compared", True, True
)
FIRST_BUCKET = PrivateName(
    "torch.distributed", "_DEFAULT_FIRST_BUCKET_BYTES", "the size of DDP's first bucket is not recorded"
)
GRAPH_TASK = PrivateName("torch._C", "_current_graph_task_id", "nested backwards are not recognised")
ENGINE = PrivateName(
    "torch.autograd:Variable", "_execution_engine", "backwards, gradients and their AllReduce are not checked"
)
FUNCTION_APPLY = PrivateName(
    "torch.autograd.function:BackwardCFunction",
    "apply",
    "the backward of a reentrant checkpoint is not recognised",
)

# Optimizers.
STEP_WRAPPER = PrivateName(
    "torch.optim.optimizer:Optimizer",
    "profile_hook_step",
    "the inner step of a wrapping optimizer counts as a step",
)
IN_BACKWARD = PrivateName(
    "torch.nn:Parameter",
    "_in_backward_optimizers",
    "optimizers inside the backward count as steps",
    True,
    True,
)
WRAPPED_BY_SCHEDULER = PrivateName(
    "torch.optim:Optimizer", "_wrapped_by_lr_sched", "schedules that a job does not restore", True, True
)
SCALE = PrivateName(
    "torch.amp.grad_scaler:GradScaler", "_scale", "the scale of GradScaler is not recorded", on_instances=True
)
AMP_SCALING = PrivateName(
    "torch.optim:Optimizer",
    "_step_supports_amp_scaling",
    "the scale of a fused optimizer is read",
    True,
    True,
)

# Modules and tensors.
_REPLICATE = "torch.distributed._composable.replicate:_ReplicateState"
REPLICATED_LIST = PrivateName(
    _REPLICATE, "_param_list", "parameters under `replicate` are named by numbers", True, True
)
REPLICATED_NAMES = PrivateName(
    _REPLICATE, "_param_names", "parameters under `replicate` are named by numbers", True, True
)
PARAMETERS = PrivateName("torch.nn:Module", "_parameters", "no parameter is compared", on_instances=True)
BUFFERS = PrivateName("torch.nn:Module", "_buffers", "no buffer is compared", on_instances=True)
SUBMODULES = PrivateName(
    "torch.nn:Module", "_modules", "replaced submodules are not noticed", on_instances=True
)
MODULE_HOOKS = tuple(
    PrivateName("torch.nn:Module", name, "hooks of modules are not recognised by the audit", True)
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
)
GLOBAL_MODULE_HOOKS = tuple(
    PrivateName("torch.nn.modules.module", name, "global hooks of modules are not recognised by the audit")
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
)
TENSOR_HOOKS = PrivateName(
    "torch:Tensor", "_backward_hooks", "hooks that change a gradient are not recognised by the audit", True
)
POST_ACCUMULATE_HOOKS = PrivateName(
    "torch:Tensor",
    "_post_accumulate_grad_hooks",
    "hooks that change a gradient are not recognised by the audit",
    True,
)
FUNCTION_MODES = PrivateName(
    "torch._C", "_len_torch_function_stack", "function modes are not recognised by the audit"
)
_DEFAULT_DEVICE_CHECK = "modules under a default device are not audited"
FUNCTION_MODE = PrivateName("torch._C", "_get_function_stack_at", _DEFAULT_DEVICE_CHECK)
ENABLE_FUNCTION = PrivateName("torch._C", "_EnableTorchFunction", _DEFAULT_DEVICE_CHECK)
DEFAULT_DEVICE = PrivateName("torch.utils._device", "DeviceContext", _DEFAULT_DEVICE_CHECK)
NON_PERSISTENT = PrivateName(
    "torch.nn:Module",
    "_non_persistent_buffers_set",
    "buffers that checkpoints do not contain are compared too",
    on_instances=True,
)
# Collectives that these modules of torch call carry parameters and their gradients, not activations.
PARAMETER_MODULES = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.distributed.checkpoint.",
    "torch.nn.utils.clip_grad",
)
_CHILDREN_CHECK = "modules inside it are taken for modules that nothing wraps"
WRAPPED_CHILDREN = (
    PrivateName("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", _CHILDREN_CHECK, True),
    PrivateName(
        "torch.distributed.fsdp:FullyShardedDataParallel", "_fsdp_wrapped_module", _CHILDREN_CHECK, True
    ),
)
WRAPPED_BY_FSDP = WRAPPED_CHILDREN[1]
_LOSS_CHECK = "a loss that is a mean over unequal counts is taken for a sum"
LOSS_REDUCTION = PrivateName("torch.autograd.graph:Node", "_saved_reduction", _LOSS_CHECK, True, True)
LOSS_FACTOR = PrivateName("torch.autograd.graph:Node", "_saved_other", _LOSS_CHECK, True, True)
# What a node of the graph keeps of the arguments of a loss function.
_LOSS_SETTINGS_CHECK = "settings of losses are not compared"
LOSS_SETTINGS = {
    name: PrivateName("torch.autograd.graph:Node", f"_saved_{name}", _LOSS_SETTINGS_CHECK, True, True)
    for name in ("ignore_index", "beta", "delta", "margin", "p", "blank", "zero_infinity")
}
LOSS_TENSORS = {
    name: (
        PrivateName("torch.autograd.graph:Node", f"_raw_saved_{name}", _LOSS_SETTINGS_CHECK, True, True),
        PrivateName("torch.autograd.graph:Node", f"_saved_{name}", _LOSS_SETTINGS_CHECK, True, True),
    )
    for name in ("weight", "pos_weight", "target")
}
UNPACK_HOOK = PrivateName("torch._C._autograd:SavedTensor", "unpack_hook", _LOSS_SETTINGS_CHECK, True, True)
SUMMED_SIZES = PrivateName(
    "torch.autograd.graph:Node", "_saved_self_sym_sizes", _LOSS_SETTINGS_CHECK, True, True
)
SUMMED_DIMENSIONS = PrivateName("torch.autograd.graph:Node", "_saved_dim", _LOSS_SETTINGS_CHECK, True, True)
LOCAL_SHARD = PrivateName(
    "torch.nn:Parameter", "_st_info", "DDP over DTensor parameters is not compared", True, True
)
FLAT_PARAMETER = PrivateName(
    "torch.nn:Parameter", "_is_flat_param", "parameters of FSDP count as parameters in no module", True, True
)
FLATTENED = PrivateName(
    "torch.nn:Parameter", "_fsdp_flattened", "original parameters of FSDP are not compared", True, True
)
FSDP_HANDLE = PrivateName(
    "torch.distributed.fsdp:FullyShardedDataParallel",
    "_handle",
    "parameters of FSDP are not compared",
    True,
)
FSDP_REPLICAS = PrivateName(
    "torch.distributed.fsdp:FullyShardedDataParallel",
    "_inter_node_pg",
    "parameters of hybrid sharding are not compared",
    True,
    True,
)
_FSDP_FORWARD = "forwards of sharded modules are not observed: their data, random numbers, modes and buffers"
FSDP1_FORWARD = PrivateName(
    "torch.distributed.fsdp.fully_sharded_data_parallel", "_root_pre_forward", _FSDP_FORWARD
)
FSDP2_FORWARD = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", "_root_pre_forward", _FSDP_FORWARD
)
FSDP1 = PrivateName("torch.distributed.fsdp", "FullyShardedDataParallel", _FSDP_FORWARD, optional=True)
FSDP2_PARAMETERS = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", _FSDP_FORWARD
)
# Of the state of FSDP1 and of FSDP2.
FSDP_IS_ROOT = PrivateName(
    "torch.distributed.fsdp:FullyShardedDataParallel", "_is_root", _FSDP_FORWARD, True, True
)
FSDP_MESH = PrivateName(
    "torch.distributed.fsdp:FullyShardedDataParallel", "_device_mesh", _FSDP_FORWARD, True, True
)
_FSDP1_SUMS = "the reduction of FSDP's gradients is not checked"
FSDP1_REDUCTIONS = tuple(
    PrivateName("torch.distributed.fsdp._runtime_utils", name, _FSDP1_SUMS)
    for name in ("_reduce_grad", "_reduce_grad_no_shard")
)
FSDP_COMM_HOOK = PrivateName(
    "torch.distributed.fsdp:FullyShardedDataParallel", "_comm_hook", _FSDP1_SUMS, True, True
)
FLAT_SAVED_SHARD = PrivateName("torch.nn:Parameter", "_saved_grad_shard", _FSDP1_SUMS, True, True)
FLAT_CPU_GRADIENT = PrivateName("torch.nn:Parameter", "_cpu_grad", _FSDP1_SUMS, True, True)
FLAT_NAMES = PrivateName("torch.nn:Parameter", "_fqns", _FSDP1_SUMS, True, True)
FLAT_ORIGINALS = PrivateName(
    "torch.nn:Parameter", "_params", "original parameters of FSDP are not compared", True, True
)
_FSDP2 = "torch.distributed.fsdp:FSDPModule"
_FSDP2_OFF = "steps on shards without reduced gradients are not recognised"
FSDP_STATE = PrivateName(_FSDP2, "_get_fsdp_state", _FSDP2_OFF, True)
FSDP_GROUPS = PrivateName(_FSDP2, "_fsdp_param_groups", _FSDP2_OFF, True, True)
FSDP_PARAMETERS = PrivateName(_FSDP2, "fsdp_params", _FSDP2_OFF, True, True)
FSDP_REDUCES = PrivateName(_FSDP2, "reduce_grads", _FSDP2_OFF, True, True)
FSDP_ALL_REDUCES = PrivateName(_FSDP2, "all_reduce_grads", _FSDP2_OFF, True, True)
_FSDP2_SUMS = "the reduction of FSDP2's gradients is not checked"
FSDP_REDUCTION = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_reduce", _FSDP2_SUMS
)
FSDP_PARAMETER_NAME = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam", "_param_fqn", _FSDP2_SUMS, True
)
LOCAL_TENSOR = PrivateName(
    "torch.distributed.tensor:DTensor", "_local_tensor", "DTensor parameters are not compared", True
)
VERSION = PrivateName(
    "torch:Tensor", "_version", "writes to tensors are recognised by samples of their bytes only"
)
SPARSE_INDICES = PrivateName("torch:Tensor", "_indices", "sparse tensors are not compared")
SPARSE_VALUES = PrivateName("torch:Tensor", "_values", "sparse tensors are not compared")
MKLDNN = PrivateName("torch", "_mkldnn", "tensors in MKL-DNN layout are not compared")
ASYNC_COLLECTIVE = PrivateName(
    "torch.distributed._functional_collectives",
    "AsyncCollectiveTensor",
    "asynchronous tensors are waited for",
)
NO_FUNCTION = PrivateName(
    "torch._C",
    "DisableTorchFunction",
    "modes of the program that override torch functions see ddpcheck's calls",
)
DISPATCH_MODES = PrivateName(
    "torch._C", "_len_torch_dispatch_stack", "dispatch modes of the program see ddpcheck's calls"
)
POP_MODE = PrivateName(
    "torch.utils._python_dispatch", "_pop_mode", "dispatch modes of the program see ddpcheck's calls"
)
PUSH_MODE = PrivateName(
    "torch.utils._python_dispatch", "_push_mode", "dispatch modes of the program see ddpcheck's calls"
)
DISPATCH_MODE = PrivateName(
    "torch.utils._python_dispatch", "TorchDispatchMode", "local gradients are not computed again"
)
DYNAMO_DISABLE = PrivateName("torch._dynamo", "disable", "torch.compile traces ddpcheck's hooks")
COMPILED_AUTOGRAD = PrivateName(
    "torch._dynamo.compiled_autograd",
    "compiled_autograd_enabled",
    "compiled backwards trace hooks",
    optional=True,
)
COMPILED_AUTOGRAD_OPTION = PrivateName(
    "torch._dynamo.config", "compiled_autograd", "compiled backwards trace hooks", optional=True
)
DYNAMO_CALLBACK = PrivateName(
    "torch._C._dynamo.eval_frame", "get_eval_frame_callback", "hooks run slower", optional=True
)
COMPILER_BACKENDS = PrivateName(
    "torch._dynamo.eval_frame",
    "cached_backends",
    "calls of modules outside DDP are observed by hooks that torch.compile may trace",
    optional=True,
)
DYNAMO_SKIP = PrivateName("torch._dynamo.eval_frame", "skip_code", "torch.compile traces ddpcheck's wrappers")

# Data loaders.
LOADER_ITERATOR = PrivateName(
    "torch.utils.data.dataloader",
    "_BaseDataLoaderIter",
    "samples are not compared and data loading is not timed",
)
NEXT_INDEX = PrivateName(_ITERATOR, "_next_index", "samples of the ranks are not compared")
NUM_YIELDED = PrivateName(
    _ITERATOR, "_num_yielded", "the end of an epoch is not recognised", on_instances=True
)
DATASET_KIND = PrivateName(
    _ITERATOR, "_dataset_kind", "iterable datasets are not recognised", on_instances=True
)
DATASET = PrivateName(_ITERATOR, "_dataset", "datasets of the ranks are not compared", on_instances=True)
INDEX_SAMPLER = PrivateName(_ITERATOR, "_index_sampler", "samplers are not described", on_instances=True)
SEND_INDEX = PrivateName(
    _ITERATOR, "_send_idx", "batches that workers prefetch are not recognised", True, True
)
_WORKERS_CHECK = "a data-loader worker that never answers is taken for a slow one"
LOADER_TASKS = PrivateName(_WORKER_ITERATOR, "_task_info", _WORKERS_CHECK, on_instances=True)
LOADER_WORKERS = PrivateName(_WORKER_ITERATOR, "_workers", _WORKERS_CHECK, on_instances=True)
LOADER_TIMEOUT = PrivateName(_ITERATOR, "_timeout", _WORKERS_CHECK, on_instances=True)
LOADER_PIN_THREAD = PrivateName(_WORKER_ITERATOR, "_pin_memory_thread", _WORKERS_CHECK, True, True)

IN_ORDER = PrivateName(
    _ITERATOR, "_in_order", "batches are taken to come in the order in which they were drawn", True, True
)

# Process groups and start-up.
DEFAULT_STORE = PrivateName(
    _C10D,
    "_get_default_store",
    "nodes are not compared during the run, and restarts are distinguished by environment variables",
)
UNDERLYING_STORE = PrivateName(
    "torch.distributed:PrefixStore",
    "_underlying_non_prefix_store",
    "nodes are not compared during the run",
    True,
    True,
)
# What collectives create at each call. Programs may import the collectives themselves by name.
_EXCHANGES = "experts and shards that each rank holds for itself may be reported as diverged"
ALL_TO_ALL = PrivateName(_C10D, "AllToAllOptions", _EXCHANGES)
REDUCE_SCATTER = PrivateName(_C10D, "ReduceScatterOptions", _EXCHANGES)
REDUCE = PrivateName(_C10D, "ReduceOptions", _EXCHANGES)
ALL_GATHER = PrivateName(_C10D, "AllgatherOptions", _EXCHANGES)
# What functional collectives call first: one of them, by version.
_FUNCTIONAL = "torch.distributed._functional_collectives"
RESOLVE_GROUP = PrivateName(_FUNCTIONAL, "_resolve_group", _EXCHANGES, optional=True)
RESOLVE_GROUP_NAME = PrivateName(_FUNCTIONAL, "_resolve_group_name", _EXCHANGES, optional=True)
WORLD = PrivateName(_C10D, "_world", "collectives are not counted in the snapshot of a hang")
SEQUENCE_NUMBER = PrivateName(
    "torch.distributed:ProcessGroup",
    "_get_sequence_number_for_group",
    "collectives are not counted in the snapshot of a hang",
)
FLIGHT_RECORDER = PrivateName(
    "torch._C._distributed_c10d",
    "_dump_fr_trace_json",
    "the snapshot of a hang does not show which collectives completed",
    since=(2, 8),
)
NCCL_FLIGHT_RECORDER = PrivateName(
    "torch._C._distributed_c10d", "_dump_nccl_trace_json", "only builds with NCCL have it", optional=True
)
VERIFY_SHAPES = PrivateName(
    "torch.nn.parallel.distributed",
    "_verify_param_shape_across_processes",
    "the time that ranks wait for each other is not measured in the start-up",
)
SYNC_STATES = PrivateName(
    "torch.nn.parallel.distributed",
    "_sync_module_states",
    "the first broadcast is not measured in the start-up",
)

# Functions of torch by which a hang is explained from the stack of a rank. The launcher, which has no torch, compares
# their names; here they are only looked up.
_HANG_CHECK = "a hang inside it is reported without its cause"
HANG_FUNCTIONS = tuple(
    PrivateName(_DDP, name, _HANG_CHECK) for name in ("_sync_module_buffers", "_ddp_init_helper")
)
LOADER_WAITS = tuple(
    PrivateName(_WORKER_ITERATOR, name, _WORKERS_CHECK) for name in ("_try_get_data", "_get_data")
)

# Profilers.
PROFILING = PrivateName(_PROFILER, "_is_profiler_enabled", "every call of ddpcheck gets a profiler span")
AUTOGRAD_PROFILING = PrivateName(
    "torch.autograd",
    "_profiler_enabled",
    "a profiler that was started before the first step is not recognised",
)
PREPARE_TRACE = PrivateName(
    f"{_PROFILER}:profile", "_prepare_trace", "a profiler of the program is not noticed early"
)
START_TRACE = PrivateName(f"{_PROFILER}:profile", "_start_trace", "a profiler of the program is not noticed")
START_LEGACY_TRACE = PrivateName(
    "torch.autograd.profiler_legacy:profile",
    "_start_trace",
    "a legacy profiler of the program is not noticed",
)
KINETO = PrivateName(
    "torch.profiler.profiler", "_KinetoProfile", "no trace is recorded, and exports are not noticed"
)
RECORD_FUNCTION = PrivateName(
    "torch._C._autograd", "_enable_record_function", "forked children of a profiled rank continue to record"
)


def _version_of_torch() -> tuple[int, int]:
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int("".join(takewhile(str.isdigit, minor)) or 0)


class _Missing:
    """The names that this version of torch lacks. Each is reported once, as soon as there is a reporter."""

    def __init__(self) -> None:
        self._names: dict[PrivateName, str] = {}
        self._reporter: Reporter | None = None

    def add(self, private: PrivateName) -> None:
        if private in self._names or _version_of_torch() < private.since:
            return
        message = f"torch {torch.__version__} has no {private.owner.replace(':', '.')}.{private.name}: {private.check}"
        self._names[private] = message
        if self._reporter is not None:
            self._reporter(private.name, message)

    def report_to(self, reporter: Reporter) -> None:
        self._reporter = reporter
        for private, message in self._names.items():
            reporter(private.name, message)


_MISSING = _Missing()


def report_to(reporter: Reporter) -> None:
    """Look up every name whose owner is imported, and report those that are missing, now and later."""
    for private in TABLE:
        if not private.on_instances:
            lookup(private)
    _MISSING.report_to(reporter)


def patch(patches: Patches, private: PrivateName, make: Callable[[Any], Callable[..., Any]]) -> bool:
    """Patch the attribute of a module or class; False where it is missing."""
    return lookup(private) is not None and patches.replace(owner_of(private), private.name, make)


def owner_of(private: PrivateName) -> Any:
    """The module or class that should have the name; None where torch has not imported it."""
    owner = _owners.get(private)
    if owner is None:
        module, _, name = private.owner.partition(":")
        owner = sys.modules.get(module)
        owner = getattr(owner, name, None) if name else owner
        if owner is not None:
            _owners[private] = owner
    return owner


# Found once: some names are asked for several times per step.
_owners: dict[PrivateName, Any] = {}


def lookup(private: PrivateName) -> Any:
    """The attribute of a module or class; None where it is missing, or its owner is not imported."""
    owner = _owners.get(private) or owner_of(private)
    if owner is None:
        return None
    value = getattr(owner, private.name, _ABSENT)
    if value is _ABSENT:
        if not private.optional:
            _MISSING.add(private)
        return None
    return value


def read(private: PrivateName, instance: Any, default: Any = None) -> Any:
    """The attribute of an instance; `default` where it is missing."""
    value = getattr(instance, private.name, _ABSENT)
    if value is _ABSENT:
        if not private.optional and isinstance(instance, owner_of(private) or ()):
            _MISSING.add(private)
        return default
    return value


def saved_tensor(name: str, node: Any) -> tuple[bool, torch.Tensor | None]:
    """Whether what a node of the graph keeps could be read, and the tensor, if there is one.

    If hooks of the program have to unpack it, it is not read: that may compute a checkpointed forward again.
    """
    raw, saved = LOSS_TENSORS[name]
    # Without `unpack_hook` it is not known whether there are hooks.
    if read(UNPACK_HOOK, read(raw, node), node) is not None:
        return False, None
    try:
        tensor = read(saved, node)
    except RuntimeError:
        return False, None  # it was written in place, or has been freed
    return True, tensor if isinstance(tensor, torch.Tensor) else None


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate scheduler was made for the optimizer: it wraps the method of the instance."""
    return bool(read(WRAPPED_BY_SCHEDULER, optimizer.step, False))


def compiler_in_use() -> bool:
    """Whether the program has called torch.compile. What is merely excluded from compiling has no backend."""
    backends = lookup(COMPILER_BACKENDS)
    return bool(backends) and any(map(callable, list(backends.values())))


_no_function: Any = None
_mode_count: Any = None
_version: Any = None
_task: Any = None


def bind() -> None:
    """Look up the names that are used at every event once, when this module is imported."""
    global _no_function, _mode_count, _version, _task
    _no_function = lookup(NO_FUNCTION) or nullcontext
    _mode_count = lookup(DISPATCH_MODES) or int
    _task = lookup(GRAPH_TASK) or (lambda: -1)
    _version = attrgetter(VERSION.name) if lookup(VERSION) is not None else lambda tensor: 0


def no_torch_function() -> AbstractContextManager[Any]:
    """Context manager in which no `__torch_function__` and no function mode of the program is called."""
    context: AbstractContextManager[Any] = _no_function()
    return context


def suspend_user_modes() -> AbstractContextManager[Any]:
    """Context manager in which neither function modes nor dispatch modes of the program are called."""
    if not _mode_count():
        context: AbstractContextManager[Any] = _no_function()
        return context
    return _without_dispatch_modes()


@contextmanager
def _without_dispatch_modes() -> Iterator[None]:
    # One by one: torch's function that disables all modes imports its tracer, which takes a second.
    pop, push = lookup(POP_MODE), lookup(PUSH_MODE)
    with no_torch_function():
        modes = [pop() for _ in range(_mode_count())] if pop is not None and push is not None else []
        try:
            yield
        finally:
            for mode in reversed(modes):
                push(mode)


def in_function_mode() -> bool:
    """Whether a function mode of the program is active; a default device is none: it only adds an argument."""
    count = lookup(FUNCTION_MODES)
    if count is None or not count():
        return False
    mode, enable, default = lookup(FUNCTION_MODE), lookup(ENABLE_FUNCTION), lookup(DEFAULT_DEVICE)
    if mode is None or enable is None or default is None:
        return True
    return not all(isinstance(mode(index), default) for index in range(count()))


def default_device() -> torch.device | None:
    """The default device of the program, where it calls a function of torch: inside of it there is none."""
    count = lookup(FUNCTION_MODES)
    if count is None or not count():
        return None
    device: torch.device | None = getattr(lookup(FUNCTION_MODE)(0), "device", None)
    return device


@contextmanager
def with_default_device(device: torch.device | None) -> Iterator[None]:
    """In a call of ddpcheck, where modes of the program are suspended, run its code with its default device."""
    if device is None:
        yield
        return
    with lookup(ENABLE_FUNCTION)(), device:
        yield


def tensor_version(tensor: torch.Tensor) -> int:
    """Autograd's count of in-place writes; 0 if the tensor has none, as in inference mode."""
    try:
        version: int = _version(tensor)
    except RuntimeError:
        return 0
    return version


def tensor_versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The version of each tensor, 0 for None; one call into C where that is possible."""
    try:
        return list(map(_version, tensors))
    except (RuntimeError, AttributeError):
        return [0 if tensor is None else tensor_version(tensor) for tensor in tensors]


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    running: bool = _task() >= 0
    return running


def compiles_autograd() -> bool:
    """Whether torch compiles a backward that starts now, and traces the hooks of parameters."""
    # Asked at every backward, and most jobs never import the compiler of backwards.
    return COMPILED_AUTOGRAD.owner in sys.modules and bool(lookup(COMPILED_AUTOGRAD))


def takes_python_reducer() -> bool:
    """Whether DDP would now be constructed with the reducer for compiled backwards."""
    mode = lookup(OPTIMIZE_DDP)
    try:
        return mode is not None and mode() == "python_reducer"
    except (ValueError, AssertionError):
        return False  # a setting that DDP refuses too


def may_compile_autograd() -> bool:
    """Whether torch may compile the backward of a forward that starts now."""
    # The option has an effect in torch.compile only, and reading it takes six microseconds.
    return compiles_autograd() or (compiler_in_use() and bool(lookup(COMPILED_AUTOGRAD_OPTION)))


def gives_sparse_parts() -> bool:
    """Whether this version of torch gives access to the stored entries of a COO tensor."""
    return lookup(SPARSE_INDICES) is not None and lookup(SPARSE_VALUES) is not None


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indices and values of a COO tensor as they are stored; None where torch does not give them."""
    indices, values = read(SPARSE_INDICES, tensor), read(SPARSE_VALUES, tensor)
    return None if indices is None or values is None else (indices(), values())


_FRAMES = {STEP_WRAPPER: "wrapper", FUNCTION_APPLY: "apply"}


def frames_of(private: PrivateName) -> Callable[[FrameType | None, int], int]:
    """A function that counts the frames of `private` on a stack, by file and function name, up to a limit."""
    module = sys.modules.get(private.owner.partition(":")[0])
    if lookup(private) is None or module is None:
        return lambda frame, limit: 0
    file, name = module.__file__, _FRAMES[private]

    def count(frame: FrameType | None, limit: int) -> int:
        counted = 0
        while frame is not None and counted < limit:
            code = frame.f_code
            if code.co_name == name and code.co_filename == file:
                counted += 1
            frame = frame.f_back
        return counted

    return count


bind()
