"""The description of `tests.toy_kind.model`, without JAX."""

from collections.abc import Iterator

from jaxlc.config.kinds.attention import AttentionSettings
from jaxlc.config.kinds.contract import HasLimits, Layer, LayerTensor, Matrix, Mixer, MixingFlops
from jaxlc.config.schema import RunConfig


class DecayedMeanKind(Mixer, HasLimits):
    """A decayed causal mean in each head."""

    name = "decayed_mean"
    layers = "decayed_mean layers"
    layer_types = dict(decayed_mean="decayed_mean")
    layer_kinds = ("decayed_mean",)
    norm_setting = "norm_placement"
    sizes = ("attention.num_heads", "attention.head_dim")
    tensors = (
        LayerTensor("wv", "mean.in_proj.weight", 1),  # stored as [H V, D]
        LayerTensor("decay", "mean.decay"),
        LayerTensor("wo", "mean.out_proj.weight", 2),
    )
    projections = dict(value="wv", attention_projected="wo")
    saved = ("mean_values", "delta_states", "attention_out", "attention_projected")

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        sizes, model = layer.section(AttentionSettings), dict(model=layer.model_dim)
        heads = dict(heads=sizes.num_heads, head_dim=sizes.head_dim)
        return dict(wv=Matrix(model, heads), wo=Matrix(heads, model))

    def num_vector_entries(self, layer: Layer) -> int:
        return layer.section(AttentionSettings).num_heads

    def mixing_flops(self, layer: Layer) -> MixingFlops:
        sizes = layer.section(AttentionSettings)
        return MixingFlops(per_token=4 * sizes.num_heads * sizes.head_dim)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        sizes = layer.section(AttentionSettings)
        values = float(itemsize * sizes.num_heads * sizes.head_dim)
        states = (
            4.0 * 2 * config.mesh.context * sizes.num_heads * sizes.head_dim / config.data.seq_len
        )
        projected = float(itemsize * layer.model_dim)
        return dict(
            mean_values=values,
            attention_out=values,
            delta_states=states,
            attention_projected=projected,
        )

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        yield from ()

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        if config.attention.shared_prefixes:
            yield (
                "unsupported: config.attention.shared_prefixes=True with decayed_mean layers, whose states pass on to"
                " every later document; use --config.attention.shared_prefixes=False"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        num_heads = layer.section(AttentionSettings).num_heads
        if num_heads % config.mesh.tensor:
            yield f"config.{path}.num_heads={num_heads} is not divisible by config.mesh.tensor={config.mesh.tensor}"

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        yield from ()
