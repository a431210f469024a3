"""Gated DeltaNet: G key heads and H value heads with a recurrent state. Computed by
`jaxlc.models.kinds.delta_net`.

Tensors: transformers, models/qwen3_5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.kinds.contract import (
    NUM_CHAINS,
    HasLimits,
    Layer,
    LayerTensor,
    Matrix,
    Mixer,
    MixingFlops,
)
from jaxlc.config.schema import RunConfig


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


_QWEN3_5_9B = DeltaNetConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_taps=4)
_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim", "conv_taps")


class DeltaNetKind(Mixer, HasLimits):
    name = "gated_delta_net"
    layers = "gated_delta_net layers"
    layer_types = {"gated_delta_net": "linear_attention"}
    layer_kinds = ("gated_delta_net",)
    norm_setting = "delta_net.norm_placement"
    sizes = tuple(f"delta_net.{name}" for name in _SIZES)
    tensors = (
        *(LayerTensor(f"w{x}", "linear_attn.in_proj_qkv.weight", 1) for x in "qkv"),
        *(LayerTensor(f"w{x}", f"linear_attn.in_proj_{x}.weight", 1) for x in "zba"),
        *(
            LayerTensor(f"conv_{x}", "linear_attn.conv1d.weight", 1, is_convolution=True)
            for x in "qkv"
        ),
        LayerTensor("log_decay", "linear_attn.A_log"),
        LayerTensor("decay_bias", "linear_attn.dt_bias"),
        LayerTensor("out_norm/scale", "linear_attn.norm.weight"),
        LayerTensor("wo", "linear_attn.out_proj.weight", 2),
    )
    # delta_gate, delta_step and delta_decay compute the gate of the output, the step size and the
    # decay.
    projections = dict(
        query="wq",
        key="wk",
        value="wv",
        attention_projected="wo",
        delta_gate="wz",
        delta_step="wb",
        delta_decay="wa",
    )
    # delta_states: the state that enters each part of a sequence.
    saved = ("query", "key", "value", "delta_states", "attention_out", "attention_projected")

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """wq and wk [D, G, K], wv and wz [D, H, V], wb and wa [D, H], wo [H, V, D]."""
        sizes, model = layer.section(DeltaNetConfig), dict(model=layer.model_dim)
        key = dict(heads=sizes.key_heads, head_dim=sizes.key_dim)
        heads = dict(heads=sizes.value_heads)
        value = heads | dict(head_dim=sizes.value_dim)
        outputs = dict(wq=key, wk=key, wv=value, wz=value, wb=heads, wa=heads)
        return {name: Matrix(model, dims) for name, dims in outputs.items()} | dict(
            wo=Matrix(value, model)
        )

    def num_vector_entries(self, layer: Layer) -> int:
        """The convolutions, two gates of each value head, and the norm of the output."""
        sizes = layer.section(DeltaNetConfig)
        keys, values = _widths(sizes)
        return sizes.conv_taps * (2 * keys + values) + 2 * sizes.value_heads + sizes.value_dim

    def mixing_flops(self, layer: Layer) -> MixingFlops:
        """Three products of each value head with its state [K, V], which the delta rule reads and
        corrects, and the query reads. The chunked form computes more.
        """
        sizes = layer.section(DeltaNetConfig)
        return MixingFlops(per_token=6 * sizes.value_heads * sizes.key_dim * sizes.value_dim)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        sizes = layer.section(DeltaNetConfig)
        keys, values = _widths(sizes)
        widths = dict(
            query=keys + values,
            key=keys,
            value=values,
            attention_out=values,
            attention_projected=layer.model_dim,
        )
        may_have_chains = config.attention.document_sharding and not config.memory.tile_tokens
        # see step/batch.py
        fragments = 2 * (NUM_CHAINS if may_have_chains else 1) * config.mesh.context
        states = 4 * fragments * values * sizes.key_dim  # float32
        named = {name: float(itemsize * width) for name, width in widths.items()}
        return named | dict(delta_states=states / config.data.seq_len)

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        sizes = layer.section(DeltaNetConfig)
        published = vars(_QWEN3_5_9B)
        missing = [
            f"--config.model.delta_net.{name}={published[name]}"
            for name in _SIZES
            if vars(sizes)[name] < 1
        ]
        if missing:
            yield (
                "config.model.layer_kinds has gated_delta_net layers, whose sizes are not set; use a model.preset or"
                f" model.init_from that has such layers, or the sizes of Qwen 3.5: {' '.join(missing)}"
            )
            return
        key_heads, value_heads = sizes.key_heads, sizes.value_heads
        if value_heads % key_heads:
            yield (
                f"config.model.delta_net.value_heads={value_heads} is not a multiple of key_heads={key_heads}: every"
                " key head serves the same number of value heads; use"
                f" --config.model.delta_net.value_heads={-(-value_heads // key_heads) * key_heads}"
            )

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        mesh, taps = config.mesh, layer.section(DeltaNetConfig).conv_taps
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
                f"the convolutions of gated_delta_net layers read config.model.delta_net.conv_taps={taps} tokens, and"
                f" the parts of a sequence have {fragment_tokens} (data.seq_len / (2 x mesh.context)); use"
                f" --config.data.seq_len={2 * mesh.context * mesh.tensor * (taps - 1)} or more, or fewer context ranks"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        key_heads, tensor = layer.section(DeltaNetConfig).key_heads, config.mesh.tensor
        if key_heads % tensor:
            yield f"config.model.delta_net.key_heads={key_heads} is not divisible by config.mesh.tensor={tensor}"

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        mesh, tile_tokens = config.mesh, config.memory.tile_tokens
        shortest = 2 * (layer.section(DeltaNetConfig).conv_taps - 1)
        if tile_tokens < shortest:
            per_device, pieces = config.data.seq_len // mesh.context, 2 * mesh.tensor
            lengths = range(pieces, per_device, pieces)
            longer = next(
                (size for size in lengths if size >= shortest and per_device % size == 0), 0
            )
            yield (
                f"config.memory.tile_tokens={tile_tokens} is shorter than {shortest}, which the convolutions of"
                " gated_delta_net layers need to reach only the neighboring parts of tiles; use"
                f" --config.memory.tile_tokens={longer}"
            )


def _widths(sizes: DeltaNetConfig) -> tuple[int, int]:
    """The widths of all keys and of all values."""
    return sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
