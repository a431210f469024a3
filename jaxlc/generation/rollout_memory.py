"""Device memory of rollouts by the policy, which exist between two steps, beside the training state."""

from dataclasses import dataclass

from jaxlc.generation.cache import layout_for
from jaxlc.generation.cached_step import CachedStep, abstract_params
from jaxlc.models import decoder
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Bytes per device; the temporaries of the programs are not counted."""

    num_sequences: int  # answers of a step
    num_tokens: int  # per sequence, of the prompt and the answer
    cache_bytes: int  # keys and values
    weights_bytes: int  # the copy of the parameters in the compute dtype

    @property
    def num_bytes(self) -> int:
        return self.cache_bytes + self.weights_bytes


def rollout_memory(step: TrainStep, num_tokens: int = 0) -> RolloutMemory | None:
    """The memory of config.rollouts; None: the policy makes no rollouts.

    Args:
      num_tokens: of the longest prompt and its answer. 0: unknown, as many as fit into a sequence.
    """
    config, rollouts = step.config, step.config.rollouts
    if rollouts.source != "model":
        return None
    num_tokens = num_tokens or config.data.seq_len + 1
    dtype = step.compute_dtype
    cached = CachedStep(config=config, mesh=step.mesh, compute_dtype=dtype, cache_dtype=dtype)
    num_sequences = rollouts.prompts_per_step * rollouts.answers_per_prompt
    cache = cached.abstract_cache(layout_for(num_tokens, step.mesh), cached.padded_batch_size(num_sequences))
    dims = decoder.dims_of(config.model, config.lora)
    params = abstract_params(step.abstract_state.params, dims, step.mesh, dtype)
    return RolloutMemory(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        cache_bytes=bytes_per_device(cache),
        weights_bytes=bytes_per_device(params),
    )
