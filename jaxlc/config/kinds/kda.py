"""Kimi Delta Attention: H heads with a recurrent state whose channels decay by gates of their own.
Computed by `jaxlc.models.kinds.kda`.

Tensors: transformers, models/kimi_linear.
"""

from dataclasses import dataclass

from jaxlc.config.kinds.contract import PROJECTIONS, Layer, LayerTensor, RecurrentKind, conv_tensors
from jaxlc.config.values import UpTo0


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention, linear attention with a state: the settings of kimi_delta layers."""

    key_heads: int = 0  # number of heads of queries, keys and values
    head_dim: int = 0  # width of each, and of the two low-rank gates
    conv_taps: int = 0  # tokens that each convolution of queries, keys and values reads
    # the logarithm of the decay of a token is this times sigmoid(exp(log_decay) x), and not below it; negative, such as
    # -5. 0: it is -exp(log_decay) softplus(x), without a bound, as in Kimi Linear.
    gate_lower_bound: UpTo0[float] = 0.0


_KIMI_LINEAR = dict(key_heads=32, head_dim=128, conv_taps=4)


class KdaKind(RecurrentKind):
    name = "kimi_delta"
    section = "kda"
    settings = KdaConfig
    widths = dict(
        key_heads="key_heads",
        key_dim="head_dim",
        value_heads="key_heads",
        value_dim="head_dim",
        conv_taps="conv_taps",
    )
    published = _KIMI_LINEAR
    published_model = "Kimi Linear"
    products_per_token = 3  # as of Gated DeltaNet
    layer_types = {"kimi_delta": "kimi_delta_attention"}
    tensors = (
        *(LayerTensor(f"w{x}", f"self_attn.{x}_proj.weight", 1) for x in "qkvb"),
        *conv_tensors("self_attn.{}_conv1d.weight"),
        LayerTensor("wf_down", "self_attn.f_a_proj.weight", 1),
        LayerTensor("wf_up", "self_attn.f_b_proj.weight", 1),
        LayerTensor("wz_down", "self_attn.g_a_proj.weight", 1),
        LayerTensor("wz_up", "self_attn.g_b_proj.weight", 1),
        LayerTensor("log_decay", "self_attn.A_log", None, is_float32=True),
        LayerTensor("decay_bias", "self_attn.dt_bias", is_float32=True),
        LayerTensor("out_norm/scale", "self_attn.o_norm.weight"),
        LayerTensor("wo", "self_attn.o_proj.weight", 2),
    )
    projections = PROJECTIONS | dict(
        delta_step="wb",
        decay_down="wf_down",
        decay_up="wf_up",
        gate_down="wz_down",
        gate_up="wz_up",
    )

    def num_vector_entries(self, layer: Layer) -> int:
        """The convolutions, the decays of heads and channels, and the norm of the output."""
        widths = self.recurrence(layer)
        return widths.conv_entries + widths.keys + widths.key_heads + widths.key_dim
