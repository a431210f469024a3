"""The arrays of post-training in user-provided batches: shared prefixes, advantages, log-probabilities."""

from collections.abc import Mapping

import numpy as np

from jaxlc.core.errors import UserError

_REQUIRED = ("advantages", "old_log_probs", "reference_log_probs")


def complete_traces(arrays: dict[str, np.ndarray], dtypes: Mapping[str, type], where: str) -> None:
    """Adds the arrays of post-training that `dtypes` names and `arrays` lacks; all are [B, S] in natural order.

    "prefix_ids" is the segment id of the prefix that a token's document continues (default: 0, none). "answer_weights"
    is 1 / number of weighted targets of the document (default: from the loss weights). "advantages", "old_log_probs"
    and "reference_log_probs" are values of the token's target; there is no default.

    Raises:
      UserError: an array without default is missing or not finite, a segment id is larger than S, or prefixes are
        invalid: unknown, nested, or continued by documents that are not neighbors.
    """
    for name in set(dtypes) & set(_REQUIRED):
        if name not in arrays:
            raise UserError(f"invalid {where}: no {name}, which config.posttrain needs; pass float32 [B, S]")
        if not np.isfinite(arrays[name]).all():
            raise UserError(f"invalid {where}: {name} are not all finite")
    segments = arrays["segment_ids"]
    wrong = segments[(segments < 0) | (segments > segments.shape[1])]
    if set(dtypes) & {"prefix_ids", "answer_weights"} and wrong.size:
        raise UserError(
            f"invalid {where}: segment id {wrong[0]}; with config.posttrain.loss or config.attention.shared_prefixes,"
            f" ids are 0 to the number of tokens, {segments.shape[1]}"
        )
    if "prefix_ids" in dtypes:
        _check_prefixes(arrays.setdefault("prefix_ids", np.zeros_like(segments)), segments, where)
    if "answer_weights" in dtypes and "answer_weights" not in arrays:
        arrays["answer_weights"] = np.stack([_answer_weights(*x) for x in zip(segments, arrays["loss_weights"])])


def _answer_weights(segments_S: np.ndarray, weights_S: np.ndarray) -> np.ndarray:
    has_loss = weights_S > 0
    counts = np.bincount(segments_S[has_loss], minlength=len(segments_S) + 1)
    return np.where(has_loss, 1 / np.maximum(counts[segments_S], 1), 0)


def _check_prefixes(prefixes: np.ndarray, segments: np.ndarray, where: str) -> None:
    for row, (prefixes_S, segments_S) in enumerate(zip(prefixes, segments)):
        documents = np.unique(np.stack([segments_S, prefixes_S]), axis=1)
        prefix_of = dict(documents.T.tolist())
        if len(prefix_of) < documents.shape[1] or prefix_of.get(0):
            raise UserError(f"invalid {where}: sequence {row} has several prefix_ids in one document, or in padding")
        for segment, prefix in prefix_of.items():
            if prefix and prefix not in prefix_of:
                raise UserError(f"invalid {where}: sequence {row} has no document {prefix}, the prefix of {segment}")
            if prefix and prefix_of[prefix]:
                raise UserError(
                    f"invalid {where}: document {prefix} of sequence {row} is a prefix and has the prefix"
                    f" {prefix_of[prefix]}; unsupported: nested prefixes"
                )
        starts = prefixes_S[np.diff(prefixes_S, prepend=0) != 0]
        runs = starts[starts > 0]
        if len(runs) > len(np.unique(runs)):
            raise UserError(
                f"invalid {where}: the documents of sequence {row} that continue one prefix are not neighbors; put them"
                " one after the other"
            )
