"""Loss and gradients of one batch: batch -> decoder -> hidden states -> final norm, output head and
loss, chunk by chunk.

`accumulate` sums over the microbatches of a step.

`NodeCopies` gathers copies of the parameters for each node once per step, and sums their gradients
over nodes:

    stored      [L, D, ...]          D sharded over the ranks of a node, and over the nodes
    copy        [L, nodes, D, ...]   nodes sharded over the nodes, D over the ranks of a node

See `sharding.mesh`. Norm scales, biases and other vectors have no copy: they are kilobytes, and are
not sharded.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.query_tiles import layout_of, tiles_of
from jaxlc.config import Config, LoraConfig, MemoryConfig, unchecked
from jaxlc.config.flops import QuantizedMatrix, quantized_matrices
from jaxlc.core import CONTEXT, TENSOR, is_layers, scopes
from jaxlc.models import decoder, layer_stack, layer_tiles, lora
from jaxlc.models.block import rms_norm
from jaxlc.models.contract import CHOICE, BatchTokens, KindOnMesh, OnTiles, Routed, Sequences, Tiles
from jaxlc.models.kinds import kinds_on_mesh, kinds_with, mixers_on_mesh, tables_of_kinds
from jaxlc.models.layer_stack import LayerContext, Routing, RunLayer
from jaxlc.models.lora import frozen_names, is_adapter
from jaxlc.models.quantized import FORMATS, is_quantized
from jaxlc.models.rope import RopeTables, TablesOfKinds
from jaxlc.posttrain.losses import (
    PolicyLoss,
    PolicySums,
    denominator,
    divergence,
    mismatched_sums,
    over_microbatches,
    policy_sums,
)
from jaxlc.sharding.mesh import Nodes, nodes_of, shard_map
from jaxlc.sharding.rules import Sharder, axes_of, copy_spec, is_copied, is_vector, storage_spec
from jaxlc.step import precision, update
from jaxlc.step.batch import (
    Batch,
    at_loss_tokens,
    choose_order,
    loss_rows,
    sequence_positions,
    token_weights,
)
from jaxlc.step.loss import (
    LossSpec,
    Teacher,
    TokenLoss,
    expert_sums,
    loss_sums,
    num_filled,
    sums_and_losses,
    weighted_loss,
)
from jaxlc.step.remat import make_remat, saves_attention
from jaxlc.step.state import is_on_host, lacks_host_memory, padded_vocab_size


def accumulate(objective: Callable, params, batch: Batch, dims, histories: dict | None = None):
    """Sums of the loss and its gradients over a batch [gradient accumulation steps, sequences, tokens].

    Args:
      objective: `(params, histories, microbatch) -> (objective, cross_entropy)`, both float32 sums over the microbatch;
        the first is differentiated. The second may be a tree of sums.
      params: pytree of arrays, in device or host memory.
      dims: the parameter tree with a tuple of dimension names per leaf.
      histories: amax histories of FP8 delayed scaling, or None.
    Returns:
      The sums of the second result; the sum of the gradients; the next histories, which are the maximum over the
      microbatches, or None.
    """
    differentiate = jax.grad(objective, argnums=(0, 1), has_aux=True)

    def add_microbatch(totals, part: Batch):
        gradients, amax = totals
        part_totals, cross_entropy = differentiate(params, histories, part)
        gradients = update.add(gradients, part_totals[0], dims)
        return (gradients, jax.tree.map(jnp.maximum, amax, part_totals[1])), cross_entropy

    if not is_on_host(params):
        # float32 also of the copies of nodes, which may have the compute dtype.
        zeros = optax.tree.zeros_like((params, histories), jnp.float32)
        totals, cross_entropy = lax.scan(add_microbatch, zeros, batch)
        return over_microbatches(cross_entropy), *totals
    # No zeros, which would be allocated on the device: the sum starts with the gradients of the
    # first microbatch.
    first = jax.tree.map(lambda x: x[0], batch)
    others = jax.tree.map(lambda x: x[1:], batch)
    totals, first_cross_entropy = differentiate(params, histories, first)
    if len(batch.tokens) == 1:
        return first_cross_entropy, *totals
    totals, cross_entropy = lax.scan(add_microbatch, totals, others)
    parts = jax.tree.map(
        lambda first, others: jnp.concatenate([first[None], others]),
        first_cross_entropy,
        cross_entropy,
    )
    return over_microbatches(parts), *totals


@dataclass(frozen=True)
class NodeCopies:
    """Gathers copies and sums their gradients, under `jit`."""

    nodes: Nodes
    compute_dtype: jnp.dtype
    reduce: Literal["compute", "fp32"]  # config.precision.reduce

    @jax.named_scope(scopes.GATHER_NODE_COPY)
    def gathered(self, params: dict, dims: dict) -> dict:
        """The parameters with copies in place of matrices.

        Those of layers are in the compute dtype, since layers gather in it; the embedding and the
        output head, whose gradients are always summed in float32, keep the dtype in which they are
        stored, and so do layers if their gradients are summed in float32.
        """

        def copy(path, stored: jax.Array, dims: tuple[str, ...]) -> jax.Array:
            if not is_copied(dims):
                return stored
            spec, out_spec = self._specs(dims, stored.shape)
            dtype = self._reduce_dtype(path, stored.dtype)

            def gather(x: jax.Array) -> jax.Array:
                x = x.astype(dtype)
                for dim, entry in enumerate(spec):
                    if axes := self._over_nodes(entry):
                        x = lax.all_gather(x, axes, axis=dim, tiled=True)
                return jnp.expand_dims(x, _nodes_dim(dims))

            return shard_map(gather, self.nodes.mesh, spec, out_spec)(stored)

        return jax.tree.map_with_path(copy, params, dims)

    @jax.named_scope(scopes.SUM_OVER_NODES)
    def summed(self, gradients: dict, dims: dict) -> dict:
        """Gradients of the parameters, float32 and sharded as these, from the gradients of the
        copies.
        """

        def add(path, gradient: jax.Array, dims: tuple[str, ...]) -> jax.Array:
            if not is_copied(dims):
                return gradient
            nodes_dim = _nodes_dim(dims)
            shape = gradient.shape[:nodes_dim] + gradient.shape[nodes_dim + 1 :]
            spec, copy = self._specs(dims, shape)
            dtype = self._reduce_dtype(path, gradient.dtype)

            def scatter(x: jax.Array) -> jax.Array:
                x = x.squeeze(nodes_dim).astype(dtype)
                remaining = set(self.nodes.outer)
                for dim, entry in enumerate(spec):
                    if axes := self._over_nodes(entry):
                        x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
                        remaining -= set(axes)
                return lax.psum(
                    x, tuple(axis for axis in self.nodes.outer if axis in remaining)
                ).astype(gradient.dtype)

            return shard_map(scatter, self.nodes.mesh, copy, spec)(gradient)

        return jax.tree.map_with_path(add, gradients, dims)

    def _specs(
        self, dims: tuple[str, ...], shape: tuple[int, ...]
    ) -> tuple[PartitionSpec, PartitionSpec]:
        """The shardings of a parameter and of its copy."""
        at = _nodes_dim(dims)
        copy = copy_spec(dims, shape, self.nodes)
        return storage_spec(dims, shape, self.nodes.mesh), PartitionSpec(
            *copy[:at], self.nodes.outer, *copy[at:]
        )

    def _over_nodes(self, entry) -> tuple[str, ...]:
        """The axes over nodes, of more than one, in an entry of a PartitionSpec."""
        return tuple(axis for axis in axes_of(entry) if axis in self.nodes.outer)

    def _reduce_dtype(self, path, dtype) -> jnp.dtype:
        """The dtype in which a parameter is gathered, and its gradient summed, across nodes."""
        is_layer = is_layers(path[0].key)
        return self.compute_dtype if is_layer and self.reduce == "compute" else dtype


def _nodes_dim(dims: tuple[str, ...]) -> int:
    """The dimension of nodes in the copy of a parameter: after the dimension of layers, which scans
    remove.
    """
    return int(dims[0] == "layers")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of `config` on `mesh`, as functions to call under `jit`."""

    config: Config
    mesh: Mesh
    token_loss: TokenLoss | None = None
    policy_loss: PolicyLoss | None = None

    @cached_property
    def dims(self):
        """The parameter tree with a tuple of dimension names per leaf."""
        dims = decoder.dims_of(self.config.model, self.config.lora)
        if not self._quantized:
            return dims
        abstract = jax.eval_shape(self.init_params, jax.random.key(0))
        return jax.tree.map(
            lambda x, names: x.dims(names) if is_quantized(x) else names,
            *(abstract, dims),
            is_leaf=is_quantized,
        )

    @cached_property
    def _quantized(self) -> dict[str, QuantizedMatrix]:
        return quantized_matrices(self.config.model, self.config)

    @cached_property
    def nodes(self) -> Nodes | None:
        """The nodes that gather a copy of the parameters once per step; None: layers gather from
        all ranks.
        """
        return nodes_of(self.mesh, self.config.memory.node_copy_devices)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters that are not trained."""
        dims = decoder.dims_of(self.config.model, self.config.lora)
        return frozen_names(self.config, lora.names_of(dims))

    def init_params(self, key: jax.Array) -> dict:
        """The parameters of step 0, equal on every mesh up to vocabulary padding: float32, but
        frozen matrices have the dtype of config.precision.frozen, or are `Quantized`."""
        config = self.config
        model = self.config.model
        vocab_size_padded = padded_vocab_size(model.vocab_size, self.mesh.shape[TENSOR])
        params = decoder.init(model, vocab_size_padded, key, config.lora)
        trainable, frozen = lora.split(params, self.frozen)
        _, frozen_dims = lora.split(decoder.dims_of(model, config.lora), self.frozen)
        dtype = precision.DTYPES[config.precision.frozen]

        def stored(path, x: jax.Array, dims: tuple[str, ...]):
            matrix = self._quantized.get("/".join(key.key for key in path))
            if matrix is not None:
                return FORMATS[matrix.format].of(x, matrix.num_dims)
            return x if is_vector(dims) else x.astype(dtype)

        frozen = jax.tree.map_with_path(stored, frozen, frozen_dims)
        return lora.join(trainable, frozen) if self.frozen else params

    def loss_and_grads(self, params, batch: Batch, histories: dict | None = None):
        """Sums over the tokens of a batch [gradient accumulation steps, sequences, tokens]; see `accumulate`.

        Returns:
          The sum of weight x cross entropy in nats (or of `token_loss`), float32, or `PolicySums` with posttrain.loss;
          its gradients with respect to the trainable part of `params`, with z-loss and the losses of experts; the next
          histories; `ExpertSums`, None without experts.
        """
        copies = None
        if self.nodes is not None:
            copies = NodeCopies(self.nodes, self._compute_dtype, self.config.precision.reduce)
            params = copies.gathered(params, self.dims)
        trainable, frozen = lora.split(params, self.frozen)
        trainable_dims, _ = lora.split(self.dims, self.frozen)
        # Sums are divided by this number, and the losses of experts are means over the
        # microbatches with tokens.
        per_microbatch = denominator(batch, self.config.posttrain) / num_filled(batch.segment_ids)
        kl = self._divergence(params, batch)

        def objective(trainable, histories, part: Batch):
            *hidden_and_head, layer_sums = self._hidden_and_head(
                decoder.Params(trainable, frozen, histories), part
            )
            targets = self._in_tiles(part.targets)
            policy = None
            weights = token_weights(part)
            if self.config.posttrain.loss:
                part = self._with_reference(lora.join(trainable, frozen), part)
                weights, policy = self._policy_weights(hidden_and_head, targets, weights, part, kl)
            values = targets, self._in_tiles(weights), self._training_loss_spec
            sums = loss_sums(*hidden_and_head, *values, self._teacher(part))
            total = sums.objective
            experts = None
            if kinds_with(Routed, self.config.model):
                experts = expert_sums(layer_sums, part.segment_ids, self.config.train)
                total += per_microbatch * weighted_loss(experts, self.config.train)
            return total, (sums.cross_entropy if policy is None else policy, experts)

        (sums, experts), gradients, histories = accumulate(
            objective, trainable, batch, trainable_dims, histories
        )
        if copies is not None:
            gradients = copies.summed(gradients, trainable_dims)
        return sums, gradients, histories, experts

    def _with_reference(self, params, part: Batch) -> Batch:
        """The microbatch with the log-probabilities of the base model, without adapters, if
        posttrain uses them.
        """
        posttrain = self.config.posttrain
        if not posttrain.uses_reference or posttrain.reference != "base":
            return part
        adapters = {name for name in lora.names_of(self.dims) if is_adapter(name)}
        base_params, _ = lora.split(lax.stop_gradient(params), adapters)
        settings = {"posttrain.replay_routing": False}
        config = unchecked(self.config, settings, lora=LoraConfig())
        base = replace(self, config=config)
        return part._replace(reference_log_probs=base.log_probs(base_params, part))

    def _divergence(self, params, batch: Batch) -> jax.Array | None:
        """The KL divergence of a step with kto, from a forward pass of its own; None: microbatches
        need none, or there is one, which has it.
        """
        if self.config.posttrain.loss != "kto" or len(batch.tokens) == 1:
            return None

        def sums_of(part: Batch) -> tuple[jax.Array, jax.Array]:
            part = self._with_reference(params, part)
            return mismatched_sums(self.log_probs(params, part), part)

        return divergence(over_microbatches(lax.map(sums_of, batch)))

    def _policy_weights(
        self,
        hidden_and_head,
        targets: jax.Array,
        weights_BT: jax.Array,
        part: Batch,
        kl: jax.Array | None,
    ) -> tuple[jax.Array, PolicySums]:
        """The weights of cross entropy whose gradient is the gradient of posttrain.loss, and the
        sums of the loss.

        Args:
          weights_BT: of the tokens, for their entropy.
        """
        posttrain = self.config.posttrain
        weights = self._in_tiles(weights_BT)
        spec = replace(self._training_loss_spec, with_entropy=posttrain.is_policy)
        forward, losses = sums_and_losses(
            *map(lax.stop_gradient, hidden_and_head), targets, weights, spec
        )

        def loss(log_probs_BT):
            rows = at_loss_tokens(log_probs_BT, part), loss_rows(part)
            sums = policy_sums(*rows, posttrain, self.policy_loss, kl)
            return sums.loss, sums

        gradient_BT, sums = jax.grad(loss, has_aux=True)(-self._in_sequences(losses))
        return -gradient_BT, sums._replace(entropy=forward.entropy)

    def token_losses(
        self,
        params,
        batch: Batch,
        tables: TablesOfKinds | None = None,
        spec: LossSpec | None = None,
    ) -> jax.Array:
        """Loss of each token in nats, float32 [sequences, tokens]; for evaluation. Not
        differentiable.

        Args:
          tables: RoPE tables instead of those for data.seq_len.
          spec: instead of that for evaluation.
        """
        *hidden_and_head, _ = self._hidden_and_head(decoder.Params(params), batch, tables)
        targets = self._in_tiles(batch.targets)
        values = jnp.ones(targets.shape, jnp.float32), spec or self._loss_spec, self._teacher(batch)
        _, losses = sums_and_losses(*hidden_and_head, targets, *values)
        return self._in_sequences(losses)

    def _teacher(self, batch: Batch) -> Teacher | None:
        if batch.teacher_tokens is None:
            return None
        return Teacher(*map(self._in_tiles, (batch.teacher_tokens, batch.teacher_log_probs)))

    def log_probs(self, params, batch: Batch) -> jax.Array:
        """Log-probability of each target, or of those of the rows of the loss, at
        posttrain.temperature, float32 as the loss weights. Not differentiable.
        """
        losses = self.token_losses(params, batch, spec=self._training_loss_spec)
        return -at_loss_tokens(losses, batch).reshape(batch.loss_weights.shape)

    def features(
        self, params, batch: Batch, tables: TablesOfKinds | None = None, *, records: bool = False
    ) -> tuple[jax.Array, ...]:
        """Hidden states after the final norm, divided by model.logits_scaling, [sequences, tokens,
        D], and the output head [D, V padded]; with `records`, also the chosen experts, int32
        [sequences, tokens, layers with experts, experts per token].

        The first two are in the compute dtype. The product of the two, without the padding, gives the
        logits. `tables` as in `token_losses`.
        """
        x_BTD, scale_D, head_DV, sums = self._hidden_and_head(
            decoder.Params(params), batch, tables, "record" if records else ""
        )
        hidden_BTD = rms_norm(
            self._in_sequences(x_BTD), scale_D, epsilon=self.config.model.norm_epsilon
        )
        if not records:
            return hidden_BTD, head_DV
        return hidden_BTD, head_DV, self._in_sequences(jnp.moveaxis(sums[CHOICE], 0, -2))

    @cached_property
    def _loss_spec(self) -> LossSpec:
        epsilon = self.config.model.norm_epsilon
        return LossSpec.from_config(self.config, self.mesh, self.token_loss, epsilon, self.nodes)

    @property
    def _training_loss_spec(self) -> LossSpec:
        return replace(self._loss_spec, temperature=self.config.posttrain.temperature)

    def _hidden_and_head(
        self,
        params: decoder.Params,
        batch: Batch,
        tables: TablesOfKinds | None = None,
        routing: Routing = "",
    ):
        """Final hidden states before the norm (tiled if memory.tile_tokens is set), scale of the
        norm, output head, and the sums of the layers."""
        order = choose_order(self.config, self.mesh.shape[CONTEXT])
        kinds = kinds_on_mesh(
            self.config,
            self.mesh,
            self._compute_dtype,
            num_tiles=self._num_tiles,
            few_documents=order.few_documents,
            skips_ring_steps=order.skips_ring_steps,
            num_chains=order.num_chains,
        )
        bound = {kind: _bound(on) for kind, on in kinds.items()}
        if self.config.attention.document_mask:
            positions = batch.positions
            tokens = BatchTokens(positions, batch.segment_ids, batch.prefix_ids, batch.fragment_ids)
        else:  # a sequence is one document: its mask is implicit
            positions = sequence_positions(batch.positions.shape, self.mesh)
            tokens = BatchTokens(positions, None)
        if kinds_with(Routed, self.config.model):
            # see `DecoderLayer.__call__`
            positions = jnp.where(batch.segment_ids > 0, positions, -1)
        experts_LBTk = None
        if self.config.posttrain.replay_routing:  # in tiles, [n, L, B, t, k]
            routing = "replay"
            experts_LBTk = jnp.moveaxis(self._in_tiles(batch.experts), -2, -4)
        seq_len = self.config.data.seq_len
        tables = tables or tables_of_kinds(self.config.model, seq_len, seq_len)
        context = LayerContext(
            run_layer={kind: self._run_layer(bound[kind], tables.get(kind)) for kind in bound},
            ranges={kind: [x.prepare(tokens) for x in mixers] for kind, mixers in bound.items()},
            shard=Sharder(
                self.mesh,
                nodes=self.nodes,
                weights_on_host=is_on_host(params.trainable),
                reduces_in_float32=self.config.precision.reduce == "fp32",
                expert_kernel=self.config.runtime.expert_kernel,
            ),
            remat=make_remat(self._memory, self.config.model.num_compiled_layers),
            compute_dtype=self._compute_dtype,
            routing=routing,
            experts_LBTk=experts_LBTk,
        )
        return decoder.apply(
            params,
            self.config.model,
            self._in_tiles(batch.tokens),
            self._in_tiles(positions),
            context,
            fp8=precision.make_fp8(self.config.precision, params.histories),
            lora=self.config.lora,
        )

    @property
    def _compute_dtype(self):
        return precision.compute_dtype(self.config.precision, self.mesh)

    @property
    def _memory(self) -> MemoryConfig:
        """config.memory; tensors to offload are saved on the device if the devices cannot use host
        memory.
        """
        memory = self.config.memory
        if lacks_host_memory(self.mesh) is None:
            return memory
        return replace(memory, save=(*memory.save, *memory.offload), offload=())

    @property
    def _num_tiles(self) -> int:
        """Tiles per sequence; 0: layers run on whole sequences."""
        tile_tokens = self.config.memory.tile_tokens
        return tile_tokens and self.config.data.seq_len // (self.mesh.shape[CONTEXT] * tile_tokens)

    def _in_tiles(self, x_BT: jax.Array) -> jax.Array:
        if self._num_tiles:
            return tiles_of(x_BT, self.mesh.shape[CONTEXT], self._num_tiles)
        return x_BT

    def _in_sequences(self, x: jax.Array) -> jax.Array:
        """The inverse of `_in_tiles`."""
        return layout_of(x, self.mesh.shape[CONTEXT]) if self._num_tiles else x

    def _run_layer(
        self, bound: list[Sequences] | list[Tiles], tables: RopeTables | None
    ) -> RunLayer:
        """A decoder layer with its mixers and RoPE bound."""
        if not self._num_tiles:
            attends = [mixer.attend for mixer in bound]
            return functools.partial(layer_stack.run_layer, attends=attends, tables=tables)
        return functools.partial(
            layer_tiles.run_layer,
            mixers=[mixer.mixer for mixer in bound],
            saves_attention=saves_attention(self._memory),
            tables=tables,
        )


def _bound(on: KindOnMesh) -> list[Sequences] | list[Tiles]:
    """The mixers of the layers of a kind, by tiles if memory.tile_tokens is set."""
    mixers = mixers_on_mesh(on)
    if not on.num_tiles:
        return [mixer.on_sequences(own) for mixer, own in mixers]
    # all are: see `kinds_on_mesh`
    return [mixer.on_tiles(own) for mixer, own in mixers if issubclass(mixer, OnTiles)]
