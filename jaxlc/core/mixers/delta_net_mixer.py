"""Gated DeltaNet: G key heads and H value heads with a recurrent state. Computed by `jaxlc.models.kinds.delta_net`.

Tensors: transformers, models/qwen3_5.
"""

from jaxlc.core.mixers.layer_shape import LayerShape, Matrix, MixerTensor

TENSORS = (
    *(MixerTensor(f"w{x}", "linear_attn.in_proj_qkv.weight", 1) for x in "qkv"),
    *(MixerTensor(f"w{x}", f"linear_attn.in_proj_{x}.weight", 1) for x in "zba"),
    *(MixerTensor(f"conv_{x}", "linear_attn.conv1d.weight", 1, is_convolution=True) for x in "qkv"),
    MixerTensor("log_decay", "linear_attn.A_log"),
    MixerTensor("decay_bias", "linear_attn.dt_bias"),
    MixerTensor("out_norm/scale", "linear_attn.norm.weight"),
    MixerTensor("wo", "linear_attn.out_proj.weight", 2),
)

# Of a sequence in the order of per-document sharding (`sharding.document_balance.Assignment.fragments`): a rank has
# two fragments of each. A chain adds two maps of states to what a rank sends, and groups of tokens that are partly
# empty. With 6 chains, 5 documents are on all ranks, and the ring cost is 1.09; with 4 chains it is 1.18, with 8 1.05,
# and in zigzag order 2.7 (mean of 60 sequences of 64K to 512K tokens, as in benchmarks/document_balance.py).
NUM_CHAINS = 6


def matrices(layer: LayerShape) -> dict[str, Matrix]:
    """wq and wk [D, G, K], wv and wz [D, H, V], wb and wa [D, H], wo [H, V, D]."""
    model = dict(model=layer.model_dim)
    key = dict(heads=layer.delta_key_heads, head_dim=layer.delta_key_dim)
    heads = dict(heads=layer.delta_value_heads)
    value = heads | dict(head_dim=layer.delta_value_dim)
    outputs = dict(wq=key, wk=key, wv=value, wz=value, wb=heads, wa=heads)
    return {name: Matrix(model, sizes) for name, sizes in outputs.items()} | dict(wo=Matrix(value, model))


def num_vector_entries(layer: LayerShape) -> int:
    """The convolutions, two gates of each value head, and the norm of the output."""
    keys, values = (layer.delta_key_heads * layer.delta_key_dim, layer.delta_value_heads * layer.delta_value_dim)
    return layer.delta_conv_taps * (2 * keys + values) + 2 * layer.delta_value_heads + layer.delta_value_dim


def state_flops(layer: LayerShape) -> int:
    """Three products of each value head with its state [K, V], which the delta rule reads and corrects, and the query
    reads. The chunked form computes more.
    """
    return 6 * layer.delta_value_heads * layer.delta_key_dim * layer.delta_value_dim
