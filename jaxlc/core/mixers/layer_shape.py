"""The sizes of a layer, and its weight matrices."""

import math
from typing import Literal, NamedTuple, Protocol


class LayerShape(Protocol):
    """The sizes of a layer; those of `jaxlc.config.ModelConfig`."""

    @property
    def mixer(self) -> str: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def query_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def qk_norm(self) -> Literal["none", "head", "projection"]: ...
    @property
    def norm_placement(self) -> Literal["pre", "post", "pre_and_post"]: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def attention_out_bias(self) -> bool: ...
    @property
    def attention_sinks(self) -> bool: ...
    @property
    def delta_key_heads(self) -> int: ...
    @property
    def delta_value_heads(self) -> int: ...
    @property
    def delta_key_dim(self) -> int: ...
    @property
    def delta_value_dim(self) -> int: ...
    @property
    def delta_conv_taps(self) -> int: ...
    @property
    def feed_forward(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def expert_ffn_dim(self) -> int: ...
    @property
    def expert_bias(self) -> bool: ...
    @property
    def shared_ffn_dim(self) -> int: ...
    @property
    def shared_expert_gate(self) -> bool: ...
    @property
    def router_choice_bias(self) -> bool: ...


class Matrix(NamedTuple):
    """A weight matrix: the names and sizes of its dimensions, those of the inputs first; or one for each expert."""

    inputs: dict[str, int]
    outputs: dict[str, int]
    num_experts: int = 1  # matrices with these dimensions
    experts_per_token: int = 1  # matrices that multiply a token

    @property
    def num_inputs(self) -> int:
        return math.prod(self.inputs.values())

    @property
    def num_outputs(self) -> int:
        return math.prod(self.outputs.values())

    @property
    def size(self) -> int:
        """Entries of the matrices of all experts."""
        return self.num_experts * self.num_inputs * self.num_outputs

    @property
    def active_size(self) -> int:
        """Entries that multiply a token."""
        return self.experts_per_token * self.num_inputs * self.num_outputs

    def low_rank_size(self, *, active: bool) -> int:
        """Entries of an adapter of rank 1 for each matrix; with `active`, of those that multiply a token."""
        return (self.experts_per_token if active else self.num_experts) * (self.num_inputs + self.num_outputs)


class MixerTensor(NamedTuple):
    """A parameter of a mixer, and the end of the name of its Hugging Face tensor.

    Parameters with the same tensor are consecutive rows of it.
    """

    param: str
    tensor: str
    num_inputs: int | None = 0  # this and the next as in `jaxlc.config.models.families.Tensor`
    is_convolution: bool = False
    interleaved: int | None = None
    is_stacked: bool = False
    is_float32: bool = False
