"""A decoder layer: a block that mixes tokens, a feed-forward block, dense or of experts, and the RMSNorms around them.

The layer of Llama (Touvron et al. 2023, arXiv:2302.13971), with the variations of other families that `ModelConfig`
describes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core import scopes
from jaxlc.models.block import InitKeys, RMSNorm
from jaxlc.models.contract import LayerOutput, Routed, operands
from jaxlc.models.kinds import FEED_FORWARDS, MIXERS
from jaxlc.models.matmuls import Fp8
from jaxlc.models.offloaded_layers import LayerParams, Prefetch, overlap_with_prefetch
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder


class DecoderLayer(nnx.Module):
    """A block that mixes tokens, called attention, and a feed-forward block, called mlp, whose outputs are added to the
    residual stream.

    Each has a norm of its input, of its output, or of both: `ModelConfig.norm_placement`.
    """

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        def norm(*placements: str) -> RMSNorm | None:
            if model.norm_placement not in placements:
                return None
            return RMSNorm(epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, norm=model.model_dim)

        self.attention_norm = norm("pre", "pre_and_post")
        self.attention = MIXERS[model.mixer](model, keys, fp8, lora)
        self.attention_post_norm = norm("post", "pre_and_post")
        self.mlp_norm = norm("pre", "pre_and_post")
        self.mlp = FEED_FORWARDS[model.feed_forward](model, keys, fp8, lora)
        self.mlp_post_norm = norm("post", "pre_and_post")

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        prefetch: Prefetch | None = None,
        *,
        attend: Callable,
        shard: Sharder,
        tables: RopeTables | None,
    ) -> tuple[LayerOutput, Any]:
        """Returns the output, and the prefetched weights (None without `prefetch`).

        T of x_BTD is sharded over context and tensor; each block gathers its input over tensor once.

        Args:
          positions_BT: int32; of padding, a negative number if the layer has experts: no sum counts these tokens.
          attend: from the first result of `Mixer.operands` to the first argument of `Mixer.projected`.
        """
        x_BTD = checkpoint_name(x_BTD, "residual")
        input_BTD = self.attention_input(x_BTD, shard=shard)
        mixed, kept = operands(self.attention, input_BTD, positions_BT, tables=tables, shard=shard)
        out, next_weights = overlap_with_prefetch(attend, mixed, prefetch)
        output, _ = self.after_attention(x_BTD, out, kept, positions_BT, shard=shard)
        return output, next_weights

    @jax.named_scope(scopes.ATTENTION)
    def attention_input(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """Returns x_BTD, normed if there is a norm before attention, and gathered over tensor."""
        return shard.gathered(_normed(x_BTD, self.attention_norm))

    def after_attention(
        self,
        x_BTD: jax.Array,
        out: jax.Array,
        kept: Any,
        positions_BT: jax.Array,
        chosen_BTk: jax.Array | None = None,
        *,
        shard: Sharder,
    ) -> tuple[LayerOutput, jax.Array | None]:
        """The layer after attention: x_BTD plus the projected attention output plus the output of the feed-forward
        block; and the experts of each token, int32 [B, T, k], which `layer_tiles` saves. None: the layer has none.

        Args:
          positions_BT: as in `__call__`.
          chosen_BTk: the experts of each token, of an earlier call; None: the router chooses.
        """
        projected_BTD = self.attention.projected(out, kept, shard=shard)
        with jax.named_scope(scopes.ATTENTION):
            x_BTD += _normed(projected_BTD, self.attention_post_norm)
        with jax.named_scope(scopes.MLP):
            input_BTD = shard.gathered(_normed(x_BTD, self.mlp_norm))
        if isinstance(self.mlp, Routed):
            out_BTD, sums, chosen_BTk = self.mlp(input_BTD, positions_BT, chosen_BTk, shard=shard)
        else:
            out_BTD, sums = self.mlp(input_BTD, shard=shard), {}
        with jax.named_scope(scopes.MLP):
            return LayerOutput(x_BTD + _normed(out_BTD, self.mlp_post_norm), sums), chosen_BTk


def _normed(x_BTD: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)


def run_layer(
    layer_def: nnx.GraphDef,
    params: LayerParams,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    ranges: Any,
    prefetch: Prefetch | None = None,
    *,
    attend: Callable,
    shard: Sharder,
    tables: RopeTables | None,
) -> tuple[LayerOutput, Any]:
    """Runs the layer `nnx.merge(layer_def, *params)` on whole sequences. With `attend` and `tables` bound, it is a
    `layer_stack.RunLayer`.

    Args:
      attend: `(*operands, ranges=ranges) -> out_BTNH`, with the operands of the layer.
    """
    layer: DecoderLayer = nnx.merge(layer_def, *params)
    attend_masked = functools.partial(attend, ranges=ranges)
    return layer(x_BTD, positions_BT, prefetch, attend=attend_masked, shard=shard, tables=tables)
