"""Latent attention: keys and values of all heads are products of one latent per token.
`jaxlc.models.kinds.latent` has the computation.

DeepSeek-V2 (arXiv:2405.04434), section 2.1. Tensors: transformers, models/deepseek_v3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxlc.config.kinds.attention import (
    AttentionSettings,
    heads_path,
    num_head_ranks,
    saved_with_lse,
)
from jaxlc.config.kinds.contract import (
    HasLimits,
    HasOwnSettings,
    HasRope,
    Layer,
    LayerTensor,
    Matrix,
    Mixer,
    MixingFlops,
)
from jaxlc.config.schema import RunConfig
from jaxlc.config.values import Above0


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA): the settings of latent layers, besides num_heads.

    head_dim is the width of queries and keys. RoPE rotates its last rope.fraction, which all heads
    share in the keys; in latent_nope layers they share it without rotation.
    """

    # width of the latent of keys and values; "kv_lora_rank" in Hugging Face configs
    rank: int = 0
    # width of the latent of queries; "q_lora_rank" in Hugging Face configs. 0: queries have none.
    query_rank: int = 0
    value_dim: int = 0  # width of a value head; "v_head_dim" in Hugging Face configs
    # added to the mean square in the norms of the latents, as in transformers; vLLM adds
    # norm_epsilon.
    norm_epsilon: Above0[float] = 1e-6
    # RoPE rotates the pairs (x[2i], x[2i + 1]) instead of (x[i], x[i + R/2]); "rope_interleave" in
    # Hugging Face configs.
    interleaved: bool = False


# settings of attention that latent layers have, too
_READ = ("num_heads", "num_kv_heads", "head_dim", "query_scale_dim", "window")


def sends_latents(config: RunConfig) -> bool:
    """Whether a ring sends latents, which each step expands without FP8 or the copy of a node.
    Otherwise, layers compute the keys and values of all heads first.
    """
    attention = config.attention
    precision = config.precision
    has_fp8 = precision.compute == "fp8" and "key_value" in precision.fp8_matmuls
    is_plain = not (has_fp8 or config.memory.node_copy_devices or config.memory.tile_tokens)
    is_ring = attention.strategy == "ring" and config.mesh.context > 1
    return is_ring and is_plain and attention.ring_payload == "latents"


class LatentKind(Mixer, HasRope, HasLimits, HasOwnSettings):
    name = "latent"
    layers = "latent layers"
    layer_types = {"latent": "latent_attention"}
    layer_kinds = ("latent", "latent_nope")
    unrotated_kinds = ("latent_nope",)
    scaled_kinds = ("latent",)
    sizes = ("attention.num_heads", "attention.head_dim")
    only_with = (
        *(f"model.latent.{name}" for name in vars(LatentConfig())),
        "model.rope.query_mscale",
        "attention.ring_payload",
    )
    tensors = (
        LayerTensor("wq", "self_attn.q_proj.weight", 1),
        LayerTensor("wq_down", "self_attn.q_a_proj.weight", 1),
        LayerTensor("q_norm/scale", "self_attn.q_a_layernorm.weight"),
        LayerTensor("wq_up", "self_attn.q_b_proj.weight", 1),
        LayerTensor("wkv_down", "self_attn.kv_a_proj_with_mqa.weight", 1),
        LayerTensor("kv_norm/scale", "self_attn.kv_a_layernorm.weight"),
        LayerTensor("wkv_up", "self_attn.kv_b_proj.weight", 1),
        LayerTensor("wo", "self_attn.o_proj.weight", 2),
    )
    projections = dict(
        query="wq",
        query_down="wq_down",
        query_up="wq_up",
        latent="wkv_down",
        key_value="wkv_up",
        attention_projected="wo",
    )
    saved = ("latent", "query", "key", "value", "attention_out", "attention_lse")
    saved += ("attention_projected",)

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """wq [D, N, H], or wq_down [D, Q] and wq_up [Q, N, H]; wkv_down [D, R + P], for the latent
        and the part of the key that RoPE rotates; wkv_up [R, N, H - P + V], the rest of the key and
        the value of each head; wo [N, V, D].
        """
        latent = layer.section(LatentConfig)
        sizes = layer.section(AttentionSettings)
        model = dict(model=layer.model_dim)
        heads = dict(heads=sizes.num_heads)
        query = heads | dict(head_dim=sizes.head_dim)
        value = heads | dict(head_dim=latent.value_dim)
        expanded = heads | dict(head_dim=sizes.head_dim - layer.rotated_dim + latent.value_dim)
        queries = dict(wq=Matrix(model, query))
        if latent.query_rank:
            queries = dict(
                wq_down=Matrix(model, dict(latent=latent.query_rank)),
                wq_up=Matrix(dict(sharded_latent=latent.query_rank), query),
            )
        return queries | dict(
            wkv_down=Matrix(model, dict(latent=latent.rank + layer.rotated_dim)),
            wkv_up=Matrix(dict(sharded_latent=latent.rank), expanded),
            wo=Matrix(value, model),
        )

    def num_vector_entries(self, layer: Layer) -> int:
        """Norms of the latents."""
        latent = layer.section(LatentConfig)
        return latent.rank + latent.query_rank

    def mixing_flops(self, layer: Layer) -> MixingFlops:
        """2 H for q . k and 2 V for the value, in each head."""
        latent = layer.section(LatentConfig)
        sizes = layer.section(AttentionSettings)
        return MixingFlops(per_pair=2 * sizes.num_heads * (sizes.head_dim + latent.value_dim))

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        latent = layer.section(LatentConfig)
        sizes = layer.section(AttentionSettings)
        values = dict(
            # equal on all tensor ranks
            latent=config.mesh.tensor * (latent.rank + layer.rotated_dim),
            query=sizes.num_heads * sizes.head_dim,
            key=sizes.num_heads * sizes.head_dim,
            value=sizes.num_heads * latent.value_dim,
            attention_out=sizes.num_heads * sizes.head_dim,  # with the padding of values
            attention_projected=layer.model_dim,
        )
        if sends_latents(config):
            del values["key"], values["value"]
        return saved_with_lse(values, itemsize, sizes.num_heads)

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        prefix = heads_path(path)
        latent = layer.section(LatentConfig)
        sizes = layer.section(AttentionSettings)
        for name in ("rank", "value_dim"):
            if vars(latent)[name] < 1:
                yield f"config.{path}.layer_kinds has latent layers, which need --config.model.latent.{name}"
        if latent.value_dim > sizes.head_dim:
            yield (
                f"config.model.latent.value_dim={latent.value_dim} is more than {prefix}.head_dim="
                f"{sizes.head_dim}, the width of queries and keys; use at most that"
            )
        if sizes.num_kv_heads != sizes.num_heads:
            yield (
                f"{prefix}.num_kv_heads={sizes.num_kv_heads} differs from num_heads={sizes.num_heads}: each head"
                f" of a latent layer has keys of its own; use --{prefix}.num_kv_heads={sizes.num_heads}"
            )

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        sizes = layer.section(AttentionSettings)
        for name, default in vars(AttentionSettings()).items():
            value = vars(sizes)[name]
            if name not in _READ and value != default:
                yield f"unsupported: config.model.attention.{name}={value!r} with latent layers; remove it"
        missing = [
            x for x in (*config.memory.save, *config.memory.offload) if x in ("key", "value")
        ]
        if missing and sends_latents(config):
            yield (
                f"config.memory names {missing[0]!r}, which latent layers do not compute where a ring sends latents;"
                " name 'latent' instead, or use --config.attention.ring_payload=keys_values"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        prefix = heads_path(path)
        sizes = layer.section(AttentionSettings)
        tensor = config.mesh.tensor
        ranks = num_head_ranks(config)
        if sizes.num_heads % (tensor * ranks):
            split = f" x {ranks} ranks of config.attention.strategy={config.attention.strategy!r}"
            yield (
                f"{prefix}.num_heads={sizes.num_heads} is not divisible by config.mesh.tensor={tensor}"
                f"{split if ranks > 1 else ''}"
            )

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        yield from ()
