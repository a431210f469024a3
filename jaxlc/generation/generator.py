"""Text generation on the mesh of a model: prefill in chunks, then one token per sequence and step.

`CachedStep` is the decoder on a chunk of new tokens, with the cache of the tokens before it. A
prefill chunk and a decoding step are the same function; in the latter, each sequence has one new
token.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config
from jaxlc.config.models.model_schema import Segment
from jaxlc.core import (
    BATCH_AXES,
    CONTEXT,
    TENSOR,
    Unsupported,
    Update,
    UserError,
    no_progress,
    num_replicas,
    progress_lines,
)
from jaxlc.data.sequences.loader import experts_dtype
from jaxlc.data.tokens.encoder import NO_STOPS, Stops
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.generation.sampling import Sampling, TextStream, choose_tokens
from jaxlc.models import decoder
from jaxlc.models.block import rms_norm
from jaxlc.models.contract import (
    Cache,
    CacheLayout,
    LayerTokens,
    NewTokens,
    decode_tokens,
    empty_cache,
    layout_for,
)
from jaxlc.models.kinds import kinds_on_mesh, mixers_on_mesh, reach, stacked_tables, tables_of_kinds
from jaxlc.models.layer_stack import DecoderLayer, Stacks
from jaxlc.models.quantized import is_quantized
from jaxlc.models.rope import TablesOfKinds, depends_on_length
from jaxlc.runtime.watchdog import Program
from jaxlc.sharding.rules import Sharder, is_vector, storage_spec
from jaxlc.step.step import TrainStep

CHUNK_TOKENS = 2048  # tokens per prefill chunk and context rank
TOKENS_SPEC = PartitionSpec(BATCH_AXES, (CONTEXT, TENSOR))  # for int32 [B, C]
BATCH_SPEC = PartitionSpec(BATCH_AXES)  # for int32 [B]


@dataclass(frozen=True, kw_only=True)
class CachedStep:
    """The decoder on new tokens, with a cache of the tokens before them, on a mesh whose devices may
    be absent.
    """

    config: Config
    mesh: Mesh
    compute_dtype: jnp.dtype  # also of the cache

    def jitted(self, layout: CacheLayout) -> jax.stages.Wrapped:
        """The function `(params, cache, tokens, new, tables) -> (logits, cache, experts)`, see `run`;
        the cache is updated in place.
        """
        replicated = NamedSharding(self.mesh, PartitionSpec())
        cache = jax.tree.map(lambda x: x.sharding, self.abstract_cache(layout, 1))
        return jax.jit(
            functools.partial(self.run, layout),
            donate_argnums=1,
            out_shardings=(replicated, cache, replicated),
        )

    def run(
        self,
        layout: CacheLayout,
        params: dict,
        cache: Cache,
        tokens_BC: jax.Array,
        new: NewTokens,
        tables: TablesOfKinds | None = None,
    ) -> tuple[jax.Array, Cache, jax.Array | None]:
        """Appends the new tokens to the cache.

        Args:
          params: the tree of `decoder.init`, in the compute dtype or float32.
          cache: see `abstract_cache`.
          tokens_BC: int32, C a multiple of context x tensor; sequence b has new.num_new_B[b] tokens, then padding.
          tables: RoPE tables of each sequence, of `kinds.stacked_tables`; None: all are for config.data.seq_len.
        Returns:
          Logits of the token after the last new one, float32 [B, V], of any value for a sequence without new tokens;
          the cache with the new tokens; with posttrain.replay_routing, the experts of the tokens, of
          `loader.experts_dtype` [B, C], and otherwise None.
        """
        shard = Sharder(self.mesh)
        model = self.config.model
        module = decoder.bind(params, model, self.config.lora)
        x_BCD = module.embedded(tokens_BC, shard, self.compute_dtype)
        # Padding may be beyond the tables and then has the last angles.
        tables = tables or tables_of_kinds(model, layout.max_tokens, self.config.data.seq_len)
        batch_size, chunk_tokens = tokens_BC.shape
        sizes = dict(batch_size=batch_size, chunk_tokens=chunk_tokens)
        attends = {}
        for kind, on in kinds_on_mesh(self.config, self.mesh, self.compute_dtype).items():
            cached = [mixer.cached(own, layout, **sizes) for mixer, own in mixers_on_mesh(on)]
            attends[kind] = [x.bind(new) for x in cached]
        tokens = LayerTokens(new.positions_BC(chunk_tokens))

        def run_layer(kind: str, layer: DecoderLayer, x_BCD: jax.Array, caches: tuple, index):
            mixed, kept = layer.operands(
                x_BCD, tokens.positions_BT, tables=tables.get(kind), shard=shard
            )
            calls = zip(attends[kind], mixed, caches)
            both = [attend(*operands, cache=own, layer=index) for attend, operands, own in calls]
            outs = [out for out, _ in both]
            caches = tuple(cache for _, cache in both)
            output, chosen_BCk = layer.after_attention(x_BCD, outs, kept, tokens, shard=shard)
            return output.x_BTD, caches, chosen_BCk

        updated = {}
        chosen = []
        for segment in model.segments:
            name = segment.name
            x_BCD, updated[name], chosen_of_layers = self._run_stack(
                getattr(module, name), segment, x_BCD, cache[name], run_layer
            )
            chosen += chosen_of_layers
        is_last_BC1 = (jnp.arange(tokens_BC.shape[1]) == new.num_new_B[:, None] - 1)[..., None]
        last_BD = (
            jnp.where(is_last_BC1, x_BCD.astype(jnp.float32), 0.0)
            .sum(axis=1)
            .astype(self.compute_dtype)
        )
        normed_BD = rms_norm(last_BD, module.final_factor.astype(jnp.float32), model.norm_epsilon)
        head_DV = module.head_DV(shard, self.compute_dtype)
        logits_BV = jnp.einsum("BD,DV->BV", normed_BD, head_DV, preferred_element_type=jnp.float32)
        experts_BCLk = None
        if self.config.posttrain.replay_routing:
            dtype = experts_dtype(model).base
            experts_BCLk = jnp.moveaxis(jnp.concatenate(chosen), 0, 2).astype(dtype)
        return logits_BV[:, : model.vocab_size], updated, experts_BCLk

    def _run_stack(
        self,
        layers: DecoderLayer | nnx.Dict,
        segment: Segment,
        x_BCD: jax.Array,
        caches: tuple[Any, ...],
        run_layer: Callable,
    ) -> tuple[jax.Array, tuple[Any, ...], list[jax.Array]]:
        """Runs the layers of a segment. The caches are in the carry of the loop, where XLA updates
        them in place. Also returns the experts that its layers choose, int32 [layers, B, C, k]."""
        stacks = Stacks.split(layers)
        places = stacks.places(segment.kinds)

        def run_period(carry, inputs):
            x_BCD, caches = carry
            params, index = inputs
            updated = []
            chosen = []
            for place, cache in zip(places, caches, strict=True):
                own = jax.tree.map(operator.itemgetter(place.index), params.of(place.stack))
                layer = nnx.merge(stacks.defs[place.stack], *own)
                x_BCD, cache, chosen_BCk = run_layer(place.kind, layer, x_BCD, cache, index)
                updated.append(cache)
                chosen += [] if chosen_BCk is None else [chosen_BCk]
            return (x_BCD, tuple(updated)), jnp.stack(chosen) if chosen else None

        inputs = stacks.grouped(places), jnp.arange(segment.num_iterations, dtype=jnp.int32)
        (x_BCD, updated), chosen = lax.scan(run_period, (x_BCD, caches), inputs)
        return x_BCD, updated, [] if chosen is None else [chosen.reshape(-1, *chosen.shape[2:])]

    def abstract_cache(self, layout: CacheLayout, batch_size: int) -> Cache:
        """Shapes, dtypes and shardings of the cache."""
        on_mesh = kinds_on_mesh(self.config, self.mesh, self.compute_dtype)
        cache: Cache = {}
        for segment in self.config.model.segments:
            sizes = dict(
                batch_size=batch_size, num_layers=segment.num_iterations, dtype=self.compute_dtype
            )
            cache[segment.name] = tuple(
                tuple(
                    mixer.abstract_cache(own, layout, **sizes)
                    for mixer, own in mixers_on_mesh(on_mesh[kind])
                )
                for kind in segment.kinds
            )
        return cache

    def padded_batch_size(self, num_prompts: int) -> int:
        """The smallest batch size of at least `num_prompts` that splits over the mesh."""
        multiple = num_replicas(self.mesh.shape)
        return -(-num_prompts // multiple) * multiple

    def prefill_tokens(self, longest: int, chunk_tokens: int) -> int:
        """Tokens of a chunk for prompts of up to `longest` tokens: `decode_tokens` times a power of two from 2, so that
        prompts of similar lengths use the same program, which is not the one of a decoding step.

        Args:
          chunk_tokens: the largest number, unless the smallest chunk is larger; rounded up. 0: `CHUNK_TOKENS` per rank.
        """
        chunk_tokens = min(longest, chunk_tokens or CHUNK_TOKENS * self.mesh.shape[CONTEXT])
        # A rank receives the tokens that its layers reach from the rank before it only.
        chunk_tokens = max(chunk_tokens, reach(self.config.model) * self.mesh.shape[CONTEXT])
        smallest = decode_tokens(self.mesh)
        return smallest * 2 ** max(1, math.ceil(math.log2(chunk_tokens / smallest)))


def abstract_params(step: TrainStep, params: dict) -> dict:
    """Shapes, dtypes and shardings of the parameters in generation: matrices in the compute dtype;
    scales of norms and biases remain in float32, in which they are used. They are sharded as stored
    parameters.

    Args:
      params: the tree of `decoder.init`, of arrays or of `jax.ShapeDtypeStruct`s.
    """

    def abstract(x, dims):
        sharding = NamedSharding(step.mesh, storage_spec(dims, x.shape, step.mesh))
        dtype = x.dtype if is_vector(dims) else step.compute_dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    dims = decoder.dims_of(step.config.model, step.config.lora)
    return jax.tree.map(abstract, params, dims, is_leaf=is_quantized)


def cast_params(step: TrainStep, params: dict) -> dict:
    """A copy of the parameters with the dtypes and shardings of `abstract_params`."""
    abstract = abstract_params(step, params)

    def cast(x, like):
        return (x.dequantized() if is_quantized(x) else x).astype(like.dtype)

    return jax.jit(
        lambda tree: jax.tree.map(cast, tree, abstract, is_leaf=is_quantized),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )(params)


Stream = Callable[[int, str], None]  # index of the prompt, new text


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The continuation of one prompt."""

    text: str  # without special tokens and the stop string
    # int32, the end-of-document token or the tokens of a stop string included
    tokens: np.ndarray = field(repr=False)
    # float32, of the tokens; see `Sampling.scales_log_probs`
    log_probs: np.ndarray = field(repr=False)
    num_prompt_tokens: int
    finish_reason: str  # "stop": an end-of-document token or a stop string; "length": max_tokens
    # with posttrain.replay_routing: of all tokens but the last, of `loader.experts_dtype`
    experts: np.ndarray | None = field(default=None, repr=False)


class Generator:
    """Generates text with the parameters of a model. Programs are compiled once per length, see
    `layout_for`.

    Every process of a run must make the same calls.
    """

    def __init__(
        self,
        step: TrainStep,
        params: dict | None,
        tokenizer: Tokenizer,
        *,
        is_pretrained: bool = False,
        copies: bool = True,
    ):
        """
        Args:
          step: the training step of the model, for its config and mesh.
          params: the tree of `decoder.init`, sharded over the mesh. None: see `set_params`.
          copies: copy the parameters in the compute dtype. False: the programs read `params` and cast each layer, as a
            training step does.
          is_pretrained: see `Result.is_pretrained`; a continuation has the RoPE of its prompt.
        Raises:
          Unsupported: a custom model.
        """
        if step.model is not None:
            raise Unsupported(
                "unsupported: generation (also by config.evals.tasks, config.train.sample_every_steps or"
                " config.rollouts) with a custom model, whose attention has no KV cache"
            )
        self.config = step.config
        self.mesh = step.mesh
        self.tokenizer = tokenizer
        self.rope_by_prompt = is_pretrained and depends_on_length(step.config.model)
        self.cached_step = CachedStep(
            config=self.config, mesh=self.mesh, compute_dtype=step.compute_dtype
        )
        jitted = self.cached_step.jitted
        # the program of a cache layout; the cache is updated in place
        self.step = functools.cache(lambda layout: Program("generation", jitted(layout)))
        self._train_step = step
        self._copies = copies
        self.set_params(params)

    def set_params(self, params: dict | None) -> None:
        """Replaces the parameters; compiled programs remain. None frees the memory of the copy."""
        if self._copies and params is not None:
            params = cast_params(self._train_step, params)
        self.params = params

    def __call__(
        self,
        prompts: Sequence[np.ndarray],
        *,
        max_tokens: int | Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008
        stops: Stops = NO_STOPS,
        indices: Sequence[int] | None = None,
        chunk_tokens: int = 0,
        stream: Stream | None = None,
        shows_progress: bool = False,
    ) -> list[Generation]:
        """Continues all prompts as one batch.

        Args:
          prompts: token ids, int [tokens] each, at least one token; the lengths may differ.
          max_tokens: the largest number of new tokens, of all prompts or of each.
          stops: what ends a continuation.
          indices: of the prompts among the prompts of all calls; each has its own random numbers. None: 0, 1, ...
          chunk_tokens: tokens of a prompt that are computed at once, over all context ranks. 0: 2,048 per rank.
          stream: called with new text as soon as it is known.
          shows_progress: print lines on stderr while long prompts and answers are computed.
        Raises:
          UserError: a prompt has no tokens, or an id that is not in the vocabulary; a number is out of range.
        """
        prompts = [self._checked(prompt) for prompt in prompts]
        limits = np.broadcast_to(max_tokens, len(prompts)).tolist()
        for name, values, smallest in (
            ("max_tokens", limits, 1),
            ("chunk_tokens", [chunk_tokens], 0),
        ):
            if values and min(values) < smallest:
                raise UserError(
                    f"invalid value {min(values)} for {name}: expected {smallest} or more"
                )
        if not prompts:
            return []
        batch = Batch(self, prompts, max(limits), chunk_tokens)
        indices_P = np.array(range(len(prompts)) if indices is None else indices, np.int32)
        is_shown = shows_progress and jax.process_index() == 0
        with progress_lines("reading the prompt", is_shown=is_shown) as progress:
            logits_BV = jax.block_until_ready(batch.extend(progress=progress))
        outputs = [
            Output(self.tokenizer, stops, limit, prompt) for limit, prompt in zip(limits, prompts)
        ]
        # a stream of texts shows that they are generated
        with progress_lines("generating", is_shown=is_shown and stream is None) as progress:
            for num_tokens in itertools.count(1):
                tokens_B, log_probs_B = batch.choose(logits_BV, sampling, indices_P)
                for index, output in enumerate(outputs):
                    output.add(int(tokens_B[index]), float(log_probs_B[index]))
                    if stream and (text := output.take()):
                        stream(index, text)
                if all(output.finish_reason for output in outputs):
                    break
                progress(num_tokens, max(limits))
                logits_BV = batch.decode(tokens_B)
        return [output.result(batch.experts(i)) for i, output in enumerate(outputs)]

    def _checked(self, prompt: np.ndarray) -> np.ndarray:
        ids = np.asarray(prompt)
        vocab_size = self.config.model.vocab_size
        if not ids.size:
            raise UserError("a prompt is empty: expected at least one token")
        if ids.ndim != 1:
            raise UserError(
                f"invalid prompt with shape {list(ids.shape)}: expected a text or a list of token ids"
            )
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError(
                f"invalid token id in a prompt: expected integers from 0 to {vocab_size - 1}"
            )
        return ids.astype(np.int32)


class Batch:
    """The state of one call: the cache, and how many tokens each sequence has. Sequences are added
    so that the batch splits over the mesh; they repeat the last prompt's first token."""

    def __init__(
        self, generator: Generator, prompts: list[np.ndarray], max_tokens: int, chunk_tokens: int
    ):
        self._generator = generator
        cached_step = generator.cached_step
        num_padding = cached_step.padded_batch_size(len(prompts)) - len(prompts)
        self._prompts = [*prompts, *([prompts[-1][:1]] * num_padding)]
        self.num_sequences = len(self._prompts)
        longest = max(map(len, prompts))
        self._layout = layout = layout_for(longest + max_tokens, generator.mesh)
        self._chunk_tokens = cached_step.prefill_tokens(longest, chunk_tokens)
        self._step = generator.step(layout)
        self._tables: TablesOfKinds | None = None
        if generator.rope_by_prompt:
            lengths = [len(prompt) for prompt in self._prompts]
            self._tables = stacked_tables(generator.config.model, layout.max_tokens, lengths)
        self._cache = empty_cache(cached_step.abstract_cache(layout, self.num_sequences))
        self._num_tokens_B = np.zeros(self.num_sequences, np.int32)  # in the cache
        self._seen_BV = np.zeros((self.num_sequences, generator.config.model.vocab_size), bool)
        self._recorded: list[tuple[Any, np.ndarray]] = []  # experts, and new tokens, of each call

    def extend(
        self, prompts: Sequence[np.ndarray] = (), progress: Update = no_progress
    ) -> jax.Array:
        """Appends a prompt to each sequence, at first those of the batch; returns the logits of the
        next token, float32 [B, V].
        """
        prompts = prompts or self._prompts
        size = self._chunk_tokens
        logits_BV = None
        self._recorded.clear()
        lengths_B1 = np.array([[len(prompt)] for prompt in prompts])
        longest = int(lengths_B1.max())
        for first in range(0, longest, size):
            chunk_BV = self._run([x[first : first + size] for x in prompts], size)
            if first:
                # the devices compute this chunk while the next one is prepared
                logits_BV.block_until_ready()
                progress(first, longest)
                chunk_BV = jnp.where(lengths_B1 > first, chunk_BV, logits_BV)
            logits_BV = chunk_BV
        return logits_BV

    def rewind(self, ids: np.ndarray) -> None:
        """Keeps the first tokens of each sequence, `ids`. Keys and values after them are not read."""
        self._num_tokens_B[:] = len(ids)
        self._seen_BV[:] = False
        self._seen_BV[:, ids] = True

    @functools.cached_property
    def is_state(self) -> Cache:
        """Which arrays of the cache are states, which change with each token: their size does not
        depend on the number of tokens.
        """
        layout = self._layout
        longer = layout_for(2 * layout.max_tokens, self._generator.mesh)
        abstract = self._generator.cached_step.abstract_cache
        caches = abstract(layout, 1), abstract(longer, 1)
        return jax.tree.map(lambda short, long: short.shape == long.shape, *caches)

    def copied_states(self) -> Cache:
        """Copies of the states, and None for other arrays: a step updates the cache in place."""
        return jax.tree.map(
            lambda is_state, x: jnp.copy(x) if is_state else None, self.is_state, self._cache
        )

    def restore(self, states: Cache) -> None:
        """Sets the states of the cache to copies of `states`."""
        self._cache = jax.tree.map(
            lambda own, state: own if state is None else jnp.copy(state), self._cache, states
        )

    def decode(self, tokens_B: np.ndarray) -> jax.Array:
        """Appends one token to each sequence; returns the logits of the next one, float32 [B, V]."""
        return self._run(list(tokens_B[:, None]), decode_tokens(self._generator.mesh))

    def choose(
        self, logits_BV: jax.Array, sampling: Sampling, indices_P: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        padded_B = np.pad(indices_P, (0, self.num_sequences - len(indices_P)))
        indices_B = np.stack([padded_B, self._num_tokens_B])
        seen_BV = None if sampling.repetition_penalty == 1 else self._seen_BV
        seed = np.uint32(sampling.seed)
        chosen = choose_tokens(logits_BV, seed, indices_B, replace(sampling, seed=0), seen_BV)
        return jax.device_get(chosen)

    def _run(self, chunks: list[np.ndarray], chunk_tokens: int) -> jax.Array:
        new_B = np.array([len(chunk) for chunk in chunks], np.int32)
        tokens_BC = np.stack(
            [np.pad(chunk, (0, chunk_tokens - len(chunk))) for chunk in chunks]
        ).astype(np.int32)
        counts = (self._global(x, BATCH_SPEC) for x in (self._num_tokens_B, new_B))
        arguments = self._global(tokens_BC, TOKENS_SPEC), NewTokens(*counts)
        logits_BV, self._cache, experts_BCLk = self._step(
            self._generator.params, self._cache, *arguments, self._tables
        )
        # the devices compute this call while the result of the one before is copied
        self._recorded[-1:] = jax.device_get(self._recorded[-1:])
        self._recorded.append((experts_BCLk, new_B))
        for seen_V, chunk in zip(self._seen_BV, chunks):
            seen_V[chunk] = True
        self._num_tokens_B = self._num_tokens_B + new_B
        return logits_BV

    def experts(self, index: int) -> np.ndarray | None:
        """The experts of the tokens in the cache of a sequence; None: they are not recorded."""
        if self._recorded[0][0] is None:
            return None
        return np.concatenate([np.asarray(x[index])[: n[index]] for x, n in self._recorded])

    def _global(self, x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(
            x.shape, NamedSharding(self._generator.mesh, spec), x.__getitem__
        )


class Output:
    """The new tokens of one prompt."""

    def __init__(self, tokenizer: Tokenizer, stops: Stops, max_tokens: int, prompt: np.ndarray):
        self._stream = TextStream(tokenizer, stops.texts, prompt)
        self._stop_ids = stops.ids
        self._max_tokens = max_tokens
        self._num_prompt_tokens = len(prompt)
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self.finish_reason = ""  # empty: not finished

    def add(self, token: int, log_prob: float) -> None:
        """Adds the next token; those after the end are ignored."""
        if self.finish_reason:
            return
        self._tokens.append(token)
        self._log_probs.append(log_prob)
        is_end = token in self._stop_ids
        is_last = len(self._tokens) == self._max_tokens
        self._stream.add(token, is_hidden=is_end)
        if is_end or is_last or self._stream.is_stopped:
            self._stream.finish()  # which may complete a stop string
            self.finish_reason = "stop" if is_end or self._stream.is_stopped else "length"

    def take(self) -> str:
        return self._stream.take(is_last=bool(self.finish_reason))

    def result(self, experts: np.ndarray | None = None) -> Generation:
        end = self._num_prompt_tokens + len(self._tokens) - 1
        return Generation(
            experts=None if experts is None else experts[:end],
            text=self._stream.text,
            tokens=np.array(self._tokens, np.int32),
            log_probs=np.array(self._log_probs, np.float32),
            num_prompt_tokens=self._num_prompt_tokens,
            finish_reason=self.finish_reason,
        )
