"""Gated DeltaNet: G key heads and H value heads with a recurrent state. Computed by `jaxlc.models.kinds.delta_net`.

Tensors: transformers, models/qwen3_5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.kinds.contract import NUM_CHAINS, Layer, LayerTensor, Matrix, Mixer, MixingFlops
from jaxlc.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class DeltaNetSettings:
    """Settings of gated_delta_net layers."""

    delta_key_heads: int = 0  # gated_delta_net layers: number of key heads, which queries have too
    delta_value_heads: int = 0  # gated_delta_net layers: number of value heads, a multiple of delta_key_heads
    delta_key_dim: int = 0  # gated_delta_net layers: width of a key head
    delta_value_dim: int = 0  # gated_delta_net layers: width of a value head
    delta_conv_taps: int = 0  # gated_delta_net layers: tokens that the convolution of queries, keys and values reads
    # gated_delta_net layers: their norm_placement, where it differs from that of the other layers, as in Olmo Hybrid.
    # Empty: norm_placement.
    delta_norm_placement: Literal["", "pre", "post", "pre_and_post"] = ""
    # gated_delta_net layers: added to the mean square in the norm of their output. 0: norm_epsilon.
    delta_norm_epsilon: float = 0.0
    # gated_delta_net layers: the step size of the correction of the state is from 0 to 2 instead of 0 to 1, so that
    # the state may change its sign, as in Olmo Hybrid.
    delta_negative_eigenvalues: bool = False


_QWEN3_5_9B = DeltaNetSettings(
    delta_key_heads=16, delta_value_heads=32, delta_key_dim=128, delta_value_dim=128, delta_conv_taps=4
)
_SIZES = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_conv_taps")


class DeltaNetKind(Mixer):
    name = "gated_delta_net"
    layers = "gated_delta_net layers"
    layer_types = {"gated_delta_net": "linear_attention"}
    layer_kinds = ("gated_delta_net",)
    norm_setting = "delta_norm_placement"
    sizes = _SIZES
    only_with = ()
    tensors = (
        *(LayerTensor(f"w{x}", "linear_attn.in_proj_qkv.weight", 1) for x in "qkv"),
        *(LayerTensor(f"w{x}", f"linear_attn.in_proj_{x}.weight", 1) for x in "zba"),
        *(LayerTensor(f"conv_{x}", "linear_attn.conv1d.weight", 1, is_convolution=True) for x in "qkv"),
        LayerTensor("log_decay", "linear_attn.A_log"),
        LayerTensor("decay_bias", "linear_attn.dt_bias"),
        LayerTensor("out_norm/scale", "linear_attn.norm.weight"),
        LayerTensor("wo", "linear_attn.out_proj.weight", 2),
    )
    # delta_gate, delta_step and delta_decay compute the gate of the output, the step size and the decay.
    projections = dict(
        query="wq", key="wk", value="wv", attention_projected="wo", delta_gate="wz", delta_step="wb", delta_decay="wa"
    )
    # delta_states: the state that enters each part of a sequence.
    saved = ("query", "key", "value", "delta_states", "attention_out", "attention_projected")

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """wq and wk [D, G, K], wv and wz [D, H, V], wb and wa [D, H], wo [H, V, D]."""
        sizes, model = layer.section(DeltaNetSettings), dict(model=layer.model_dim)
        key = dict(heads=sizes.delta_key_heads, head_dim=sizes.delta_key_dim)
        heads = dict(heads=sizes.delta_value_heads)
        value = heads | dict(head_dim=sizes.delta_value_dim)
        outputs = dict(wq=key, wk=key, wv=value, wz=value, wb=heads, wa=heads)
        return {name: Matrix(model, dims) for name, dims in outputs.items()} | dict(wo=Matrix(value, model))

    def num_vector_entries(self, layer: Layer) -> int:
        """The convolutions, two gates of each value head, and the norm of the output."""
        sizes = layer.section(DeltaNetSettings)
        keys, values = _widths(sizes)
        return sizes.delta_conv_taps * (2 * keys + values) + 2 * sizes.delta_value_heads + sizes.delta_value_dim

    def mixing_flops(self, layer: Layer) -> MixingFlops:
        """Three products of each value head with its state [K, V], which the delta rule reads and corrects, and the
        query reads. The chunked form computes more.
        """
        sizes = layer.section(DeltaNetSettings)
        return MixingFlops(per_token=6 * sizes.delta_value_heads * sizes.delta_key_dim * sizes.delta_value_dim)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        sizes = layer.section(DeltaNetSettings)
        keys, values = _widths(sizes)
        widths = dict(
            query=keys + values, key=keys, value=values, attention_out=values, attention_projected=layer.model_dim
        )
        may_have_chains = config.attention.document_sharding and not config.memory.tile_tokens
        fragments = 2 * (NUM_CHAINS if may_have_chains else 1) * config.mesh.context  # see step/batch.py
        states = 4 * fragments * values * sizes.delta_key_dim  # float32
        named = {name: float(itemsize * width) for name, width in widths.items()}
        return named | dict(delta_states=states / config.data.seq_len)

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        sizes = layer.section(DeltaNetSettings)
        published = vars(_QWEN3_5_9B)
        missing = [f"--config.model.{name}={published[name]}" for name in _SIZES if vars(sizes)[name] < 1]
        if missing:
            yield (
                "config.model.layer_kinds has gated_delta_net layers, whose sizes are not set; use a model.preset or"
                f" model.init_from that has such layers, or the sizes of Qwen 3.5: {' '.join(missing)}"
            )
            return
        key_heads, value_heads = sizes.delta_key_heads, sizes.delta_value_heads
        if value_heads % key_heads:
            yield (
                f"config.model.delta_value_heads={value_heads} is not a multiple of delta_key_heads={key_heads}: every"
                " key head serves the same number of value heads; use"
                f" --config.model.delta_value_heads={-(-value_heads // key_heads) * key_heads}"
            )

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        mesh, taps = config.mesh, layer.section(DeltaNetSettings).delta_conv_taps
        if config.attention.shared_prefixes and config.memory.tile_tokens:
            yield (
                "unsupported: config.attention.shared_prefixes=True with gated_delta_net layers and"
                f" config.memory.tile_tokens={config.memory.tile_tokens}; use --config.memory.tile_tokens=0, or"
                " --config.attention.shared_prefixes=False, which repeats the prefixes"
            )
        if config.memory.parameters == "host":
            yield (
                "unsupported: config.memory.parameters='host' with gated_delta_net layers, since kernels would read"
                " their weights in host memory; use --config.memory.parameters=device"
            )
        if config.posttrain.uses_reference_model:
            yield (
                "unsupported: config.posttrain.reference='model' with gated_delta_net layers, since kernels would read"
                " their weights in host memory; use --config.posttrain.reference=record"
            )
        fragment_tokens = config.data.seq_len // (2 * mesh.context)
        if fragment_tokens < taps - 1:
            yield (
                f"the convolutions of gated_delta_net layers read config.model.delta_conv_taps={taps} tokens, and the"
                f" parts of a sequence have {fragment_tokens} (data.seq_len / (2 x mesh.context)); use"
                f" --config.data.seq_len={2 * mesh.context * mesh.tensor * (taps - 1)} or more, or fewer context ranks"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        key_heads, tensor = layer.section(DeltaNetSettings).delta_key_heads, config.mesh.tensor
        if key_heads % tensor:
            yield f"config.model.delta_key_heads={key_heads} is not divisible by config.mesh.tensor={tensor}"

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        mesh, tile_tokens = config.mesh, config.memory.tile_tokens
        shortest = 2 * (layer.section(DeltaNetSettings).delta_conv_taps - 1)
        if tile_tokens < shortest:
            per_device, pieces = config.data.seq_len // mesh.context, 2 * mesh.tensor
            lengths = range(pieces, per_device, pieces)
            longer = next((size for size in lengths if size >= shortest and per_device % size == 0), 0)
            yield (
                f"config.memory.tile_tokens={tile_tokens} is shorter than {shortest}, which the convolutions of"
                " gated_delta_net layers need to reach only the neighboring parts of tiles; use"
                f" --config.memory.tile_tokens={longer}"
            )


def _widths(sizes: DeltaNetSettings) -> tuple[int, int]:
    """The widths of all keys and of all values."""
    return sizes.delta_key_heads * sizes.delta_key_dim, sizes.delta_value_heads * sizes.delta_value_dim
