"""Which kernels communicate, and the operation that a name means."""

from __future__ import annotations

import pytest

from ddpcheck.traces.messages import CollectiveKind, communicates, kind_of, short_name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            CollectiveKind.ALL_REDUCE,
        ),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            CollectiveKind.ALL_REDUCE,
        ),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", CollectiveKind.ALL_REDUCE),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", CollectiveKind.REDUCE_SCATTER),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", CollectiveKind.ALL_GATHER),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", CollectiveKind.SEND_RECV),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)", CollectiveKind.BROADCAST),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevComm*)", CollectiveKind.REDUCE),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", CollectiveKind.UNKNOWN),
        ("rcclGenericKernel", CollectiveKind.UNKNOWN),
        (
            "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float, 16>(...)",
            CollectiveKind.ALL_REDUCE,
        ),
        ("multimem_all_reduce_kernel<c10::BFloat16, 16>(...)", CollectiveKind.ALL_REDUCE),
    ],
)
def test_communication(name: str, kind: CollectiveKind) -> None:
    assert communicates(name)
    assert kind_of(name) is kind


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(...)",
        "ampere_sgemm_128x64_nn",
        "Memcpy DtoD (Device -> Device)",
        "void cunn_SoftMaxForward<4, float>(nccl)",
    ],
)
def test_compute(name: str) -> None:
    assert not communicates(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gloo:all_reduce", CollectiveKind.ALL_REDUCE),
        ("nccl:_all_gather_base", CollectiveKind.ALL_GATHER),
        ("nccl:all_to_all", CollectiveKind.ALL_TO_ALL),
        ("c10d::alltoall_base_", CollectiveKind.ALL_TO_ALL),
        ("c10d::allreduce_", CollectiveKind.ALL_REDUCE),
        ("_allgather_base", CollectiveKind.ALL_GATHER),
        ("nccl:recv 1<-0", CollectiveKind.RECV),
        ("nccl:send 0->1", CollectiveKind.SEND),
        ("barrier", CollectiveKind.BARRIER),
        ("", CollectiveKind.UNKNOWN),
    ],
)
def test_calls(name: str, kind: CollectiveKind) -> None:
    assert kind_of(name) is kind


def test_short_name() -> None:
    assert short_name("ncclKernel_X(ncclDevComm*, int)") == "ncclKernel_X"
