import dataclasses

import pytest

from benchmarks.causal_work import full_pairs
from jaxlc.config import PRESETS, LoraConfig
from jaxlc.config.flops import document_pairs, num_params, product_entries, step_flops
from jaxlc.config.kinds.attention import AttentionSettings
from jaxlc.config.models.model_schema import KindConfig, model_from
from jaxlc.config.schema import TrainConfig

# The counts that Hugging Face reports for the published weights (`safetensors.total` of the model
# API).
PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    # of Qwen3_5ForCausalLM in transformers 5.23: the published weights also have vision
    "qwen3.5-9b": 8_953_803_264,
    "deepseek-v2-lite": 15_706_484_224,  # of DeepseekV2ForCausalLM in transformers 5.23
    "glm-4.7-flash": 29_943_393_920,  # of Glm4MoeLiteForCausalLM in transformers 5.23, and biases of the choice
    "nemotron-3-nano-30b-a3b": 31_577_940_288,  # of NemotronHForCausalLM in transformers 5.23, and these biases
    "kimi-linear-48b-a3b": 49_122_681_728,  # of KimiLinearForCausalLM in transformers 5.23, and these biases
    "qwen3.5-35b-a3b": 34_660_610_688,  # of Qwen3_5MoeForCausalLM in transformers 5.23
    "olmo-hybrid-7b": 7_430_870_688,  # of OlmoHybridForCausalLM in transformers 5.23
    "mistral-7b": 7_248_023_552,
    "gemma3-12b": 11_766_034_176,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
}


def training_flops(model, num_sequences: int, seq_len: int, attention: str) -> float:
    """Model FLOPs of a step that trains all parameters."""
    pairs = full_pairs(model, seq_len) if attention == "full" else document_pairs(model, [seq_len])
    num_tokens, num_pairs = num_sequences * seq_len, num_sequences * pairs
    return step_flops(
        model, LoraConfig(), TrainConfig(), num_tokens=num_tokens, num_pairs=num_pairs
    ).total


def num_matmul_params(model):
    """Entries of the weight matrices in products: the layers and the output head."""
    return product_entries(model, LoraConfig(), TrainConfig()).forward


@pytest.mark.parametrize("name", PUBLISHED)
def test_num_params_of_presets_equals_published(name):
    assert PUBLISHED.keys() == PRESETS.keys() - {"tiny"}
    assert num_params(PRESETS[name]) == PUBLISHED[name]


def test_training_flops_of_small_model_equals_manual_count():
    model = dataclasses.replace(
        PRESETS["tiny"],
        **dict(vocab_size=7, num_layers=1, model_dim=4, ffn_dim=5),
        attention=AttentionSettings(num_heads=2, num_kv_heads=1, head_dim=2),
    )
    matmul_params = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 5 + 4 * 7  # q k v o, feed-forward, head
    assert num_matmul_params(model) == matmul_params
    # forward and twice that backward; q.k and value; 2 heads of 2
    per_pair = 3 * (2 * 2 + 2 * 2) * 2
    full = training_flops(model, num_sequences=3, seq_len=5, attention="full")
    causal = training_flops(model, num_sequences=3, seq_len=5, attention="causal")
    assert full == 3 * (6 * matmul_params * 5 + per_pair * 25)
    assert causal == 3 * (6 * matmul_params * 5 + per_pair * (5 + 4 + 3 + 2 + 1))


def test_training_flops_at_1m_tokens_with_remat_is_1_36e18():
    """With rematerialization, 3 matrix products become 4. Attention's 6 products per pair (2
    forward, 4 backward) become 9: 2 forward, 2 for the recomputed layer, and 5 in the flash
    backward, which recomputes q . k."""
    model, tokens = PRESETS["llama3.1-8b"], 2**20
    matmul_flops = 6 * num_matmul_params(model) * tokens
    attention_flops = (
        training_flops(model, num_sequences=1, seq_len=tokens, attention="causal") - matmul_flops
    )
    assert matmul_flops * 4 / 3 + attention_flops * 9 / 6 == pytest.approx(1.36e18, rel=1e-3)


def test_training_flops_of_sliding_layers_count_pairs_in_window():
    kinds = dict(num_layers=5, layer_kinds=("sliding", "full", "nope"))
    model = model_from(PRESETS["tiny"].by_path | kinds | {"attention.window": 3})
    counts = {
        attention: training_flops(model, num_sequences=1, seq_len=10, attention=attention)
        - 6 * num_matmul_params(model) * 10
        for attention in ("causal", "full")
    }
    in_window = sum(min(query + 1, 3) for query in range(10))  # layers 0 and 3 are sliding
    per_pair = 12 * model.attention.num_heads * model.attention.head_dim
    assert counts == {
        "causal": per_pair * (2 * in_window + 3 * 55),
        "full": per_pair * (2 * 30 + 3 * 100),
    }
    wide = KindConfig(name="full", head_dim=2 * model.attention.head_dim)  # layers 1 and 4
    model = dataclasses.replace(model, kinds=(wide,))
    matmuls = 6 * num_matmul_params(model) * 10
    assert training_flops(
        model, num_sequences=1, seq_len=10, attention="causal"
    ) - matmuls == per_pair * (2 * in_window + (2 * 2 + 1) * 55)
