"""Published model shapes by name: the values of `config.model.preset`; and the name of a model.

Source: the `config.json` that the authors of each model publish with its weights. A test compares
the parameter count of each entry with the published one.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jaxlc.config.models.families import FAMILIES
from jaxlc.config.models.hub import is_model_id
from jaxlc.config.models.model_schema import KindConfig, ModelConfig, model_from
from jaxlc.config.values import flattened

_LLAMA_3_1: dict[str, Any] = dict(
    theta=500_000.0, scaling="llama3", factor=8.0, original_tokens=8192
)
_LLAMA_3_2: dict[str, Any] = {**_LLAMA_3_1, "factor": 32.0}
_LLAMA_3: dict[str, Any] = dict(vocab_size=128_256, norm_epsilon=1e-5)

_QWEN3_5: dict[str, Any] = dict(
    vocab_size=248_320,
    tie_embeddings=False,
    norm_epsilon=1e-6,
    layer_kinds=(*["gated_delta_net"] * 3, "full"),
    delta_net=dict(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_taps=4),
    rope=dict(theta=10_000_000.0, fraction=0.25),
)
_GEMMA3_GROUP = (*["sliding"] * 5, "full")
_OLMO3: dict[str, Any] = dict(
    tie_embeddings=False,
    norm_epsilon=1e-6,
    layer_kinds=(*["sliding"] * 3, "full"),
    rope=dict(
        theta=500_000.0,
        sliding_theta=500_000.0,
        scaling="yarn",
        factor=8.0,
        original_tokens=8192,
    ),
    **FAMILIES["olmo3"].settings,
)
_LLAMA_70B: dict[str, Any] = dict(
    num_layers=80,
    model_dim=8192,
    attention=dict(num_heads=64, num_kv_heads=8, head_dim=128),
    ffn_dim=28_672,
    tie_embeddings=False,
    rope=_LLAMA_3_1,
    **_LLAMA_3,
)
_QWEN2_5: dict[str, Any] = dict(
    vocab_size=152_064,
    tie_embeddings=False,
    rope=dict(theta=1_000_000.0),
    **FAMILIES["qwen2"].settings,
)

_QWEN3: dict[str, Any] = dict(  # the sizes that 4B and 8B share
    vocab_size=151_936,
    num_layers=36,
    attention=dict(num_heads=32, num_kv_heads=8, head_dim=128),
    norm_epsilon=1e-6,
    rope=dict(theta=1_000_000.0),
    **FAMILIES["qwen3"].settings,
)
_LATENT: dict[str, Any] = dict(
    tie_embeddings=False,
    first_layer_kinds=("dense",),
    layer_kinds=("latent",),
    kinds=(KindConfig(name="dense", attention="latent", feed_forward="dense"),),
)


def _layers(model_type: str, **fields: Any) -> dict[str, Any]:
    """The kinds of all layers, from these fields of config.json."""
    family = FAMILIES[model_type]
    names = tuple(family.read_kinds(fields))
    described = [name for name in dict.fromkeys(names) if name in family.kinds]
    kinds = tuple(KindConfig(name=name, **family.kinds[name]) for name in described)
    return dict(layer_kinds=names, kinds=kinds)


_PRESETS: tuple[dict[str, Any], ...] = (
    dict(
        preset="tiny",
        vocab_size=512,
        num_layers=4,
        model_dim=128,
        attention=dict(num_heads=4, num_kv_heads=2, head_dim=32),
        ffn_dim=384,
        tie_embeddings=True,
        norm_epsilon=1e-5,
    ),
    dict(
        preset="llama3.2-1b",
        num_layers=16,
        model_dim=2048,
        attention=dict(num_heads=32, num_kv_heads=8, head_dim=64),
        ffn_dim=8192,
        tie_embeddings=True,
        rope=_LLAMA_3_2,
        **_LLAMA_3,
    ),
    dict(
        preset="llama3.2-3b",
        num_layers=28,
        model_dim=3072,
        attention=dict(num_heads=24, num_kv_heads=8, head_dim=128),
        ffn_dim=8192,
        tie_embeddings=True,
        rope=_LLAMA_3_2,
        **_LLAMA_3,
    ),
    dict(
        preset="llama3.1-8b",
        num_layers=32,
        model_dim=4096,
        attention=dict(num_heads=32, num_kv_heads=8, head_dim=128),
        ffn_dim=14_336,
        tie_embeddings=False,
        rope=_LLAMA_3_1,
        **_LLAMA_3,
    ),
    dict(preset="llama3.1-70b", **_LLAMA_70B),
    dict(preset="llama3.3-70b", **_LLAMA_70B),  # meta-llama/Llama-3.3-70B-Instruct
    dict(
        preset="qwen2.5-7b",  # Qwen/Qwen2.5-7B
        num_layers=28,
        model_dim=3584,
        attention=dict(num_heads=28, num_kv_heads=4, head_dim=128),
        ffn_dim=18_944,
        norm_epsilon=1e-6,
        **_QWEN2_5,
    ),
    dict(
        preset="qwen2.5-14b",  # Qwen/Qwen2.5-14B
        num_layers=48,
        model_dim=5120,
        attention=dict(num_heads=40, num_kv_heads=8, head_dim=128),
        ffn_dim=13_824,
        norm_epsilon=1e-5,
        **_QWEN2_5,
    ),
    dict(
        preset="qwen2.5-32b",  # Qwen/Qwen2.5-32B
        num_layers=64,
        model_dim=5120,
        attention=dict(num_heads=40, num_kv_heads=8, head_dim=128),
        ffn_dim=27_648,
        norm_epsilon=1e-5,
        **_QWEN2_5,
    ),
    dict(
        preset="qwen2.5-72b",  # Qwen/Qwen2.5-72B
        num_layers=80,
        model_dim=8192,
        attention=dict(num_heads=64, num_kv_heads=8, head_dim=128),
        ffn_dim=29_568,
        norm_epsilon=1e-5,
        **_QWEN2_5,
    ),
    dict(
        preset="qwen3-4b",
        model_dim=2560,
        ffn_dim=9728,
        tie_embeddings=True,
        **_QWEN3,
    ),
    dict(
        preset="qwen3-8b",
        model_dim=4096,
        ffn_dim=12_288,
        tie_embeddings=False,
        **_QWEN3,
    ),
    dict(
        # Qwen/Qwen3-30B-A3B; also THUDM/slime, scripts/models/qwen3-30B-A3B.sh.
        preset="qwen3-30b-a3b",
        vocab_size=151_936,
        num_layers=48,
        model_dim=2048,
        attention=dict(num_heads=32, num_kv_heads=4, head_dim=128),
        ffn_dim=6144,  # of dense layers, which it does not have
        experts=dict(num_experts=128, experts_per_token=8, ffn_dim=768, renormalize=True),
        tie_embeddings=False,
        norm_epsilon=1e-6,
        rope=dict(theta=1_000_000.0),
        **FAMILIES["qwen3_moe"].settings,
    ),
    dict(
        # openai/gpt-oss-20b: the model card of August 2025, and GptOssConfig in transformers 5.23, whose numbers of
        # layers and experts are those of gpt-oss-120b.
        preset="gpt-oss-20b",
        vocab_size=201_088,
        num_layers=24,
        model_dim=2880,
        attention=dict(
            num_heads=64, num_kv_heads=8, head_dim=64, qkv_bias=True, out_bias=True, window=128
        ),
        ffn_dim=2880,  # of dense layers, which it does not have
        experts=dict(num_experts=32, experts_per_token=4, ffn_dim=2880),
        layer_kinds=("sliding", "full"),
        tie_embeddings=False,
        norm_epsilon=1e-5,
        rope=dict(
            theta=150_000.0,
            sliding_theta=150_000.0,
            sliding_scaling=True,
            scaling="yarn",
            factor=32.0,
            original_tokens=4096,
            truncate=False,
        ),
        **FAMILIES["gpt_oss"].settings,
    ),
    dict(
        # deepseek-ai/DeepSeek-V2-Lite
        preset="deepseek-v2-lite",
        vocab_size=102_400,
        num_layers=27,
        model_dim=2048,
        attention=dict(num_heads=16, num_kv_heads=16, head_dim=192),
        ffn_dim=10_944,
        latent=dict(rank=512, value_dim=128, interleaved=True),
        experts=dict(num_experts=64, experts_per_token=6, ffn_dim=1408, shared_ffn_dim=2816),
        rope=dict(
            theta=10_000.0,
            fraction=64 / 192,
            scaling="yarn",
            factor=40.0,
            original_tokens=4096,
            attention_factor=1.0,
            query_mscale=0.707,
        ),
        norm_epsilon=1e-6,
        **_LATENT,
        **FAMILIES["deepseek_v2"].settings,
    ),
    dict(
        # zai-org/GLM-4.7-Flash: the defaults of Glm4MoeLiteConfig in transformers 5.23; the base of RoPE is that of
        # GLM 4.5.
        preset="glm-4.7-flash",
        vocab_size=154_880,
        num_layers=47,
        model_dim=2048,
        attention=dict(num_heads=20, num_kv_heads=20, head_dim=256),
        ffn_dim=10_240,
        latent=dict(rank=512, query_rank=768, value_dim=256, interleaved=True),
        experts=dict(
            num_experts=64,
            experts_per_token=4,
            ffn_dim=1536,
            shared_ffn_dim=1536,
            renormalize=True,
            scale=1.8,
        ),
        rope=dict(theta=1_000_000.0, fraction=64 / 256),
        norm_epsilon=1e-5,
        **_LATENT,
        **FAMILIES["glm4_moe_lite"].settings,
    ),
    dict(
        # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B
        preset="nemotron-3-nano-30b-a3b",
        vocab_size=131_072,
        num_layers=52,
        model_dim=2688,
        attention=dict(num_heads=32, num_kv_heads=2, head_dim=128),
        ffn_dim=1856,
        **_layers(
            "nemotron_h",
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        ),
        mamba2=dict(heads=64, head_dim=64, groups=8, state_dim=128, conv_taps=4),
        experts=dict(
            num_experts=128,
            experts_per_token=6,
            ffn_dim=1856,
            shared_ffn_dim=3712,
            router="sigmoid",
            choice_bias=True,
            renormalize=True,
            scale=2.5,
        ),
        norm_epsilon=1e-5,
        **FAMILIES["nemotron_h"].settings,
    ),
    dict(
        # moonshotai/Kimi-Linear-48B-A3B-Base: linear_attn_config of its config.json, and the defaults of
        # KimiLinearConfig in transformers 5.23.
        preset="kimi-linear-48b-a3b",
        vocab_size=163_840,
        num_layers=27,
        model_dim=2304,
        attention=dict(num_heads=32, num_kv_heads=32, head_dim=192),
        ffn_dim=9216,
        rope=dict(fraction=64 / 192),  # without layers that it rotates
        latent=dict(rank=512, value_dim=128),
        **_layers(
            "kimi_linear",
            num_hidden_layers=27,
            linear_attn_config=dict(kda_layers=[i for i in range(1, 27) if i % 4]),
            first_k_dense_replace=1,
        ),
        kda=dict(key_heads=32, head_dim=128, conv_taps=4),
        experts=dict(
            num_experts=256,
            experts_per_token=8,
            ffn_dim=1024,
            shared_ffn_dim=1024,
            renormalize=True,
            scale=2.446,
        ),
        norm_epsilon=1e-5,
        **FAMILIES["kimi_linear"].settings,
    ),
    dict(
        # Qwen/Qwen3.5-9B, the text model: the defaults of Qwen3_5TextConfig in transformers 5.23; the base of RoPE is
        # that of THUDM/slime, scripts/models.
        preset="qwen3.5-9b",
        num_layers=32,
        model_dim=4096,
        attention=dict(num_heads=16, num_kv_heads=4, head_dim=256),
        ffn_dim=12_288,
        **_QWEN3_5,
        **FAMILIES["qwen3_5_text"].settings,
    ),
    dict(
        # Qwen/Qwen3.5-35B-A3B, the text model: the defaults of Qwen3_5MoeTextConfig in transformers 5.23, whose
        # docstring names this model; the base of RoPE is that of THUDM/slime, scripts/models/qwen3.5-35B-A3B.sh.
        preset="qwen3.5-35b-a3b",
        num_layers=40,
        model_dim=2048,
        attention=dict(num_heads=16, num_kv_heads=2, head_dim=256),
        ffn_dim=512,  # of dense layers, which it does not have
        experts=dict(num_experts=256, experts_per_token=8, ffn_dim=512, shared_ffn_dim=512),
        **_QWEN3_5,
        **FAMILIES["qwen3_5_moe_text"].settings,
    ),
    dict(
        # allenai/Olmo-Hybrid-7B: the defaults of OlmoHybridConfig in transformers 5.23; without
        # RoPE.
        preset="olmo-hybrid-7b",
        vocab_size=100_352,
        num_layers=32,
        model_dim=3840,
        attention=dict(num_heads=30, num_kv_heads=30, head_dim=128),
        ffn_dim=11_008,
        tie_embeddings=False,
        norm_epsilon=1e-6,
        layer_kinds=(*["gated_delta_net"] * 3, "nope"),
        delta_net=dict(key_heads=30, value_heads=30, key_dim=96, value_dim=192, conv_taps=4),
        **FAMILIES["olmo_hybrid"].settings,
    ),
    dict(
        preset="mistral-7b",  # v0.3
        vocab_size=32_768,
        num_layers=32,
        model_dim=4096,
        attention=dict(num_heads=32, num_kv_heads=8, head_dim=128),
        ffn_dim=14_336,
        tie_embeddings=False,
        norm_epsilon=1e-5,
        rope=dict(theta=1_000_000.0),
    ),
    dict(
        preset="gemma3-12b",  # without the vision encoder
        vocab_size=262_208,
        num_layers=48,
        model_dim=3840,
        attention=dict(
            num_heads=16, num_kv_heads=8, head_dim=256, query_scale_dim=256, window=1024
        ),
        ffn_dim=15_360,
        tie_embeddings=True,
        norm_epsilon=1e-6,
        layer_kinds=_GEMMA3_GROUP,
        rope=dict(theta=1_000_000.0, scaling="linear", factor=8.0),
        **FAMILIES["gemma3_text"].settings,
    ),
    dict(
        preset="olmo3-7b",
        vocab_size=100_278,
        num_layers=32,
        model_dim=4096,
        attention=dict(num_heads=32, num_kv_heads=32, head_dim=128, window=4096),
        ffn_dim=11_008,
        **_OLMO3,
    ),
    dict(
        preset="olmo3-32b",
        vocab_size=100_278,
        num_layers=64,
        model_dim=5120,
        attention=dict(num_heads=40, num_kv_heads=8, head_dim=128, window=4096),
        ffn_dim=27_648,
        **_OLMO3,
    ),
)
PRESETS: dict[str, ModelConfig] = {
    preset["preset"]: model_from(flattened(preset)) for preset in _PRESETS
}
# A model with others is not the published one.
_SIZES = "num_layers", "model_dim", "ffn_dim"


def model_name(model: Mapping[str, Any]) -> str:
    """The name of a model in titles and messages: the hub id or last directory of its init_from, or else its preset,
    with "modified" if its layers differ from the published model in number or width.

    Args:
      model: the settings `preset` and `init_from`, among others: `vars(config.model)`, or a stored dictionary of it.
    """
    init_from = model.get("init_from", "")
    if not init_from:
        preset = model.get("preset", "")
        published = vars(PRESETS[preset]) if preset in PRESETS and preset != "tiny" else model
        is_modified = any(model.get(size) != published.get(size) for size in _SIZES)
        return f"{preset} (modified)" if is_modified else preset
    if is_model_id(init_from):
        return init_from
    path = PurePath(init_from)
    # a snapshot in the cache of the hub
    cached = [part for part in path.parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    is_checkpoint = path.parent.name == "checkpoints"
    return (
        f"{path.parent.parent.name} step {path.name}" if is_checkpoint else path.name or init_from
    )
