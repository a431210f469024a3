"""Gated DeltaNet: G key heads and H value heads with a recurrent state. Computed by
`jaxlc.models.kinds.delta_net`.

Tensors: transformers, models/qwen3_5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.kinds.contract import (
    PROJECTIONS,
    Layer,
    LayerTensor,
    RecurrentKind,
    RunConfig,
    conv_tensors,
)


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Gated DeltaNet, linear attention with a state: the settings of gated_delta_net layers."""

    key_heads: int = 0  # number of key heads, which queries have too
    value_heads: int = 0  # number of value heads, a multiple of key_heads
    key_dim: int = 0  # width of a key head
    value_dim: int = 0  # width of a value head
    conv_taps: int = 0  # tokens that the convolution of queries, keys and values reads
    # their norm_placement, where it differs from that of the other layers, as in Olmo Hybrid.
    # Empty: norm_placement.
    norm_placement: Literal["", "pre", "post", "pre_and_post"] = ""
    # added to the mean square in the norm of their output. 0: norm_epsilon.
    norm_epsilon: float = 0.0
    # the step size of the correction of the state is from 0 to 2 instead of 0 to 1, so that
    # the state may change its sign, as in Olmo Hybrid.
    negative_eigenvalues: bool = False


_QWEN3_5_9B = dict(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_taps=4)


class DeltaNetKind(RecurrentKind):
    name = "gated_delta_net"
    section = "delta_net"
    settings = DeltaNetConfig
    published = _QWEN3_5_9B
    published_model = "Qwen 3.5"
    widths = {name: name for name in published}
    has_kernel = True
    products_per_token = 3  # the delta rule reads and corrects the state, and the query reads it
    layer_types = {"gated_delta_net": "linear_attention"}
    norm_setting = "delta_net.norm_placement"
    tensors = (
        *(LayerTensor(f"w{x}", "linear_attn.in_proj_qkv.weight", 1) for x in "qkv"),
        *(LayerTensor(f"w{x}", f"linear_attn.in_proj_{x}.weight", 1) for x in "zba"),
        *conv_tensors("linear_attn.conv1d.weight"),
        LayerTensor("log_decay", "linear_attn.A_log"),
        LayerTensor("decay_bias", "linear_attn.dt_bias"),
        LayerTensor("out_norm/scale", "linear_attn.norm.weight"),
        LayerTensor("wo", "linear_attn.out_proj.weight", 2),
    )
    # delta_gate, delta_step and delta_decay compute the gate of the output, the step size and the
    # decay.
    projections = PROJECTIONS | dict(delta_gate="wz", delta_step="wb", delta_decay="wa")

    def __init__(self):
        super().__init__()
        self.only_with += ("runtime.delta_kernel",)

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        yield from super().unsupported(layer, config)
        if config.runtime.delta_kernel == "xla":
            return
        problems = []
        if num_levels := config.attention.shared_prefixes:
            problems.append(f"config.attention.shared_prefixes={num_levels}")
        section = layer.section(DeltaNetConfig)
        for name in ("key_dim", "value_dim"):
            size = vars(section)[name]
            if size < 16 or size & (size - 1):
                problems.append(
                    f"config.model.delta_net.{name}={size} (supported: powers of 2 from 16)"
                )
        if min(section.key_dim, section.value_dim) > 128:  # more shared memory than GPUs have
            problems.append(
                f"config.model.delta_net.key_dim={section.key_dim} and value_dim={section.value_dim} (supported: one of"
                " them above 128)"
            )
        for problem in problems:
            yield (
                f"unsupported: config.runtime.delta_kernel='pallas' with {problem}; use"
                " --config.runtime.delta_kernel=xla"
            )

    def num_vector_entries(self, layer: Layer) -> int:
        """The convolutions, two gates of each value head, and the norm of the output."""
        widths = self.recurrence(layer)
        return widths.conv_entries + 2 * widths.value_heads + widths.value_dim
