"""Published models by name: the values of `config.model.preset`; and the name of a model.

Source: the `config.json` that the authors of each model publish with its weights. A test compares
the parameter count of each entry with the published one.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jaxlc.config.models.config_json import settings_of
from jaxlc.config.models.hub import is_model_id
from jaxlc.config.models.model_schema import ModelConfig, model_from

_LLAMA_3_1: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=128_256,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
)
_LLAMA_3_2: dict[str, Any] = {
    **_LLAMA_3_1,
    "rope_scaling": {**_LLAMA_3_1["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
_LLAMA_70B: dict[str, Any] = dict(
    num_hidden_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_key_value_heads=8,
    intermediate_size=28_672,
    **_LLAMA_3_1,
)
_QWEN2_5: dict[str, Any] = dict(
    model_type="qwen2", vocab_size=152_064, rms_norm_eps=1e-5, rope_theta=1_000_000.0
)
_QWEN3: dict[str, Any] = dict(  # the sizes that 4B and 8B share
    model_type="qwen3",
    vocab_size=151_936,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
)
_OLMO3: dict[str, Any] = dict(
    model_type="olmo3",
    vocab_size=100_278,
    rms_norm_eps=1e-6,
    rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192),
)

# The fields of config.json that differ from the defaults of transformers.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "tiny": dict(
        model_type="llama",
        vocab_size=512,
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    ),
    "llama3.2-1b": dict(
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        **_LLAMA_3_2,
    ),
    "llama3.2-3b": dict(
        num_hidden_layers=28,
        hidden_size=3072,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=8192,
        **_LLAMA_3_2,
    ),
    "llama3.1-8b": dict(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14_336,
        **_LLAMA_3_1,
    ),
    "llama3.1-70b": _LLAMA_70B,
    "llama3.3-70b": _LLAMA_70B,  # meta-llama/Llama-3.3-70B-Instruct
    "qwen2.5-7b": dict(  # Qwen/Qwen2.5-7B
        num_hidden_layers=28,
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18_944,
        **{**_QWEN2_5, "rms_norm_eps": 1e-6},
    ),
    "qwen2.5-14b": dict(  # Qwen/Qwen2.5-14B
        num_hidden_layers=48,
        hidden_size=5120,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=13_824,
        **_QWEN2_5,
    ),
    "qwen2.5-32b": dict(  # Qwen/Qwen2.5-32B
        num_hidden_layers=64,
        hidden_size=5120,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=27_648,
        **_QWEN2_5,
    ),
    "qwen2.5-72b": dict(  # Qwen/Qwen2.5-72B
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=29_568,
        **_QWEN2_5,
    ),
    "qwen3-4b": dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": dict(hidden_size=4096, intermediate_size=12_288, **_QWEN3),
    # Qwen/Qwen3-30B-A3B; also THUDM/slime, scripts/models/qwen3-30B-A3B.sh.
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe",
        vocab_size=151_936,
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        head_dim=128,
        intermediate_size=6144,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
    ),
    # openai/gpt-oss-20b: the model card of August 2025, and GptOssConfig in transformers 5.23, which
    # has the numbers of layers and experts of gpt-oss-120b.
    "gpt-oss-20b": dict(
        model_type="gpt_oss",
        vocab_size=201_088,
        num_hidden_layers=24,
        hidden_size=2880,
        num_attention_heads=64,
        intermediate_size=2880,
        num_local_experts=32,
    ),
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek-v2-lite": dict(
        model_type="deepseek_v2",
        vocab_size=102_400,
        num_hidden_layers=27,
        hidden_size=2048,
        num_attention_heads=16,
        intermediate_size=10_944,
        first_k_dense_replace=1,
        q_lora_rank=None,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        rope_scaling=dict(
            type="yarn",
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=0.707,
            mscale_all_dim=0.707,
        ),
    ),
    # zai-org/GLM-4.7-Flash: the defaults of Glm4MoeLiteConfig in transformers 5.23; the base of RoPE
    # is the one of GLM 4.5.
    "glm-4.7-flash": dict(
        model_type="glm4_moe_lite",
        vocab_size=154_880,
        num_hidden_layers=47,
        hidden_size=2048,
        num_attention_heads=20,
        intermediate_size=10_240,
        rope_theta=1_000_000.0,
    ),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B
    "nemotron-3-nano-30b-a3b": dict(
        model_type="nemotron_h",
        vocab_size=131_072,
        hidden_size=2688,
        num_attention_heads=32,
        num_key_value_heads=2,
        intermediate_size=1856,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    # moonshotai/Kimi-Linear-48B-A3B-Base: linear_attn_config of its config.json, and the defaults of
    # KimiLinearConfig in transformers 5.23.
    "kimi-linear-48b-a3b": dict(
        model_type="kimi_linear",
        vocab_size=163_840,
        num_hidden_layers=27,
        hidden_size=2304,
        num_attention_heads=32,
        intermediate_size=9216,
        linear_attn_config=dict(kda_layers=[i for i in range(1, 27) if i % 4]),
    ),
    # Qwen/Qwen3.5-9B, the text model: the defaults of Qwen3_5TextConfig in transformers 5.23; the
    # base of RoPE is from THUDM/slime, scripts/models.
    "qwen3.5-9b": dict(
        model_type="qwen3_5_text",
        vocab_size=248_320,
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=16,
        intermediate_size=12_288,
        rope_theta=10_000_000.0,
    ),
    # Qwen/Qwen3.5-35B-A3B, the text model: the defaults of Qwen3_5MoeTextConfig in transformers 5.23,
    # whose docstring names this model; the base of RoPE is from THUDM/slime,
    # scripts/models/qwen3.5-35B-A3B.sh.
    "qwen3.5-35b-a3b": dict(
        model_type="qwen3_5_moe_text",
        vocab_size=248_320,
        num_hidden_layers=40,
        hidden_size=2048,
        num_attention_heads=16,
        rope_theta=10_000_000.0,
    ),
    # allenai/Olmo-Hybrid-7B: the defaults of OlmoHybridConfig in transformers 5.23; without RoPE.
    "olmo-hybrid-7b": dict(
        model_type="olmo_hybrid",
        vocab_size=100_352,
        num_hidden_layers=32,
        hidden_size=3840,
        num_attention_heads=30,
        intermediate_size=11_008,
        rope_theta=None,
    ),
    "mistral-7b": dict(  # v0.3
        model_type="mistral",
        vocab_size=32_768,
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        intermediate_size=14_336,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        sliding_window=None,
    ),
    "gemma3-12b": dict(  # without the vision encoder
        model_type="gemma3_text",
        num_hidden_layers=48,
        hidden_size=3840,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=15_360,
        sliding_window=1024,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    "olmo3-7b": dict(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        intermediate_size=11_008,
        **_OLMO3,
    ),
    "olmo3-32b": dict(
        num_hidden_layers=64,
        hidden_size=5120,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=27_648,
        **_OLMO3,
    ),
}


PRESETS: dict[str, ModelConfig] = {
    name: model_from({"preset": name, **settings_of(fields, name)})
    for name, fields in _PUBLISHED.items()
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
