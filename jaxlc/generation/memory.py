"""Device memory of generation: the KV cache, and the copy of the weights in the compute dtype. Nothing is compiled."""

from dataclasses import dataclass

from jaxlc.generation.cached_decoder import CachedStep, abstract_params
from jaxlc.models import decoder
from jaxlc.models.cache import layout_for
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class GenerationMemory:
    """Bytes per device; the temporaries of the programs are not counted."""

    num_sequences: int  # generated together
    num_tokens: int  # per sequence, of the prompt and the answer
    cache_bytes: int  # keys and values, and states of recurrent layers
    weights_bytes: int  # the copy of the parameters in the compute dtype

    @property
    def num_bytes(self) -> int:
        return self.cache_bytes + self.weights_bytes


def generation_memory(step: TrainStep, num_sequences: int, num_tokens: int) -> GenerationMemory:
    """The memory of `num_sequences` sequences of `num_tokens` tokens on the mesh of `step`, with a cache in the compute
    dtype."""
    dtype = step.compute_dtype
    cached = CachedStep(config=step.config, mesh=step.mesh, compute_dtype=dtype, cache_dtype=dtype)
    cache = cached.abstract_cache(layout_for(num_tokens, step.mesh), cached.padded_batch_size(num_sequences))
    dims = decoder.dims_of(step.config.model, step.config.lora)
    params = abstract_params(step.abstract_state.params, dims, step.mesh, dtype)
    return GenerationMemory(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        cache_bytes=bytes_per_device(cache),
        weights_bytes=bytes_per_device(params),
    )


def rollout_memory(step: TrainStep, num_tokens: int = 0) -> GenerationMemory | None:
    """The memory of config.rollouts, which exist between two steps, beside the training state; None: the policy makes
    no rollouts.

    Args:
      num_tokens: of the longest prompt and its answer. 0: unknown, as many as fit into a sequence.
    """
    rollouts = step.config.rollouts
    if rollouts.source != "model":
        return None
    num_sequences = rollouts.prompts_per_step * rollouts.answers_per_prompt
    return generation_memory(step, num_sequences, num_tokens or step.config.data.seq_len + 1)
