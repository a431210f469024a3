"""Chooses how many tokens have their logits computed at once, by the memory that the training state leaves free.

Each chunk adds its gradient to the float32 gradient of the output head [D, V], in device memory: 4.2 GB of traffic for
an 8B model, about as long as the chunk's matrix products with 1,024 tokens. Larger chunks do that less often.
"""

from jax.sharding import Mesh

from jaxlc.config import Config
from jaxlc.config.trained_params import FROZEN_BYTES, num_adapter_params, num_frozen_params
from jaxlc.core import hardware
from jaxlc.core.axes import CONTEXT, FSDP, TENSOR
from jaxlc.core.flops import num_params

_SMALLEST, *_LARGER = 1024, 2048, 4096  # beyond 4096 the traffic is below a quarter of the products' time
_FREE_MEMORY_FRACTION = 0.04  # for the float32 logits of a chunk, the largest of its arrays


def loss_chunk_tokens(config: Config, mesh: Mesh) -> int:
    """Tokens per device whose logits are computed at once: config.memory.loss_chunk_tokens, or chosen if that is 0.

    The choice is the largest of 1024, 2048 and 4096 whose logits take at most 4% of the device memory without the state
    and the gradients; 1024 on CPU. It ignores activations, whose size is known only after compilation.
    """
    if config.memory.loss_chunk_tokens:
        return config.memory.loss_chunk_tokens
    device = hardware.find(mesh.devices.flat[0].device_kind)
    if device is None:
        return _SMALLEST
    parameters_on_device = config.memory.parameters == "device"
    num_frozen = num_frozen_params(config.model, config.lora, config.train)
    state_bytes = (8 * parameters_on_device + 8 * (config.memory.optimizer == "device")) * (
        num_params(config.model) - num_frozen + num_adapter_params(config.model, config.lora)
    )
    state_bytes += parameters_on_device * FROZEN_BYTES[config.precision.frozen] * num_frozen
    num_shards = mesh.shape[FSDP] * mesh.shape[CONTEXT] * mesh.shape[TENSOR]
    free_bytes = device.memory_bytes - state_bytes / num_shards
    bytes_per_token = 4 * config.model.vocab_size / mesh.shape[TENSOR]
    fitting = [tokens for tokens in _LARGER if tokens * bytes_per_token <= _FREE_MEMORY_FRACTION * free_bytes]
    return max(fitting, default=_SMALLEST)
