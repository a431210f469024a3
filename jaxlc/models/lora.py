"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): x w + scale (x a) b, with trained a
and b and a frozen w. The scale is alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023,
arXiv:2312.03732).

    projection            a                   b
    query                 [D, R]              [R, N, H]      2H with an output gate
    attention_gate        [D, R]              [R, N, H]
    key, value            [D, R]              [R, K, H]
    attention_projected   [N, H, R]           [R, D]
    mlp_gate, mlp_up      [D, R]              [R, F]      of dense layers and of shared experts
    mlp_down              [F, R]              [R, D]
    delta_gate            [D, R]              [R, H, V]
    delta_step, _decay    [D, R]              [R, H]
    decay_down, gate_down [D, R]              [R, K]      low-rank gates of recurrent layers
    decay_up, gate_up     [K, R]              [R, H, K]
    latent_down           [D, R]              [R, L]      of the latent of experts
    latent_up             [L, R]              [R, D]
    expert_gate, _up      [E, D, R]           [E, R, F]      one for each expert
    expert_down           [E, F, R]           [E, R, D]

The blocks of experts apply theirs (`kinds.experts`).

Names: layers/attention/lora/query/a. Storage follows `sharding.rules`: the dimension D of a matrix
is sharded over fsdp and context; in a matrix without it, R is.

The parameter tree in two parts, trainable and frozen. Both are nested dictionaries with the same
names.

config.train.trainable and config.train.frozen select parameters by name.
"""

import fnmatch
import functools
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from jaxlc.config import Config, LoraConfig, ModelConfig, to_dict
from jaxlc.config.flops import is_trained
from jaxlc.config.kinds import layer_matrices, projection_paths
from jaxlc.config.kinds.contract import Matrix
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.values import flattened, invalid_value
from jaxlc.core import UserError, is_layers, scopes
from jaxlc.core.axes import LAYERS
from jaxlc.models.matmuls import dims_of_product, in_use, product
from jaxlc.sharding.rules import Sharder

LORA = "lora"  # entry of the adapters of a block in the parameter tree


class Adapter(nnx.Module):
    """The adapter of one projection, or those of all experts. Initially b is 0, and a uniform
    between +-1/sqrt(inputs), as in peft."""

    def __init__(
        self,
        lora: LoraConfig,
        projection: Matrix,
        next_key: Callable[[], jax.Array],
        *,
        per_expert: bool = False,
    ):
        inputs = projection.inputs
        outputs = projection.outputs
        experts = dict(experts=projection.num_experts) if per_expert else {}
        rank_a, rank_b = ({_rank_name(names): lora.rank} for names in (inputs, outputs))
        dims_a = experts | inputs | rank_a
        dims_b = experts | rank_b | outputs
        bound = projection.num_inputs**-0.5
        a = jax.random.uniform(next_key(), tuple(dims_a.values()), minval=-bound, maxval=bound)
        self.a = nnx.Param(a, dims=tuple(dims_a))
        self.b = nnx.Param(jnp.zeros(tuple(dims_b.values())), dims=tuple(dims_b))
        self.scale = lora.scale

    def __call__(self, subscripts: str, x: jax.Array, *, shard: Sharder) -> jax.Array:
        """scale (x a) b, in the dtype of x, of a projection that is not one of experts;
        `subscripts` are those of its product."""
        x_dims, w_dims, out_dims = dims_of_product(subscripts)
        token_dims = x_dims[:2]
        to_rank = functools.partial(product, f"{x_dims},{x_dims[2:]}R->{token_dims}R")
        x_BTR = shard.product(to_rank, x, in_use(self.a, shard, x.dtype), self.a.dims)
        # the sum over tensor, scattered along the sequence as the output
        if "model" in self.b.dims:
            x_BTR = shard.residual(x_BTR)
        x_BTR = (self.scale * x_BTR.astype(jnp.float32)).astype(x.dtype)
        from_rank = functools.partial(
            product, f"{token_dims}R,R{w_dims[len(x_dims) - 2 :]}->{out_dims}"
        )
        return shard.product(from_rank, x_BTR, in_use(self.b, shard, x.dtype), self.b.dims)


def _rank_name(names: Collection[str]) -> str:
    """The name of R of a matrix whose other dimensions have these names."""
    is_sharded = not {"model", "sharded_latent"}.isdisjoint(names)
    return "rank" if is_sharded else "sharded_rank"


class Adapters(nnx.Module):
    """The adapters of a block, by the names of the projections."""

    def __init__(
        self,
        model: ModelConfig,
        lora: LoraConfig,
        names: Sequence[str],
        next_key: Callable[[], jax.Array],
    ):
        self.names = tuple(names)
        self.scale = lora.scale
        matrices = layer_matrices(model)
        paths = projection_paths()
        for name in names:
            projection = next(matrices[path] for path in paths[name] if path in matrices)
            per_expert = name in EXPERT_PROJECTIONS
            setattr(self, name, Adapter(lora, projection, next_key, per_expert=per_expert))

    def of(self, name: str) -> Adapter:
        """The adapter of a projection in `names`."""
        return getattr(self, name)

    @jax.named_scope(scopes.LORA)
    def add(
        self, name: str, subscripts: str, out: jax.Array, x: jax.Array, *, shard: Sharder
    ) -> jax.Array:
        """`out`, the product of a projection, plus the output of its adapter if it has one."""
        return out + self.of(name)(subscripts, x, shard=shard) if name in self.names else out


def make_adapters(
    model: ModelConfig,
    lora: LoraConfig | None,
    projections: Sequence[str],
    next_key: Callable[[], jax.Array],
) -> Adapters | None:
    """The adapters of a block with these projections; None if it has none."""
    names = (
        [name for name in projections if name in lora.projections]
        if lora is not None and lora.rank
        else []
    )
    return Adapters(model, lora, names, next_key) if names else None


def is_adapter(path: str) -> bool:
    """Whether the parameter with this path, such as layers/attention/lora/query/a, is a matrix of
    an adapter.
    """
    return LORA in path.split("/")


def frozen_names(config: Config, names: Sequence[str]) -> frozenset[str]:
    """The names of the frozen parameters.

    Args:
      names: those of all parameters, as `models.lora.names_of` returns them.
    Raises:
      UserError: a pattern matches no parameter, nothing is trained, or a projection with an adapter is trained itself.
    """
    lora = config.lora
    train = config.train
    own_names = [name for name in names if not is_adapter(name)]
    for setting, patterns in (("trainable", train.trainable), ("frozen", train.frozen)):
        for pattern in patterns:
            if not fnmatch.filter(own_names, pattern):
                expected = f"patterns of the names of parameters, which are {', '.join(own_names)}"
                raise UserError(invalid_value(f"train.{setting}", pattern, expected, own_names))
    trainable = {name for name in own_names if is_trained(name, lora, train)}
    if not (trainable or lora.rank):
        raise UserError("config.train.frozen selects all parameters: at least one must be trained")
    for projection in lora.projections if lora.rank else ():
        endings = tuple(f"/{path}" for path in projection_paths()[projection])
        name = next((name for name in sorted(trainable) if name.endswith(endings)), None)
        if name is not None:
            raise UserError(
                f"config.train.trainable selects {name}, which has an adapter: remove {projection!r} from"
                " config.lora.projections, or add the parameter to config.train.frozen"
            )
    return frozenset(own_names) - trainable


def trained_settings(config: Config) -> dict[str, Any]:
    """The settings, by their paths, that must be equal when a run resumes: they select
    adapters and frozen parameters.
    """
    others = "train.trainable", "train.frozen", "precision.frozen"
    return {
        path: value
        for path, value in flattened(to_dict(config)).items()
        if path in others or (path.startswith("lora.") and path != "lora.init_from")
    }


def split(tree: Any, frozen: Set[str]) -> tuple[Any, dict]:
    """(trainable part, frozen part) of a tree of parameters, or of a value per parameter.

    Args:
      frozen: names as `names_of` yields them. Empty: the first part is `tree` itself, of any type.
    """
    if not frozen:
        return tree, {}
    parts: tuple[dict, dict] = {}, {}
    for path, leaf in flatten_mapping(tree).items():
        parts[_name(path) in frozen][path] = leaf
    trainable, frozen_part = map(unflatten_mapping, parts)
    return trainable, frozen_part


def join(a: dict, b: dict) -> dict:
    """The tree of which `a` and `b` are the parts."""
    both = {name: join(a[name], b[name]) for name in a.keys() & b.keys()}
    return {**a, **b, **both}


def names_of(tree: Any) -> list[str]:
    """The names of all parameters, such as layers/attention/wq, sorted. They select parameters:
    those of all segments of the layers have the names of one, layers."""
    return sorted(set(map(_name, flatten_mapping(tree))))


def paths_in_layer(tree: dict) -> frozenset[tuple[str, ...]]:
    """The paths within a layer, such as ("attention", "wq"), of the parameters of layers in `tree`."""
    return frozenset(path[1:] for path in flatten_mapping(tree) if is_layers(path[0]))


def _name(path: tuple[str, ...]) -> str:
    first = LAYERS if is_layers(path[0]) else path[0]
    return "/".join((first, *path[1:]))
