"""Coverage in words: for the finding, the verdict, the table of checks and the live view."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.step_coverage.build import EXPECTED, LOCAL_SGD, ONE_RANK
from ddpcheck.analysis.step_coverage.model import Coverage, Gap, OptimizerCoverage
from ddpcheck.records.kinds.coverage import NotCompared, Parallelism

_REASONS = {
    NotCompared.NO_MODULE.value: "in no DDP module",
    NotCompared.DTENSOR.value: "DTensors outside of DDP",
    NotCompared.FLAT_PARAMETER.value: "flat parameters of FSDP",
    NotCompared.SHARDED.value: "sharded, without a replica on another rank",
    NotCompared.IGNORED.value: "ignored by DDP on request",
    NotCompared.COPY.value: "copies of parameters that are compared",
    NotCompared.WRAPPER_DELETED.value: "their DDP module was deleted",
    LOCAL_SGD: "post-localSGD lets replicas differ between averagings",
    ONE_RANK: "the process group has one rank",
}
# What distributes the parameters, and what to do, in the order of precedence.
_SEEN = {
    Parallelism.DEEPSPEED.value: (
        "a DeepSpeed engine trains them",
        "DeepSpeed's engine is not supported.",
    ),
    Parallelism.MEGATRON.value: (
        "Megatron's own DistributedDataParallel trains them",
        "Megatron's wrapper is not supported.",
    ),
    Parallelism.FSDP2.value: (
        "FSDP2 (fully_shard) shards them",
        "See DDP605: ddpcheck could not read how they are distributed.",
    ),
    Parallelism.FSDP.value: (
        "FSDP (FullyShardedDataParallel) shards them",
        "See DDP605: ddpcheck could not read how they are distributed.",
    ),
    Parallelism.DATA_PARALLEL.value: (
        "DataParallel trains them",
        "Wrap the model in DistributedDataParallel instead of DataParallel, with one process per device.",
    ),
    Parallelism.DTENSOR.value: (
        "they are DTensors outside of DDP",
        "Give DDP the mesh dimension of the replicas (device_mesh=mesh['dp']), and create the optimizer afterwards.",
    ),
}
# What shards parameters, in the order of precedence.
_SHARDS = {
    Parallelism.FSDP2.value: "FSDP2 (fully_shard)",
    Parallelism.FSDP.value: "FSDP (FullyShardedDataParallel)",
}
_OPT_OUT = "To use the rest of the report, for example step times, run with --allow-incomplete."


def reason_text(reason: str) -> str:
    return _REASONS.get(reason, reason)


def reasons_text(counts: Mapping[str, int]) -> str:
    """`6 in no DDP module, 2 ignored by DDP on request`."""
    return ", ".join(f"{count} {reason_text(reason)}" for reason, count in counts.items())


def optimizer_text(optimizer: OptimizerCoverage) -> str:
    return f"{optimizer.name} ({optimizer.where})" if optimizer.where else optimizer.name


def expected_gaps(coverage: Coverage) -> str:
    """Parameters that are rightly not compared, for the verdict of a complete run; empty if there are none."""
    counts = {reason: count for reason, count in coverage.not_compared.items() if reason in EXPECTED}
    rest = {reason: count for reason, count in coverage.not_compared.items() if reason not in EXPECTED}
    texts = [reasons_text(counts)] if counts else []
    # Not a gap: then one rank alone trains them.
    texts += [f"{sum(rest.values())} trained by one rank alone"] if rest else []
    return ", ".join(texts)


def gap_text(coverage: Coverage, has_modules: bool) -> tuple[str, str, str]:
    """What is not compared, why, and what to do."""
    if coverage.gap == Gap.CAPTURED:
        return (
            "Optimizer steps that run inside graphs of the device were not compared",
            "no hook runs when a graph is replayed",
            f"Check a run without graphs. {_OPT_OUT}",
        )
    if coverage.gap == Gap.NO_STEP_SEEN:
        why, fix = _why(coverage, has_modules)
        return (
            "Backwards ran, but ddpcheck saw neither a DDP module nor a step of an optimizer of torch",
            why,
            fix,
        )
    if coverage.gap == Gap.NOT_STEPPED:
        return (
            "DDP reduced gradients, but no optimizer stepped the parameters of a DDP module",
            "the optimizers hold other tensors than the DDP modules, so the wrapped parameters are not trained",
            "Create the optimizer from the parameters of the wrapped model, after the model was moved, copied and "
            f"wrapped. {_OPT_OUT}",
        )
    if coverage.gap == Gap.NO_REPLICA:
        return (
            f"Ranks train different models: none of the {coverage.trained} trained parameters is equal on all ranks "
            "after a step",
            "no trained module is wrapped in DDP, and nothing shows whether the ranks should have equal parameters",
            "If the ranks train one model, wrap it in DistributedDataParallel. If each rank trains a model of its own, "
            "there is nothing to compare: run with --allow-incomplete.",
        )
    if coverage.gap == Gap.NO_STEP_COMPARED:
        return (
            f"{_steps(coverage)} of parameters in DDP modules, but no step was compared across ranks",
            "no step has digests of two ranks",
            "If the ranks write to several folders, join them with `ddpcheck merge`. Otherwise see the records of the "
            "ranks that ended early.",
        )
    why, fix = _why(coverage, has_modules)
    if not coverage.compared:
        what = f"None of the {coverage.trained} trained parameters was compared across ranks"
    else:
        what = f"{coverage.missing} of {coverage.trained} trained parameters were not compared across ranks"
    return what, why, fix


def _steps(coverage: Coverage) -> str:
    return f"Optimizers took {coverage.steps} {'step' if coverage.steps == 1 else 'steps'}"


def _why(coverage: Coverage, has_modules: bool) -> tuple[str, str]:
    if NotCompared.SHARDED.value in coverage.not_compared:
        wrapper = next((name for kind, name in _SHARDS.items() if kind in coverage.seen), "a device mesh")
        return (
            f"{wrapper} shards them: each rank holds another part, and no rank a replica of it",
            "Nothing, if the job is meant to run like this: hyperparameters, step counts, names, dtypes and shapes "
            "were compared instead. On a mesh with a replicated dimension (hybrid sharding), replicas are compared. "
            + _OPT_OUT,
        )
    for kind, (why, fix) in _SEEN.items():
        if kind in coverage.seen:
            return why, f"{fix} {_OPT_OUT}"
    if NotCompared.WRAPPER_DELETED.value in coverage.not_compared:
        return (
            "their DDP module was deleted, and the optimizer still steps them",
            "Keep a reference to the DDP module as long as it is trained, and call its forward.",
        )
    if has_modules:
        return (
            "they are in no DDP module",
            "Wrap the module that holds them in DistributedDataParallel: its gradients are otherwise not reduced. "
            + _OPT_OUT,
        )
    return (
        "there is no wrapper that ddpcheck knows: the job reduces gradients itself, or not at all",
        f"Wrap the model in DistributedDataParallel. {_OPT_OUT}",
    )
