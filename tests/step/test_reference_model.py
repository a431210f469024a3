"""The program of the reference model of posttrain.reference='model', whose weights are in host memory.

tests/train/test_posttrain.py trains with it.
"""

import jax
import pytest

from jaxlc.config import Config, load
from jaxlc.plan.compile import plan_step
from jaxlc.plan.compiled_program import compile_log_probs
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step import verify_compiled
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep, build_step
from tests.plan import gpus


def config_with_reference() -> Config:
    config = gpus.small_config()
    config.model.num_layers = 8
    config.data.seq_len = 4096
    config.attention.update(shared_prefixes=True, document_mask=True)
    config.posttrain.update(loss="dpo", reference="model", reference_model="unused")
    return load(config)


def step_with_reference() -> TrainStep:
    config = config_with_reference()
    return build_step(config, make_mesh(topology("h100:1x4"), config.mesh))


@pytest.mark.gpu_compiler
def test_reference_on_gpus_is_in_host_memory_and_fetched_by_layer():
    """No stack of all layers is on a GPU, and copy engines move the layers."""
    reference = step_with_reference().reference
    compiled, params = compile_log_probs(reference), reference.abstract_state.params
    stacks = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params["layers"]) if len(x.shape) > 2}
    assert stacks and not any(array.dims in stacks for array in verify_compiled.device_arrays(compiled.program))
    verify_compiled.check_host_copies(compiled.program)
    stats = compiled.compiled.memory_analysis()
    assert stats.host_argument_size_in_bytes == bytes_per_device(params)
    batch = reference.abstract_batch._replace(reference_log_probs=None)
    assert stats.argument_size_in_bytes <= bytes_per_device(batch) + 1024


@pytest.mark.heavy
@pytest.mark.gpu_compiler
def test_plan_counts_the_reference():
    """Its weights in host memory, and the time of a forward pass, which is shorter than a step."""
    plan = plan_step(config_with_reference(), topology("h100:1x4"), lambda: None)
    params_bytes = bytes_per_device(step_with_reference().abstract_state.params)
    assert plan.reference.host_bytes == plan.memory.host_bytes_per_device == params_bytes
    assert 0 < plan.reference.seconds < plan.predicted.step_seconds
    assert plan.memory.parameters_bytes < plan.reference.peak_bytes < plan.memory.device_peak_bytes
    assert "peak of the reference" in str(plan)
