"""The memory of rollouts beside the training state, against the sizes of the arrays."""

import dataclasses

import jax
import pytest

from jaxlc.config.schema import RolloutsConfig
from jaxlc.generation.generate_text import rollout_memory, sample_memory
from tests.step.synthetic import small_config, small_step


@pytest.mark.parametrize("context, tensor", [(1, 1), (2, 2)])
def test_rollout_memory_counts_cache_and_copy_of_the_weights(context, tensor):
    config = small_config(mesh=dict(context=context, tensor=tensor))
    assert rollout_memory(small_step(config)) is None
    rollouts = RolloutsConfig(
        source="model", prompts=("p",), prompts_per_step=3, answers_per_prompt=2, reward="r:r"
    )
    step = small_step(dataclasses.replace(config, rollouts=rollouts))
    memory = rollout_memory(step, 100)
    assert (memory.num_sequences, memory.num_tokens) == (6, 100)
    values_per_token = 2 * 2 * 2 * 8  # K and V, layers, heads, head dim
    assert memory.cache_bytes == 4 * 6 * 128 * values_per_token // (context * tensor)
    num_params = sum(x.size for x in jax.tree.leaves(step.abstract_state.params))
    assert num_params * 4 // (context * tensor) <= memory.weights_bytes <= num_params * 4
    assert rollout_memory(step).num_tokens == config.data.seq_len + 1


def test_sample_memory_has_no_copy_of_the_weights():
    config = small_config(mesh=dict(context=2, tensor=2))
    assert sample_memory(small_step(config)) is None
    train = dataclasses.replace(
        config.train, sample_every_steps=1, sample_prompts=("ab", "é"), sample_tokens=100
    )
    memory = sample_memory(small_step(dataclasses.replace(config, train=train)))
    assert (memory.num_sequences, memory.num_tokens, memory.weights_bytes) == (2, 110, 0)
    assert memory.cache_bytes == 4 * 2 * 128 * (2 * 2 * 2 * 8) // 4
