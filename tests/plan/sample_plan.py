"""A plan without a compiled step, for tests of what is printed, searched and added up."""

import dataclasses

from jaxlc.plan.program import Memory, Ring
from jaxlc.plan.result import Plan
from jaxlc.simulate.timeline import Prediction
from tests.plan.test_memory import GIB, MEMORY

PREDICTED = Prediction(
    step_seconds=2.0,
    tokens_per_second_per_device=1.0,
    mfu_causal=0.4,
    recomputed_share=0.3,
    exposed_communication_seconds=0.1,
    communication_seconds=0.5,
    exposed_host_copy_seconds=0.0,
    host_copy_seconds=0.0,
    host_copies=0,
    exposed_host_copies=0,
    bound_by="compute",
    seconds_by_resource={"compute": 1.9, "NVLink": 0.1},
    seconds_by_kind={"attention": 1.9, "waiting": 0.1},
    transfer_seconds_by_resource={"NVLink": 0.5},
    overhead_seconds={},
    step_seconds_interval=(1.0, 4.0),
)


def plan_of(memory: Memory, **advice) -> Plan:
    ring = Ring(hops=0, hidden=0, exposed=0, exposed_forward=0, by_backend={})
    return Plan(
        topology="h100:1x4",
        num_devices=4,
        mesh={},
        sequence_tokens=1,
        tokens_per_step=1,
        compile_seconds=1,
        predicted=PREDICTED,
        memory=memory,
        collectives=(),
        ring=ring,
        kernels={},
        kernel_choice="",
        transport_choice="",
        **advice,
    )


def with_temporaries(gib: int) -> Memory:
    return dataclasses.replace(MEMORY, device_temp_bytes=gib * GIB)
