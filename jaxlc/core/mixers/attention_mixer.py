"""Softmax attention: N query heads share K key/value heads. `jaxlc.models.layers` has the computation."""

from jaxlc.core.mixers.layer_shape import LayerShape, Matrix, MixerTensor

TENSORS = (
    *(MixerTensor(f"w{x}", f"self_attn.{x}_proj.weight", 1) for x in "qkv"),
    *(MixerTensor(f"b{x}", f"self_attn.{x}_proj.bias") for x in "qkvo"),
    *(MixerTensor(f"{x}_norm/scale", f"self_attn.{x}_norm.weight") for x in "qk"),
    MixerTensor("sinks", "self_attn.sinks"),
    MixerTensor("wo", "self_attn.o_proj.weight", 2),
)


def matrices(layer: LayerShape) -> dict[str, Matrix]:
    """wq [D, N, H], or [D, N, 2H] with a gate: first q, then the gate; wk and wv [D, K, H]; wo [N, H, D]."""
    model = dict(model=layer.model_dim)
    key_value = dict(kv_heads=layer.num_kv_heads, head_dim=layer.head_dim)
    return dict(
        wq=Matrix(model, dict(heads=layer.num_heads, head_dim=layer.query_dim)),
        wk=Matrix(model, key_value),
        wv=Matrix(model, key_value),
        wo=Matrix(dict(heads=layer.num_heads, head_dim=layer.head_dim), model),
    )


def num_vector_entries(layer: LayerShape) -> int:
    """Norms of queries and keys, biases and sinks."""
    num_normed_heads = {"none": 0, "head": 2, "projection": layer.num_heads + layer.num_kv_heads}[layer.qk_norm]
    entries = num_normed_heads * layer.head_dim + layer.attention_out_bias * layer.model_dim
    if layer.qkv_bias:
        entries += layer.num_heads * layer.query_dim + 2 * layer.num_kv_heads * layer.head_dim
    return entries + layer.attention_sinks * layer.num_heads


def state_flops(layer: LayerShape) -> int:
    """None: `jaxlc.core.flops` counts the pairs of queries and keys."""
    del layer
    return 0
