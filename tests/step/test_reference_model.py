"""The program of the reference model of posttrain.reference='model', whose weights are in host
memory.

tests/train/test_posttrain.py trains with it.
"""

import dataclasses
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from jaxlc.config import Config, load
from jaxlc.plan import result as compile_plan
from jaxlc.plan.program import CompiledProgram, compile_log_probs
from jaxlc.simulate.topology import topology
from jaxlc.step import verify_compiled
from jaxlc.step.state import PINNED_HOST, bytes_per_device, lacks_host_memory
from jaxlc.step.step import TrainStep
from jaxlc.train import stage_setup
from tests.plan import gpus
from tests.step import test_policy_loss
from tests.step.synthetic import make_batch, small_step


def config_with_reference() -> Config:
    config = gpus.small_config()
    config.model.num_layers = 8
    config.data.seq_len = 4096
    config.attention.update(shared_prefixes=True, document_mask=True)
    config.posttrain.update(loss="dpo", reference="model", reference_model="unused")
    return load(config)


@pytest.mark.jax_version  # from JAX 0.11 on, CPUs have host memory, from which layers are fetched
def test_reference_with_experts_has_the_log_probs_of_the_policy(monkeypatch):
    """Each layer fetches all of its experts. Batches have recorded experts, which it does not use, and
    which are missing here.
    """
    model = test_policy_loss.KINDS["experts"]["model"]
    sections = dict(model=model, mesh=dict(context=2), posttrain=dict(replay_routing=True))
    config = test_policy_loss.config_with("grpo", **sections)
    posttrain = dataclasses.replace(config.posttrain, reference="model", reference_model="unused")
    step = small_step(dataclasses.replace(config, posttrain=posttrain))
    row = test_policy_loss.sequence(step.config, test_policy_loss.traces("grpo"))
    batch = make_batch(step, [row | dict(reference_log_probs=row["loss_weights"])])._replace(
        reference_log_probs=None
    )
    params, like = step.init().params, step.reference.abstract_state.params
    on_host = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, like)
    monkeypatch.setattr(stage_setup, "load_pretrained", lambda *_: (on_host, "weights of a run"))
    with_reference = stage_setup.Reference(step, MagicMock(), {})
    expected, actual = (
        step.jitted_log_probs(params, batch),
        with_reference(batch).reference_log_probs,
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-5)
    assert np.ptp(expected) > 1
    where = {x.sharding.memory_kind for x in jax.tree.leaves(on_host)}
    assert where == {"device" if lacks_host_memory(step.mesh) else PINNED_HOST}


@pytest.mark.heavy
@pytest.mark.gpu_compiler
def test_reference_on_gpus_is_in_host_memory_and_fetched_by_layer(monkeypatch):
    """No stack of all layers is on a GPU, copy engines move the layers, and the plan counts both."""
    kept: list[tuple[TrainStep, CompiledProgram]] = []

    def compile_and_keep(reference: TrainStep) -> CompiledProgram:
        kept.append((reference, compile_log_probs(reference)))
        return kept[-1][1]

    monkeypatch.setattr(compile_plan, "compile_log_probs", compile_and_keep)
    plan = compile_plan.plan_step(config_with_reference(), topology("h100:1x4"), lambda: None)
    ((reference, compiled),) = kept
    params = reference.abstract_state.params
    stacks = {
        x.sharding.shard_shape(x.shape)
        for x in jax.tree.leaves(params["layers"])
        if len(x.shape) > 2
    }
    assert stacks and not any(
        array.dims in stacks for array in verify_compiled.device_arrays(compiled.program)
    )
    verify_compiled.check_host_copies(compiled.program)
    stats, params_bytes = compiled.compiled.memory_analysis(), bytes_per_device(params)
    assert stats.host_argument_size_in_bytes == params_bytes
    batch = reference.abstract_batch._replace(reference_log_probs=None)
    assert stats.argument_size_in_bytes <= bytes_per_device(batch) + 1024
    assert plan.reference.host_bytes == plan.memory.host_bytes_per_device == params_bytes
    assert 0 < plan.reference.seconds < plan.predicted.step_seconds  # a forward pass
    assert plan.memory.parameters_bytes < plan.reference.peak_bytes < plan.memory.device_peak_bytes
    assert "peak of the reference" in str(plan)
