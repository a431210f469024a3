"""The feed-forward block of all tokens. `jaxlc.models.kinds.dense` has the computation."""

from collections.abc import Iterator

from jaxlc.config.kinds.contract import FeedForward, HasOwnSettings, Layer, LayerTensor, Matrix
from jaxlc.config.schema import RunConfig

_PROJECTIONS = ("gate", "up", "down")


class DenseKind(FeedForward, HasOwnSettings):
    name = "dense"
    layers = "dense layers"
    sizes = ("ffn_dim",)
    only_with = ("model.mlp_bias", "model.mlp_gate_multiplier", "model.mlp_output_multiplier")
    tensors = (
        *(LayerTensor(f"w_{x}", f"mlp.{x}_proj.weight", 1) for x in _PROJECTIONS),
        *(LayerTensor(f"b_{x}", f"mlp.{x}_proj.bias") for x in _PROJECTIONS),
    )
    projections = dict(mlp_gate="w_gate", mlp_up="w_up", mlp_down="w_down")
    saved = ("mlp_gate", "mlp_up")

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """w_gate and w_up [D, F], w_down [F, D]."""
        return ffn_matrices(layer, layer.ffn_dim)

    def num_vector_entries(self, layer: Layer) -> int:
        """Biases."""
        num_outputs = (matrix.num_outputs for matrix in self.matrices(layer).values())
        return layer.mlp_bias * sum(num_outputs)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        return saved_ffn_bytes(layer, itemsize * layer.ffn_dim)

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        if layer.activation == "clamped_swiglu":
            yield (
                "unsupported: config.model.activation='clamped_swiglu' in dense layers; use --config.model.activation="
                "silu, or experts in all layers"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        if layer.ffn_dim % config.mesh.tensor:
            yield f"config.{path}.ffn_dim={layer.ffn_dim} is not divisible by config.mesh.tensor={config.mesh.tensor}"

    def is_chosen(self, layer: Layer) -> bool:
        return True

    def active_ffn_dim(self, layer: Layer) -> int:
        return layer.ffn_dim


def is_gated(layer: Layer) -> bool:
    """Whether feed-forward blocks of a layer have a gate."""
    return layer.activation != "relu2"


def ffn_matrices(layer: Layer, width: int, input_dim: int = 0) -> dict[str, Matrix]:
    """The matrices of a block of this width, with inputs of `input_dim`; 0: of model_dim."""
    model = dict(model=input_dim or layer.model_dim)
    ffn = dict(ffn=width)
    gate = dict(w_gate=Matrix(model, ffn)) if is_gated(layer) else {}
    return gate | dict(w_up=Matrix(model, ffn), w_down=Matrix(ffn, model))


def saved_ffn_bytes(layer: Layer, num_bytes: int) -> dict[str, float]:
    """Bytes per token of the activations of a block that memory.save may name."""
    names = DenseKind.saved if is_gated(layer) else ("mlp_up",)
    return dict.fromkeys(names, float(num_bytes))
