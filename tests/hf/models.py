"""Tiny models of every family as Hugging Face directories, written with the package `safetensors`.

Weights are large enough that logits have a standard deviation above 1 and that every part of the model has an effect.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # larger than hidden_size / num_attention_heads
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    attention_dropout=0.0,
    initializer_range=0.02,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=True,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LLAMA = dict(SMALL, model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, mlp_bias=False)
# Name -> config.json. Both forms of RoPE, tied and untied.
CASES: dict[str, dict] = {
    "llama": dict(
        LLAMA,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        rope_scaling=LLAMA3_ROPE,
        torch_dtype="bfloat16",
        pretraining_tp=1,
    ),
    "llama_tied": dict(
        LLAMA,
        tie_word_embeddings=True,
        rope_parameters=dict(LLAMA3_ROPE, rope_theta=20000.0),
        dtype="bfloat16",
        head_dim=None,
    ),
    "mistral": dict(
        SMALL,
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        tie_word_embeddings=False,
        rope_theta=30000.0,
        sliding_window=None,
        torch_dtype="bfloat16",
    ),
    "qwen3": dict(
        SMALL,
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=40000.0),
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=28,
        layer_types=["full_attention"] * 3,
        dtype="bfloat16",
    ),
}


def tensors_of(config: dict, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes of transformers."""
    rng = np.random.default_rng(0)
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    H = config["head_dim"] or D // N
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
            "self_attn.q_proj": (N * H, D),
            "self_attn.k_proj": (K * H, D),
            "self_attn.v_proj": (K * H, D),
            "self_attn.o_proj": (D, N * H),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }
        if config["model_type"] == "qwen3":
            of_layer |= {"self_attn.q_norm": (H,), "self_attn.k_norm": (H,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return {name: _draw(rng, shape).astype(dtype) for name, shape in shapes.items()}


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return rng.uniform(0.5, 2, shape)
    return rng.standard_normal(shape) * 1.5 / shape[1] ** 0.5


def write_model(directory: Path, case: str, *, num_files: int = 2, dtype=ml_dtypes.bfloat16, **changes) -> Path:
    """Writes config.json, the tensors and a tokenizer.

    Args:
      changes: fields of config.json; the tensors have the shapes of the unchanged config.
    """
    directory.mkdir(parents=True)
    config = CASES[case]
    (directory / "config.json").write_text(json.dumps(config | changes, indent=2) + "\n")
    write_tensors(directory, tensors_of(config, dtype), num_files=num_files)
    write_tokenizer(directory, config["vocab_size"] - 1)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (directory / "chat_template.jinja").write_text("{{ messages }}  \n")
    return directory


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], *, num_files: int) -> None:
    names = sorted(tensors)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    file_of = {name: f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(file_of.values())):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, directory / file, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer with one token per letter or digit, `</s>` and <unk>, and `vocab_size` tokens."""
    words = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    words += [f"word{i}" for i in range(vocab_size - len(words))]
    special = [
        dict(id=i, content=words[i], single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for i in range(3)
    ]
    content = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=special,
        normalizer=None,
        pre_tokenizer=dict(type="Split", pattern=dict(String=""), behavior="Isolated", invert=False),
        post_processor=None,
        decoder=None,
        model=dict(type="WordLevel", vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>"),
    )
    (directory / "tokenizer.json").write_text(json.dumps(content))
