"""The gated feed-forward block of all tokens. `jaxlc.models.layers` has the computation."""

from jaxlc.core.mixers.layer_shape import LayerShape, Matrix, MixerTensor

TENSORS = (
    MixerTensor("w_gate", "mlp.gate_proj.weight", 1),
    MixerTensor("w_up", "mlp.up_proj.weight", 1),
    MixerTensor("w_down", "mlp.down_proj.weight", 1),
)


def matrices(layer: LayerShape) -> dict[str, Matrix]:
    """w_gate and w_up [D, F], w_down [F, D]."""
    model, ffn = dict(model=layer.model_dim), dict(ffn=layer.ffn_dim)
    return dict(w_gate=Matrix(model, ffn), w_up=Matrix(model, ffn), w_down=Matrix(ffn, model))


def num_vector_entries(layer: LayerShape) -> int:
    """None: the block has no biases."""
    del layer
    return 0
