"""What the description of a kind of blocks provides, without JAX: settings, weights, costs, and
what it refuses.

A layer has a mixer, which mixes its tokens, and a feed-forward block. `jaxlc.config.kinds` has the
registry, `jaxlc.models.kinds` the computation.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

from jaxlc.config.schema import RunConfig

# Number of chains of a sequence, for mixers that pass states, in the order of per-document sharding
# (`sharding.document_assignment`): a rank has two fragments of each. A chain adds two maps of states to what a rank
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
    """A parameter of a block, and the end of the name of its Hugging Face tensor.

    Parameters with the same tensor are consecutive rows of it.
    """

    param: str
    tensor: str
    num_inputs: int | None = 0  # this and the next as in `jaxlc.config.models.families.Tensor`
    is_convolution: bool = False
    interleaved: int | None = None
    is_stacked: bool = False
    is_transposed: bool = False
    is_float32: bool = False


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


class Absent(FeedForward):
    """The description of a block that layers do not have: they have no norms of it either."""

    name, layers = "none", "layers without a feed-forward block"
    tensors = saved = sizes = ()
    projections: Mapping[str, str] = {}

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        return {}

    def num_vector_entries(self, layer: Layer) -> int:
        return 0

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        return {}

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        if not layer.mixers:
            yield (
                f"config.{path} has attention='none' and feed_forward='none', so its layers compute nothing; set one"
            )

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        yield from ()

    def is_chosen(self, layer: Layer) -> bool:
        return False

    def active_ffn_dim(self, layer: Layer) -> int:
        return 0
