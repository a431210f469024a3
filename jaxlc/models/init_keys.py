"""Random keys of initial parameters."""

import jax

_LORA_STREAM = 2**31 - 1  # larger than any number of parameters of a layer, by which their keys are derived


class InitKeys:
    """A key for each parameter, derived from one key; those of adapters do not change those of the model.

    The keys equal those of `flax.nnx.Rngs`. Its counters are arrays; to update them takes a third of the time in which
    JAX traces the initialization.
    """

    def __init__(self, key: jax.Array):
        self._key = key
        self._num_params = self._num_adapter_params = 0

    def params(self) -> jax.Array:
        """The key of the next parameter of the model."""
        self._num_params += 1
        return jax.random.fold_in(self._key, self._num_params - 1)

    def lora(self) -> jax.Array:
        """The key of the next parameter of an adapter."""
        self._num_adapter_params += 1
        return jax.random.fold_in(jax.random.fold_in(self._key, _LORA_STREAM), self._num_adapter_params - 1)
