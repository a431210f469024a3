"""What the description of a kind of blocks provides, without JAX: settings, weights, costs, and
what it refuses.

A layer has a mixer, which mixes its tokens, and a feed-forward block. `jaxlc.config.kinds` has the
registry, `jaxlc.models.kinds` the computation. This module also has what the descriptions of
recurrent layers have in common: bytes of what can be saved, and limits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from jaxlc.config.schema import RunConfig

# Number of chains of a sequence, for mixers that pass states, in the order of per-document sharding
# (`sharding.document_balance`): a rank has two fragments of each. A chain adds two maps of states to what a rank
# sends, and groups of tokens that are partly empty. With 6 chains, 5 documents are on all ranks, and the ring cost is
# 1.09; with 4 chains it is 1.18, with 8 1.05, and in zigzag order 2.7 (mean of 60 sequences of 64K to 512K tokens, as
# in benchmarks/document_balance.py).
NUM_CHAINS = 6

SectionT = TypeVar("SectionT")

# `Block.projections` that most mixers have
PROJECTIONS = dict(query="wq", key="wk", value="wv", attention_projected="wo")


class Layer(Protocol):
    """The settings of one layer; `ModelConfig.layer_of` returns them."""

    @property
    def mixers(self) -> tuple[str, ...]: ...
    @property
    def feed_forward(self) -> str: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def rotated_dim(self) -> int: ...
    def section(self, part: type[SectionT]) -> SectionT:
        """The settings of a kind."""
        ...


class Matrix(NamedTuple):
    """A weight matrix: the names and sizes of its dimensions, those of the inputs first; or one for
    each expert.
    """

    inputs: dict[str, int]
    outputs: dict[str, int]
    num_experts: int = 1  # matrices with these dimensions
    experts_per_token: int = 1  # matrices that multiply a token

    @property
    def num_inputs(self) -> int:
        return math.prod(self.inputs.values())

    @property
    def num_outputs(self) -> int:
        return math.prod(self.outputs.values())

    @property
    def size(self) -> int:
        """Entries of the matrices of all experts."""
        return self.num_experts * self.num_inputs * self.num_outputs

    @property
    def active_size(self) -> int:
        """Entries that multiply a token."""
        return self.experts_per_token * self.num_inputs * self.num_outputs

    def low_rank_size(self, *, active: bool) -> int:
        """Entries of an adapter of rank 1 for each matrix; with `active`, of those that multiply a
        token.
        """
        return (self.experts_per_token if active else self.num_experts) * (
            self.num_inputs + self.num_outputs
        )


class LayerTensor(NamedTuple):
    """A parameter and its tensor in a Hugging Face checkpoint.

    The description of a block has the path of the parameter within the block, such as "wq", and the
    end of the tensor's name; `Family.tensors_of` returns both complete.

    `nn.Linear` stores [out, in]; our parameters are [in, out], with one dimension for heads and one
    for head_dim. So a linear weight is transposed, and reshaped to the dimensions of the parameter.
    If several parameters of a layer have the same tensor, they are its rows, one after the other,
    in the whole tensor or in each group of its rows (`Family.row_groups`).
    """

    # "layers/attention/wq"; parameters under layers/ are stacked over the layers
    param: str
    # "{layer}" stands for the index of a layer, and "{expert}" for the index of an expert: the parameter of a layer has
    # the tensors of all experts, and the next fields describe the tensor of one expert.
    name: str
    # Number of leading dimensions of the parameter, not counting layers, that are the inputs of an nn.Linear. 0:
    # a vector, such as a bias; stored with its dimensions flattened. None: stored with the dimensions of the parameter.
    num_inputs: int | None = 0
    # an nn.Conv1d of one input channel per group, which stores [out, 1, taps]
    is_convolution: bool = False
    # 0 or 1: the parameter is every second column of the tensor, from this one on. None: all
    # columns.
    interleaved: int | None = None
    # The tensor has a first dimension for the experts; the other fields describe the part of one.
    is_stacked: bool = False
    is_transposed: bool = False  # files have its last two dimensions exchanged
    is_float32: bool = False  # exports have it in float32, whatever the dtype of the other tensors
    # the tensor that files of other programs may have in place of this one: of another name or shape
    alias: "LayerTensor | None" = None


def conv_tensors(tensor: str, names: str = "qkv") -> Iterator[LayerTensor]:
    """The convolutions of recurrent layers; "{}" in `tensor` stands for the name of each."""
    for name in names:
        yield LayerTensor(f"conv_{name}", tensor.format(name), 1, is_convolution=True)


class MixingFlops(NamedTuple):
    """Model FLOPs of the forward pass of a mixer, besides products with weights."""

    per_pair: int = 0  # of a query and a key
    per_token: int = 0


class Block(ABC):
    """A part of a layer that is added to the residual stream.

    Paths of parameters are those within the block, such as "wq".
    """

    name: str  # in the registry
    layers: str  # what layers with the block are called in messages
    # Hugging Face tensors of the parameters, in the order of the computation
    tensors: tuple[LayerTensor, ...]
    # Names in lora.projections and precision.fp8_matmuls -> path of the matrix. A layer has those
    # of its matrices.
    projections: Mapping[str, str]
    # Checkpoint names of activations that memory.save and memory.offload may name, in the order of
    # the computation.
    saved: tuple[str, ...]
    sizes: tuple[str, ...]  # settings of model.kinds.NAME that the block reads

    @abstractmethod
    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """The weight matrices by their paths."""

    @abstractmethod
    def num_vector_entries(self, layer: Layer) -> int:
        """Entries of all other parameters: norms, biases, gates, convolutions."""

    @abstractmethod
    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        """Bytes per token of the activations in `saved`, over all devices that share a sequence.

        Args:
          itemsize: bytes of a value in the compute dtype.
        """

    @abstractmethod
    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        """Settings of the kind that are missing, or contradict each other.

        Args:
          path: of the settings of the layer: model, or model.kinds.NAME.
        """

    @abstractmethod
    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        """Sizes that the mesh, or the strategy of attention, does not divide."""


class HasLimits(ABC):
    """A block whose layers do not support all settings of other sections."""

    @abstractmethod
    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        """Settings of other sections that layers with the block do not support."""


class HasOwnSettings(ABC):
    """A block with settings that have no effect in models without it."""

    only_with: tuple[str, ...]


class Mixer(Block):
    """Mixes the tokens of a layer."""

    # entries of layer_kinds -> entries of "layer_types" in config.json
    layer_types: Mapping[str, str]
    layer_kinds: tuple[str, ...]  # names that model.layer_kinds may have for layers with this mixer
    # The setting of the model with the norm_placement of these layers; if it is empty,
    # model.norm_placement.
    norm_setting = "norm_placement"

    @abstractmethod
    def mixing_flops(self, layer: Layer) -> MixingFlops:
        """FLOPs of a pair of tokens, or of a token."""

    @abstractmethod
    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        """Reasons why layers cannot run in tiles of memory.tile_tokens."""


class HasRope(ABC):
    """A mixer with position embeddings."""

    scaled_kinds: tuple[str, ...]  # its layer_kinds that model.rope.scaling applies to
    unrotated_kinds: tuple[str, ...]  # its layer_kinds without position embeddings


class FeedForward(Block):
    """Computes each token of a layer by itself."""

    @abstractmethod
    def is_chosen(self, layer: Layer) -> bool:
        """Whether layers whose kind names no feed_forward have the block. The kind that was
        registered last decides first."""

    @abstractmethod
    def active_ffn_dim(self, layer: Layer) -> int:
        """The width of the block of a token."""


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

    @property
    def conv_entries(self) -> int:
        """Entries of the convolutions."""
        return (self.conv_taps + self.conv_bias) * (2 * self.keys + self.values)


class RecurrentKind(Mixer, HasLimits, HasOwnSettings):
    """A mixer with a state of each head."""

    section: str  # of its settings in the model
    settings: type  # the class of the section
    widths: Mapping[str, str]  # fields of `RecurrentWidths` -> settings of the section
    published: Mapping[str, int]  # the required sizes, with the values of a published model
    published_model: str
    products_per_token: int  # of a head with its state [K, V]
    has_kernel = False  # runtime.delta_kernel=pallas applies to it
    # delta_states: the state that enters each part of a sequence.
    saved = ("query", "key", "value", "delta_states", "attention_out", "attention_projected")

    def __init__(self):
        self.layers = f"{self.name} layers"
        self.layer_kinds = (self.name,)
        self.sizes = tuple(f"{self.section}.{name}" for name in self.published)
        self.only_with = tuple(f"model.{self.section}.{name}" for name in vars(self.settings()))

    def recurrence(self, layer: Layer) -> RecurrentWidths:
        """The sizes of the recurrence of a layer."""
        sizes = vars(layer.section(self.settings))
        return RecurrentWidths(**{field: sizes[name] for field, name in self.widths.items()})

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """Those of `tensors`: wq and wk [D, G, K], wv and wz [D, H, V], wb and wa [D, H], wo [H, V, D];
        and of low rank wf_down and wz_down [D, V], wf_up and wz_up [V, H, V].
        """
        widths = self.recurrence(layer)
        model = dict(model=layer.model_dim)
        key = dict(heads=widths.key_heads, head_dim=widths.key_dim)
        heads = dict(heads=widths.value_heads)
        value = heads | dict(head_dim=widths.value_dim)
        down = dict(latent=widths.value_dim)
        up = Matrix(dict(sharded_latent=widths.value_dim), value)
        outputs = dict(wq=key, wk=key, wv=value, wz=value, wb=heads, wa=heads)
        outputs |= dict(wf_down=down, wz_down=down)
        known = {name: Matrix(model, dims) for name, dims in outputs.items()}
        known |= dict(wf_up=up, wz_up=up, wo=Matrix(value, model))
        return {x.param: known[x.param] for x in self.tensors if x.param in known}

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
        sizes = vars(layer.section(self.settings))
        stem = f"config.model.{self.section}"
        missing = [f"--{stem}.{x}={size}" for x, size in self.published.items() if sizes[x] < 1]
        if missing:
            yield (
                f"config.model.layer_kinds has {self.layers}, whose sizes are not set; use a model.preset or"
                f" model.init_from that has such layers, or the sizes of {self.published_model}: {' '.join(missing)}"
            )
            return
        key_heads = self.widths["key_heads"]
        value_heads = self.widths["value_heads"]
        keys = sizes[key_heads]
        values = sizes[value_heads]
        if values % keys:
            yield (
                f"{stem}.{value_heads}={values} is not a multiple of {key_heads}={keys}: each serves the same number of"
                f" heads; use --{stem}.{value_heads}={-(-values // keys) * keys}"
            )

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        mesh = config.mesh
        taps = self.recurrence(layer).conv_taps
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
        widths = self.recurrence(layer)
        tensor = config.mesh.tensor
        splits_values = widths.value_heads % tensor == 0
        splits_keys = widths.key_heads % tensor == 0 or (
            splits_values and tensor % widths.key_heads == 0
        )
        for field, is_split in dict(key_heads=splits_keys, value_heads=splits_values).items():
            if not is_split:
                name = self.widths[field]
                number = vars(widths)[field]
                yield f"config.model.{self.section}.{name}={number} is not divisible by config.mesh.tensor={tensor}"

    def tile_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        mesh = config.mesh
        tile_tokens = config.memory.tile_tokens
        shortest = 2 * (self.recurrence(layer).conv_taps - 1)
        if tile_tokens < shortest:
            per_device = config.data.seq_len // mesh.context
            pieces = 2 * mesh.tensor
            lengths = range(pieces, per_device, pieces)
            longer = next(
                (size for size in lengths if size >= shortest and per_device % size == 0), 0
            )
            yield (
                f"config.memory.tile_tokens={tile_tokens} is shorter than {shortest}, which the convolutions of"
                f" {self.layers} need to reach only the neighboring parts of tiles; use"
                f" --config.memory.tile_tokens={longer}"
            )
