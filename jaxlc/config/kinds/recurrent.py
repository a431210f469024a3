"""What the descriptions of recurrent layers have in common: bytes of what can be saved, and limits."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from jaxlc.config.kinds.contract import NUM_CHAINS, HasLimits, Layer, Mixer
from jaxlc.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class RecurrentWidths:
    """The sizes of a recurrence."""

    key_heads: int  # of queries and keys
    key_dim: int
    value_heads: int
    value_dim: int
    conv_taps: int
    gate: int  # width of the gate of the output

    @property
    def keys(self) -> int:
        """The width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.value_heads * self.value_dim


class RecurrentKind(Mixer, HasLimits):
    """A mixer with a state of each head."""

    section: str  # of its settings in the model
    head_sizes: tuple[str, str]  # its settings with the heads of keys and of values
    # delta_states: the state that enters each part of a sequence.
    saved = ("query", "key", "value", "delta_states", "attention_out", "attention_projected")

    @abstractmethod
    def recurrence(self, layer: Layer) -> RecurrentWidths:
        """The sizes of the recurrence of a layer."""

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        widths = self.recurrence(layer)
        named = dict(
            query=widths.keys + widths.gate,
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

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        mesh, taps = config.mesh, self.recurrence(layer).conv_taps
        if config.attention.shared_prefixes and config.memory.tile_tokens:
            yield (
                f"unsupported: config.attention.shared_prefixes=True with {self.layers} and"
                f" config.memory.tile_tokens={config.memory.tile_tokens}; use --config.memory.tile_tokens=0, or"
                " --config.attention.shared_prefixes=False, which repeats the prefixes"
            )
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
        heads = dict(zip(self.head_sizes, (widths.key_heads, widths.value_heads)))
        for name, number in heads.items():
            is_repeated = number == widths.key_heads and tensor % number == 0
            if number % tensor and not (is_repeated and widths.value_heads % tensor == 0):
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
