"""Qwen 3 with experts; some layers may be dense (transformers: models/qwen3_moe)."""

from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.models.families.family import Family, Fields
from jaxlc.config.models.model_schema import ModelConfig


def _read_kinds(config: Fields) -> list[str]:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it."""
    step, dense_layers = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return ["dense" if layer in dense_layers or (layer + 1) % step else "full" for layer in layers]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    dense_layers = [layer for layer, kind in enumerate(model.kinds_of_layers) if kind == "dense"]
    return dict(decoder_sparse_step=1, mlp_only_layers=dense_layers)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer_kinds=(frozenset({"full"}), frozenset({"full", "dense"})),
    read_kinds=_read_kinds,
    write_kinds=_write_kinds,
    settings=dict(qk_norm="head"),
    fields={
        "attention_bias": "qkv_bias",
        "num_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "moe_intermediate_size": "experts.ffn_dim",
        "norm_topk_prob": "experts.renormalize",
    },
    field_aliases={"num_local_experts": "num_experts"},
    defaults=dict(
        num_key_value_heads=4,
        attention_bias=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
    ),
    required_values=dict(use_sliding_window=(False,), use_qk_norm=(True,)),
    irrelevant=frozenset(
        {
            *("max_window_layers", "sliding_window"),  # without effect: use_sliding_window is false
            *("decoder_sparse_step", "mlp_only_layers"),  # `_read_kinds` reads them
            *("router_aux_loss_coef", "output_router_logits"),  # train.balance_loss has its own value
        }
    ),
    feed_forward_tensors=dict(experts=experts.TENSORS),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
    kinds=dict(dense=dict(feed_forward="dense")),
)
