"""Softmax attention: N query heads share K key/value heads. `jaxlc.models.kinds.attention` has the
computation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.kinds.contract import (
    PROJECTIONS,
    HasRope,
    Layer,
    LayerTensor,
    Matrix,
    Mixer,
    MixingFlops,
)
from jaxlc.config.schema import RunConfig
from jaxlc.config.values import Above0, From1


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Settings of the layers with attention."""

    num_heads: From1[int] = 1  # number of query heads
    # number of key/value heads, a divisor of num_heads: fewer than num_heads is grouped-query attention, 1 is
    # multi-query attention.
    num_kv_heads: From1[int] = 1
    # width of each attention head; even, because RoPE rotates pairs of dimensions
    head_dim: From1[int] = 2
    # RMSNorm of queries and keys before RoPE. head: of each head, as in Qwen 3 and Gemma 3. projection: of all heads
    # together, as in Olmo 3.
    qk_norm: Literal["none", "head", "projection"] = "none"
    qkv_bias: bool = False  # biases of the query, key and value projections, as in Qwen 2.5
    out_bias: bool = False  # bias of the output projection of attention, as in gpt-oss
    # a trained logit per query head that joins the denominator of the attention softmax, as in
    # gpt-oss.
    sinks: bool = False
    # the output of attention is multiplied by the sigmoid of a gate before its projection; the query projection
    # computes the gate as well, as in Qwen 3.5.
    gate: bool = False
    # the gate has a projection of its own instead, attention_gate, as in Trinity of Arcee
    gate_projection: bool = False
    # RoPE rotates the pairs (x[2i], x[2i + 1]) instead of (x[i], x[i + R/2]), as in GLM 4
    interleaved: bool = False
    # attention logits are divided by the square root of this number; "query_pre_attn_scalar" in Hugging Face configs,
    # or "attention_multiplier" to the power -2. 0: head_dim.
    query_scale_dim: float = 0.0
    # the projected output of attention is multiplied by it, as in Falcon-H1
    output_multiplier: Above0[float] = 1.0
    # sliding layers: window in tokens; a query attends to its own token and the window - 1 tokens before it. 0: the
    # model has no sliding layers.
    window: int = 0

    @property
    def query_dim(self) -> int:
        """The width of a head in the query projection: head_dim, and as much for a gate that it computes."""
        return 2 * self.head_dim if self.gate and not self.gate_projection else self.head_dim

    @property
    def gated_dim(self) -> int:
        """The width of a query head and its gate."""
        return 2 * self.head_dim if self.gate else self.head_dim


def heads_path(path: str) -> str:
    """The path of the sizes of heads, for layers with settings at `path`: the model has a section
    for them, a kind has not.
    """
    return "config.model.attention" if path == "model" else f"config.{path}"


class AttentionKind(Mixer, HasRope):
    name = "attention"
    layers = "layers with attention"
    layer_types = {"full": "full_attention", "sliding": "sliding_attention"}
    layer_kinds = ("full", "sliding", "nope")
    unrotated_kinds = ("nope",)
    scaled_kinds = ("full", "full_mamba2")
    sizes = ("attention.num_heads", "attention.num_kv_heads", "attention.head_dim")
    tensors = (
        *(LayerTensor(f"w{x}", f"self_attn.{x}_proj.weight", 1) for x in "qkv"),
        LayerTensor("wg", "self_attn.gate_proj.weight", 1),
        *(LayerTensor(f"b{x}", f"self_attn.{x}_proj.bias") for x in "qkvo"),
        *(LayerTensor(f"{x}_norm/scale", f"self_attn.{x}_norm.weight") for x in "qk"),
        LayerTensor("sinks", "self_attn.sinks"),
        LayerTensor("wo", "self_attn.o_proj.weight", 2),
    )
    projections = PROJECTIONS | dict(attention_gate="wg")
    saved = ("query", "key", "value", "attention_out", "attention_lse", "attention_projected")

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """wq [D, N, H], or [D, N, 2H] with a gate: first q, then the gate; wg [D, N, H], the projection
        of the gate; wk and wv [D, K, H]; wo [N, H, D].
        """
        sizes = layer.section(AttentionSettings)
        model = dict(model=layer.model_dim)
        key_value = dict(kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim)
        heads = dict(heads=sizes.num_heads, head_dim=sizes.head_dim)
        gate = dict(wg=Matrix(model, heads)) if sizes.gate_projection else {}
        return dict(
            wq=Matrix(model, heads | dict(head_dim=sizes.query_dim)),
            wk=Matrix(model, key_value),
            wv=Matrix(model, key_value),
            **gate,
            wo=Matrix(heads, model),
        )

    def num_vector_entries(self, layer: Layer) -> int:
        """Norms of queries and keys, biases and sinks."""
        sizes = layer.section(AttentionSettings)
        num_normed_heads = {
            "none": 0,
            "head": 2,
            "projection": sizes.num_heads + sizes.num_kv_heads,
        }[sizes.qk_norm]
        entries = num_normed_heads * sizes.head_dim + sizes.out_bias * layer.model_dim
        if sizes.qkv_bias:
            entries += sizes.num_heads * sizes.query_dim + 2 * sizes.num_kv_heads * sizes.head_dim
        return entries + sizes.sinks * sizes.num_heads

    def mixing_flops(self, layer: Layer) -> MixingFlops:
        """2 H for q . k and 2 H for the value, in each head."""
        sizes = layer.section(AttentionSettings)
        return MixingFlops(per_pair=4 * sizes.num_heads * sizes.head_dim)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        sizes = layer.section(AttentionSettings)
        # fewer heads than ranks are repeated
        key_dim = max(sizes.num_kv_heads, config.mesh.tensor) * sizes.head_dim
        values = dict(
            query=sizes.num_heads * sizes.gated_dim,
            key=key_dim,
            value=key_dim,
            attention_out=sizes.num_heads * sizes.head_dim,
            attention_projected=layer.model_dim,
        )
        return saved_with_lse(values, itemsize, sizes.num_heads)

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        prefix = heads_path(path)
        sizes = layer.section(AttentionSettings)
        if sizes.num_heads % sizes.num_kv_heads:
            yield (
                f"{prefix}.num_heads={sizes.num_heads} is not a multiple of num_kv_heads={sizes.num_kv_heads};"
                " every key/value head serves the same number of query heads"
            )
        if sizes.gate_projection and not sizes.gate:
            yield "config.model.attention.gate_projection=True needs config.model.attention.gate=True"
        if sizes.head_dim % 2:
            yield f"{prefix}.head_dim={sizes.head_dim} is odd, and RoPE rotates pairs; use {sizes.head_dim + 1}"

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        prefix = heads_path(path)
        sizes = layer.section(AttentionSettings)
        attention = config.attention
        tensor = config.mesh.tensor
        if sizes.num_heads % tensor:
            yield f"{prefix}.num_heads={sizes.num_heads} is not divisible by config.mesh.tensor={tensor}"
        if sizes.num_kv_heads % tensor and tensor % sizes.num_kv_heads:
            yield (
                f"{prefix}.num_kv_heads={sizes.num_kv_heads} is neither a multiple nor a divisor of"
                f" config.mesh.tensor={tensor}"
            )
        ranks = num_head_ranks(config)
        heads = sizes.num_heads // tensor
        kv_heads = max(1, sizes.num_kv_heads // tensor)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            setting = (
                "mesh.context" if attention.strategy == "ulysses" else "attention.ulysses_degree"
            )
            yield (
                f"config.attention.strategy={attention.strategy!r} splits heads over {setting}={ranks}, and each tensor"
                f" rank has {heads} query and {kv_heads} key/value heads of config.{path}, which must split or repeat"
                " evenly; 'ring' has no such limit"
            )

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        ranks = num_head_ranks(config)
        kv_heads = max(1, layer.section(AttentionSettings).num_kv_heads // config.mesh.tensor)
        if kv_heads % ranks:
            yield (
                f"config.memory.tile_tokens={config.memory.tile_tokens} needs the {kv_heads} key/value heads of"
                f" config.{path} per tensor rank to split over {ranks} Ulysses ranks; use strategy ring, or hybrid with"
                " a config.attention.ulysses_degree that divides them"
            )


def saved_with_lse(entries: Mapping[str, int], itemsize: int, num_heads: int) -> dict[str, float]:
    """Bytes per token of saved activations with these numbers of entries, and of attention's lse."""
    lse = dict(attention_lse=4.0 * num_heads)  # float32
    return {name: float(itemsize * number) for name, number in entries.items()} | lse


def num_head_ranks(config: RunConfig) -> int:
    """Context ranks over which Ulysses splits the heads; 1 for strategies that split only the
    sequence.
    """
    degrees = {"ulysses": config.mesh.context, "hybrid": config.attention.ulysses_degree}
    return degrees.get(config.attention.strategy, 1)
