"""Hidden states, logits and token losses of a trained model, for text or tokens, also for very long
sequences.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config, unchecked
from jaxlc.config.models.pretrained import CONFIG_FILE
from jaxlc.config.schema import PosttrainConfig
from jaxlc.core import CONTEXT, TENSOR, Unsupported, UserError, mesh_text, num_replicas
from jaxlc.data.sequences.user_batches import check_range, complete_batch
from jaxlc.data.tokens.tokenizers import Tokenizer, with_start
from jaxlc.models.kinds import tables_of_kinds
from jaxlc.runtime.watchdog import Program
from jaxlc.sharding.document_layout import natural_order
from jaxlc.sharding.rules import num_entries
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.loss import chunk_tokens
from jaxlc.step.step import TrainStep

_MAX_LOGITS_BYTES = 8 * 2**30  # in host memory, for one call
# shorter sequences are padded to it: they cost little more than their compilation
_MIN_TOKENS = 256

Tokens = str | Sequence[int] | np.ndarray | jax.Array


class _Padded(NamedTuple):
    """Sequences with padding, so that they split over the mesh."""

    # compiled functions of the padded length
    features: Program
    recording: Program  # also returns the experts of all tokens
    token_losses: Program
    # of these: parameters, a batch [sequences, tokens] in the order of the step, and the tables
    # of RoPE, which a custom model has not
    operands: tuple[Any, ...]
    natural_order: np.ndarray  # int64 [tokens without padding]: index of each one in the batch
    shape: tuple[int, int]  # sequences and tokens without padding
    is_single: bool  # the caller passed text or one sequence: results have no batch dimension

    def result(self, x_BT: Any, end: int | None = None) -> Any:
        """What a caller gets of an array of the batch: in natural order up to `end`, without padding."""
        x_BT = x_BT[: self.shape[0], self.natural_order[:end]]
        return x_BT[0] if self.is_single else x_BT


class TokenScores(NamedTuple):
    """Of candidates for the next token; arrays [B, n]."""

    log_probs: np.ndarray  # float32, in nats
    is_best: np.ndarray  # bool: whether the candidate is the most probable token
    entropies: np.ndarray  # float32, in nats: of the distribution of the next token
    # int32 [B, T, layers with experts, experts per token]: what routers chose; None: not asked for
    experts: np.ndarray | None = None
    # [B, n, top_k]: the most probable next tokens, int32, and their log-probabilities, float32
    top_tokens: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


class LanguageModel:
    """A trained model. Its methods take tokens and run on the mesh of the run.

    Tokens are a string, which is encoded with the tokenizer of the run and starts with its start
    token (see config.data.start_token), or integers [T] or [B, T] in natural order. Results have
    the same leading dimensions, without B for a string and for [T]. Each sequence is one document
    and may be longer than data.seq_len. Sequences are padded so that they split over the mesh; each
    padded length is compiled once. Every process of a run must make the same calls.
    """

    def __init__(
        self, step: TrainStep, params, tokenizer: Tokenizer, *, is_pretrained: bool = False
    ):
        """`is_pretrained`: see `Result.is_pretrained`."""
        self.config = step.config
        self.mesh = step.mesh
        self.params = params
        self.tokenizer = tokenizer
        self._step = step
        self._is_pretrained = is_pretrained

    def hidden_states(self, tokens: Tokens) -> jax.Array:
        """Final hidden states after the final norm, [B, T, D] in the compute dtype, T sharded over
        context and tensor.

        Raises:
          Unsupported: a custom model that returns logits only.
          UserError: a token is not in the vocabulary.
        """
        padded = self._padded(tokens)
        hidden_BTD, head = padded.features(*padded.operands)
        if head is None:
            raise Unsupported(
                "hidden states are unsupported: apply() of this model returns logits only"
            )
        return padded.result(hidden_BTD)

    def logits(
        self, tokens: Tokens, positions: int | Sequence[int] | slice | np.ndarray | None = None
    ) -> np.ndarray:
        """Logits of the next token, float32 [B, T, V]; logits[t] predict token t + 1.

        They are computed in chunks of memory.loss_chunk_tokens tokens per context rank and copied to the host.

        Args:
          positions: compute only the logits at these token indices, e.g. `slice(-256, None)`, which replaces the
            dimension T as in NumPy indexing; `-1` gives the logits of the last token, without T. None: all tokens.
        Raises:
          UserError: the logits would take more than 8 GiB, or a token is not in the vocabulary.
        """
        padded = self._padded(tokens)
        num_sequences, num_tokens = padded.shape
        chosen = np.arange(num_tokens)[slice(None) if positions is None else positions]
        chosen_n = np.atleast_1d(chosen)
        vocab_size = self.config.model.vocab_size
        num_bytes = 4 * num_sequences * len(chosen_n) * vocab_size
        if num_bytes > _MAX_LOGITS_BYTES:
            raise UserError(
                f"the logits of {num_sequences} x {len(chosen_n):,} tokens take {num_bytes / 2**30:,.0f} GiB: pass"
                " positions=, such as slice(-256, None), or use token_losses"
            )
        features_BTX, head_DV = padded.features(*padded.operands)
        chunk = chunk_tokens(self.config, self.mesh) * self.mesh.shape[CONTEXT]
        chunks = np.split(padded.natural_order[chosen_n], range(chunk, len(chosen_n), chunk))
        logits_BnV = np.concatenate(
            [np.asarray(self._logits(features_BTX, head_DV, chunk_n)) for chunk_n in chunks], axis=1
        )[:num_sequences]
        logits_BnV = logits_BnV[:, 0] if np.ndim(chosen) == 0 else logits_BnV
        return logits_BnV[0] if padded.is_single else logits_BnV

    def token_losses(self, tokens: Tokens) -> np.ndarray:
        """The loss of each token but the first, float32 [B, T - 1], cross entropy in nats, or the
        custom loss.

        Element t is the loss of token t + 1, given the tokens up to t. The logits exist in chunks
        only.
        """
        return self._token_losses(tokens, min_tokens=1)

    def _token_losses(self, tokens: Tokens, min_tokens: int) -> np.ndarray:
        padded = self._padded(tokens, min_tokens)
        return padded.result(np.asarray(padded.token_losses(*padded.operands)), end=-1)

    def scores(
        self,
        tokens: Tokens,
        positions: np.ndarray,
        candidates: np.ndarray,
        temperature: float = 1.0,
        records_experts: bool = False,
        top_k: int = 0,
    ) -> "TokenScores":
        """How probable candidates for the next token are, with logits divided by `temperature`, and
        the entropy of each distribution. The logits exist in chunks only, on the devices.

        Args:
          tokens: [B, T]; shorter sequences may be padded at the end, since a token depends on earlier ones only.
          positions: token indices, int [B, n]: candidate [b, i] follows token [b, positions[b, i]].
          candidates: token ids, int [B, n].
          records_experts: return the experts of all tokens.
          top_k: return this number of most probable tokens.
        """
        padded = self._padded(tokens)
        check_range("position", np.asarray(positions), padded.shape[1], "positions")
        check_range("token", np.asarray(candidates), self.config.model.vocab_size, "candidates")
        run = padded.recording if records_experts else padded.features
        features_BTX, head_DV, *experts = run(*padded.operands)
        num_sequences, num_scored = np.shape(positions)
        batch_size = len(features_BTX)
        chunk = chunk_tokens(self.config, self.mesh) * self.mesh.shape[CONTEXT] // batch_size
        chunk = max(1, min(chunk, 2 ** (num_scored - 1).bit_length()))  # few lengths are compiled
        widths = ((0, batch_size - num_sequences), (0, -num_scored % chunk))
        positions_Bn = np.pad(padded.natural_order[positions], widths)
        candidates_Bn = np.pad(candidates, widths).astype(np.int32)
        ends = range(chunk, positions_Bn.shape[1], chunk)
        chunks = [
            self._scores(features_BTX, head_DV, *indices, temperature, top_k)
            for indices in zip(*(np.split(x, ends, 1) for x in (positions_Bn, candidates_Bn)))
        ]
        *arrays, tokens, log_probs = (
            np.concatenate(x, 1)[:num_sequences, :num_scored] for x in zip(*chunks)
        )
        token_experts = [np.asarray(x)[:num_sequences, padded.natural_order] for x in experts] or [
            None
        ]
        return TokenScores(*arrays, *token_experts, tokens, log_probs)

    def loss(self, tokens: Tokens) -> float:
        """The mean of `token_losses`, in nats per token."""
        return float(self._token_losses(tokens, min_tokens=2).mean(dtype=np.float64))

    def __repr__(self) -> str:
        num_parameters = num_entries(self.params)
        methods = "logits, token_losses, loss, hidden_states"
        return f"LanguageModel({num_parameters:,} parameters on {mesh_text(self.mesh.shape)}; methods: {methods})"

    @functools.cached_property
    def _logits(self):
        def logits(features_BTX, head_DV, index_n):
            return self._projected(features_BTX[:, index_n], head_DV)

        return Program(
            "logits", jax.jit(logits, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
        )

    @functools.cached_property
    def _scores(self):
        def scores(features_BTX, head_DV, index_Bn, candidates_Bn, temperature, top_k):
            logits_BnV = self._projected(
                jnp.take_along_axis(features_BTX, index_Bn[..., None], axis=1), head_DV
            )
            log_probs_BnV = jax.nn.log_softmax(logits_BnV / temperature, axis=-1)
            chosen_Bn = jnp.take_along_axis(log_probs_BnV, candidates_Bn[..., None], axis=-1)[
                ..., 0
            ]
            entropy_Bn = -(jnp.exp(log_probs_BnV) * log_probs_BnV).sum(-1)
            is_best_Bn = logits_BnV.argmax(-1) == candidates_Bn
            top_log_probs, top_tokens = jax.lax.top_k(log_probs_BnV, top_k)
            return chosen_Bn, is_best_Bn, entropy_Bn, top_tokens, top_log_probs

        everywhere = NamedSharding(self.mesh, PartitionSpec())
        jitted = jax.jit(scores, static_argnums=5, out_shardings=everywhere)
        return Program("scores", jitted)

    def _projected(self, features_BnX: jax.Array, head_DV: jax.Array | None) -> jax.Array:
        """The logits, float32 [B, n, V]."""
        if head_DV is None:
            return features_BnX.astype(jnp.float32)
        logits_BnV = jnp.einsum(
            "BnD,DV->BnV", features_BnX, head_DV, preferred_element_type=jnp.float32
        )
        return logits_BnV[..., : self.config.model.vocab_size]

    @functools.cache  # noqa: B019
    def _functions(self, num_tokens: int) -> tuple[Program, Program, Program]:
        """The first fields of `_Padded`."""
        step = self._step_for(num_tokens)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        jitted = functools.partial(jax.jit, compiler_options=step.compiler_options)
        features = step.objective.features
        recording = functools.partial(features, records=True)
        return (
            Program("features", jitted(features)),
            Program(
                "features and experts", jitted(recording, out_shardings=(None, None, everywhere))
            ),
            Program("token losses", jitted(step.objective.token_losses, out_shardings=everywhere)),
        )

    def _step_for(self, num_tokens: int) -> TrainStep:
        tile_tokens = self.config.memory.tile_tokens
        if tile_tokens and num_tokens % (self.mesh.shape[CONTEXT] * tile_tokens):
            tile_tokens = 0
        config = unchecked(
            self.config,
            {
                "data.seq_len": num_tokens,
                "attention.document_mask": True,
                "attention.shared_prefixes": 0,
                "memory.tile_tokens": tile_tokens,
            },
            posttrain=PosttrainConfig(),
        )
        return replace(self._step, config=config)

    def _padded(self, tokens: Tokens, min_tokens: int = 1) -> _Padded:
        ids = np.asarray(tokens)
        if isinstance(tokens, str):
            ids = with_start(self.tokenizer.encode(tokens.encode()), self.tokenizer)
        ids_BT = np.atleast_2d(ids)
        if ids_BT.ndim > 2 or not ids_BT.size or not np.issubdtype(ids_BT.dtype, np.integer):
            raise UserError(
                f"invalid tokens {ids.dtype}{list(ids.shape)}: expected a text, or integers [T] or [B, T]"
            )
        num_sequences, num_tokens = ids_BT.shape
        is_custom = self._step.model is not None  # a custom model may limit the length
        padded_tokens = padded_length(
            num_tokens if is_custom else max(num_tokens, _MIN_TOKENS), self.config, self.mesh
        )
        padded_sequences = num_sequences + -num_sequences % num_replicas(self.mesh.shape)
        step = self._step_for(padded_tokens)
        widths = ((0, padded_sequences - num_sequences), (0, padded_tokens - num_tokens))
        arrays = complete_batch(
            {
                "tokens": np.pad(ids_BT, widths),
                "segment_ids": np.pad(np.ones(ids_BT.shape, np.int32), widths),
            },
            (padded_sequences, padded_tokens),
            self.config.model.vocab_size,
            "tokens",
        )
        if num_tokens < min_tokens:
            raise UserError(
                "the loss of one token: expected at least 2 tokens, since the first token has no loss"
            )
        # All sequences have as many tokens as the first, except those that are only padding.
        first, order = step.sequence_order.arranged(
            {name: array[0] for name, array in arrays.items()}
        )
        added = {
            name: np.broadcast_to(first[name], arrays["tokens"].shape)
            for name in first.keys() - arrays.keys()
        }
        sharding = NamedSharding(self.mesh, PartitionSpec(*BATCH_SPEC[1:]))
        batch = Batch(
            **{
                name: jax.make_array_from_callback(x.shape, sharding, x[:, order].__getitem__)
                for name, x in (arrays | added).items()
            }
        )
        tables = ()
        if not is_custom:
            rope_tokens = num_tokens if self._is_pretrained else self.config.data.seq_len
            tables = (tables_of_kinds(self.config.model, padded_tokens, rope_tokens),)
        return _Padded(
            *self._functions(padded_tokens),
            (self.params, batch, *tables),
            natural_order(order)[:num_tokens],
            (num_sequences, num_tokens),
            is_single=ids.ndim == 1,
        )


def padded_length(num_tokens: int, config: Config, mesh: Mesh) -> int:
    """The length to which `num_tokens` are padded: at most a quarter more, and a multiple of what
    the mesh requires.

    There are four lengths per power of two, so that few lengths are compiled.
    """
    unit = math.lcm(2 * mesh.shape[CONTEXT], mesh.shape[CONTEXT] * mesh.shape[TENSOR])
    if num_tokens > mesh.shape[CONTEXT] * config.memory.tile_tokens:
        unit = math.lcm(unit, mesh.shape[CONTEXT] * max(1, config.memory.tile_tokens))
    num_units = -(-num_tokens // unit)
    granularity = max(1, 2 ** (num_units.bit_length() - 3))
    return unit * -(-num_units // granularity) * granularity


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run at one step, or of a Hugging Face directory."""

    step: int  # optimizer steps done, also by earlier runs in the same workdir
    params: dict  # the trained parameters, float32, sharded over the mesh
    tokenizer: Tokenizer  # of the run: text to token ids and back
    workdir: Path  # directory of metrics, plots and checkpoints
    train_step: TrainStep = field(repr=False)  # config, mesh, model, loss and optimizer of the run

    @property
    def config(self) -> Config:
        return self.train_step.config

    @property
    def mesh(self) -> Mesh:
        return self.train_step.mesh

    @property
    def is_pretrained(self) -> bool:
        """Whether this is the model of a Hugging Face directory, loaded as it is. Its RoPE follows
        the length of each text instead of data.seq_len."""
        return (self.workdir / CONFIG_FILE).is_file()

    @cached_property
    def model(self) -> LanguageModel:
        """Logits, token losses and hidden states of the trained model, for text or tokens."""
        return LanguageModel(
            self.train_step, self.params, self.tokenizer, is_pretrained=self.is_pretrained
        )
