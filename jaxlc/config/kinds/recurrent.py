"""What the descriptions of recurrent layers have in common: bytes of what can be saved, and limits."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxlc.config.kinds.contract import (
    NUM_CHAINS,
    HasLimits,
    HasOwnSettings,
    Layer,
    Mixer,
    MixingFlops,
)
from jaxlc.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class RecurrentWidths:
    """The sizes of a recurrence."""

    key_heads: int  # of queries and keys
    key_dim: int
    value_heads: int
    value_dim: int
    conv_taps: int
    conv_bias: bool = False  # the convolutions have biases

    @property
    def keys(self) -> int:
        """The width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.value_heads * self.value_dim


class RecurrentKind(Mixer, HasLimits, HasOwnSettings):
    """A mixer with a state of each head."""

    section: str  # of its settings in the model
    settings: type  # the class of the section
    head_sizes: tuple[str, str]  # its settings with the heads of keys and of values
    published: Mapping[str, int]  # the sizes that have to be set, with those of a published model
    published_model: str
    products_per_token: int  # of a head with its state [K, V]
    # delta_states: the state that enters each part of a sequence.
    saved = ("query", "key", "value", "delta_states", "attention_out", "attention_projected")

    def __init__(self):
        self.layers, self.layer_kinds = f"{self.name} layers", (self.name,)
        self.sizes = tuple(f"{self.section}.{name}" for name in self.published)
        self.only_with = tuple(f"model.{self.section}.{name}" for name in vars(self.settings()))

    @abstractmethod
    def recurrence(self, layer: Layer) -> RecurrentWidths:
        """The sizes of the recurrence of a layer."""

    def mixing_flops(self, layer: Layer) -> MixingFlops:
        """Products with the states. The chunked form computes more."""
        widths = self.recurrence(layer)
        return MixingFlops(per_token=2 * self.products_per_token * widths.values * widths.key_dim)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        widths = self.recurrence(layer)
        named = dict(
            query=widths.keys + widths.values,  # and the gate of the output
            key=widths.keys,
            value=widths.values,
            attention_out=widths.values,
            attention_projected=layer.model_dim,
        )
        may_have_chains = config.attention.document_sharding and not config.memory.tile_tokens
        # see step/batch.py
        fragments = 2 * (NUM_CHAINS if may_have_chains else 1) * config.mesh.context
        states = 4 * fragments * widths.values * widths.key_dim  # float32
        saved = {name: float(itemsize * width) for name, width in named.items()}
        return saved | dict(delta_states=states / config.data.seq_len)

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        sizes, stem = vars(layer.section(self.settings)), f"config.model.{self.section}"
        missing = [f"--{stem}.{x}={size}" for x, size in self.published.items() if sizes[x] < 1]
        if missing:
            yield (
                f"config.model.layer_kinds has {self.layers}, whose sizes are not set; use a model.preset or"
                f" model.init_from that has such layers, or the sizes of {self.published_model}: {' '.join(missing)}"
            )
            return
        of_keys, of_values = self.head_sizes
        keys, values = sizes[of_keys], sizes[of_values]
        if values % keys:
            yield (
                f"{stem}.{of_values}={values} is not a multiple of {of_keys}={keys}: each serves the same number of"
                f" heads; use --{stem}.{of_values}={-(-values // keys) * keys}"
            )

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        mesh, taps = config.mesh, self.recurrence(layer).conv_taps
        if config.memory.parameters == "host":
            yield (
                f"unsupported: config.memory.parameters='host' with {self.layers}, since kernels would read"
                " their weights in host memory; use --config.memory.parameters=device"
            )
        if config.posttrain.uses_reference_model:
            yield (
                f"unsupported: config.posttrain.reference='model' with {self.layers}, since kernels would read"
                " their weights in host memory; use --config.posttrain.reference=record"
            )
        fragment_tokens = config.data.seq_len // (2 * mesh.context)
        if fragment_tokens < taps - 1:
            yield (
                f"the convolutions of {self.layers} read config.model.{self.section}.conv_taps={taps} tokens, and"
                f" the parts of a sequence have {fragment_tokens} (data.seq_len / (2 x mesh.context)); use"
                f" --config.data.seq_len={2 * mesh.context * mesh.tensor * (taps - 1)} or more, or fewer context ranks"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        """Heads of keys may be fewer than tensor ranks, which then repeat them."""
        widths, tensor = self.recurrence(layer), config.mesh.tensor
        splits_values = widths.value_heads % tensor == 0
        splits_keys = widths.key_heads % tensor == 0 or (
            splits_values and tensor % widths.key_heads == 0
        )
        heads = (widths.key_heads, splits_keys), (widths.value_heads, splits_values)
        for name, (number, is_split) in zip(self.head_sizes, heads):
            if not is_split:
                yield f"config.model.{self.section}.{name}={number} is not divisible by config.mesh.tensor={tensor}"

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        mesh, tile_tokens = config.mesh, config.memory.tile_tokens
        shortest = 2 * (self.recurrence(layer).conv_taps - 1)
        if tile_tokens < shortest:
            per_device, pieces = config.data.seq_len // mesh.context, 2 * mesh.tensor
            lengths = range(pieces, per_device, pieces)
            longer = next(
                (size for size in lengths if size >= shortest and per_device % size == 0), 0
            )
            yield (
                f"config.memory.tile_tokens={tile_tokens} is shorter than {shortest}, which the convolutions of"
                f" {self.layers} need to reach only the neighboring parts of tiles; use"
                f" --config.memory.tile_tokens={longer}"
            )
