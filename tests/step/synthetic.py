"""Small models and batches for tests of the training step."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxlc.config import Config, MeshConfig, defaults, load
from jaxlc.evals.document_loss import DocumentSums
from jaxlc.generation.generator import BATCH_SPEC, TOKENS_SPEC, CachedStep
from jaxlc.models.contract import CacheLayout, NewTokens, decode_tokens
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.batch import Batch
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train.evaluation import Evaluation

# A layer with Mamba-2 and a full one in turn.
MAMBA = dict(
    layer_kinds=("mamba2", "full"),
    mamba2=dict(heads=4, head_dim=6, groups=2, state_dim=8, conv_taps=4, largest_step=0.5),
)
# Layers whose heads and feed-forward layer differ, three in a period.
MIXED_KINDS = dict(
    layer_kinds=("sliding", "wide", "sliding"),
    window=20,
    kinds=dict(wide=dict(num_kv_heads=4, head_dim=12, ffn_dim=96)),
)
# A layer with Gated DeltaNet and a full one in turn.
HYBRID = dict(
    layer_kinds=("gated_delta_net", "full"),
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=8,
    delta_value_dim=12,
    delta_conv_taps=4,
)
# Kimi Delta Attention and a full layer in turn.
KIMI_DELTA = dict(
    layer_kinds=("kimi_delta", "full"), kda=dict(key_heads=4, head_dim=8, conv_taps=4)
)
# Latent attention; values are narrower than keys.
LATENT = dict(
    layer_kinds=("latent",),
    num_kv_heads=4,
    head_dim=12,
    rope_fraction=1 / 3,
    latent=dict(rank=10, query_rank=6, value_dim=8, interleaved=True),
)
TOKENS = 96  # divisible by every context x tensor of the tests
ROWS = 4


def small_config(**sections: dict) -> Config:
    """Two layers, sequences of 96 tokens; `sections` override, e.g. `mesh=dict(context=2)`."""
    config = defaults()
    config.model.update(
        vocab_size=61,
        num_layers=2,
        model_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=64,
        tie_embeddings=False,
    )
    config.data.seq_len = TOKENS
    config.attention.update(query_block_tokens=32, key_block_tokens=32)
    config.memory.loss_chunk_tokens = 20
    config.precision.compute = "fp32"
    config.train.update(global_batch_size=ROWS, eval_sequences=ROWS)
    for section, values in sections.items():
        config[section].update(values)
    return load(config)


def small_step(config: Config, **custom) -> TrainStep:
    """The step on the first devices, as many as its mesh has; `custom`: a custom model, loss and
    optimizer.
    """
    return build_step(
        config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]), **custom
    )


_DOCUMENTS = ((TOKENS,), (40, 3, 1, 29, 23), (10, -86), (-96,))


def natural_rows(
    vocab_size: int = 61, seed: int = 0, documents: Sequence[tuple[int, ...]] = _DOCUMENTS
) -> list[dict[str, np.ndarray]]:
    """Sequences of one document, of packed documents, of a few tokens and padding, and of padding
    only.

    So ranks and microbatches have different numbers of target tokens, and some have none.

    Args:
      documents: lengths of the documents of each sequence; a negative length is padding.
    """
    rows = []
    for row, lengths in enumerate(documents):
        tokens = np.random.default_rng([seed, row]).integers(
            0, vocab_size, sum(map(abs, lengths)), dtype=np.int32
        )
        positions = np.concatenate([np.arange(abs(n)) for n in lengths])
        segments = np.concatenate(
            [np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(lengths)]
        )
        weights = (segments > 0).astype(np.float32)
        # a document's last token has no target
        weights[np.cumsum([abs(n) for n in lengths if n]) - 1] = 0
        targets = np.append(tokens[1:], np.int32(0))
        rows.append(
            dict(
                tokens=tokens,
                targets=targets,
                loss_weights=weights,
                positions=positions.astype(np.int32),
                segment_ids=segments.astype(np.int32),
            )
        )
    return rows


def make_batch(step: TrainStep, rows: list[dict[str, np.ndarray]]) -> Batch:
    """`rows` as the batch of the step: [accumulation, rows, tokens] in the order of the step, on
    its devices.
    """
    arranged = [step.sequence_order.arranged(row) for row in rows]

    def stacked(name, like):
        array = np.stack([row[name][order] for row, order in arranged]).reshape(like.shape)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])

    arrays = {
        name: stacked(name, like)
        for name, like in step.abstract_batch._asdict().items()
        if like is not None
    }
    return Batch(**arrays)


def gradients_and_loss(step: TrainStep):
    """A function (params, batch) -> (gradients, cross entropy), both summed over the tokens."""

    def run(params, batch: Batch):
        cross_entropy, gradients, *_ = step.objective.loss_and_grads(params, batch)
        return gradients, cross_entropy

    return run


def lowered_decoding(cached: CachedStep, params, layout: CacheLayout) -> jax.stages.Lowered:
    """`CachedStep.jitted` for `decode_tokens` new tokens of each of two sequences, on devices that may
    be absent.
    """

    def numbers(spec, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(cached.mesh, spec))

    new = NewTokens(numbers(BATCH_SPEC, 2), numbers(BATCH_SPEC, 2))
    tokens = numbers(TOKENS_SPEC, 2, decode_tokens(cached.mesh))
    return cached.jitted(layout).lower(params, cached.abstract_cache(layout, 2), tokens, new)


def put_params(step: TrainStep, params):
    """Copies parameters to the mesh of the step, with its shardings and vocabulary padding."""

    def put(x, like):
        padding = [(0, wide - narrow) for wide, narrow in zip(like.shape, x.shape)]
        return jax.device_put(np.pad(np.asarray(x), padding), like.sharding)

    return jax.tree.map(put, params, step.abstract_state.params)


def without_padding(x, like) -> np.ndarray:
    """A parameter-shaped array without vocabulary padding, of the shape of `like`."""
    return np.asarray(x)[tuple(slice(size) for size in like.shape)]


def with_mesh(config: Config, **axes) -> Config:
    return dataclasses.replace(config, mesh=MeshConfig(**axes))


def documents_evaluation(
    edges: np.ndarray, losses: np.ndarray, weight: np.ndarray | None = None
) -> Evaluation:
    """An evaluation of documents with these mean losses, float [documents, bins], and one token per
    bin by default.
    """
    weight = np.ones_like(losses) if weight is None else weight
    return Evaluation(
        documents=DocumentSums(edges=edges, weight=weight, loss=weight * losses), num_sequences=4
    )
