"""The arrays of a batch and their dtypes."""

import numpy as np

from jaxlc.config import Config

# What each array has is described in `step.batch.Batch` and `user_batches.complete_batch`.
ALWAYS = dict(tokens=np.int32, targets=np.int32, loss_weights=np.float32, positions=np.int32, segment_ids=np.int32)
OPTIONAL = dict(
    prefix_ids=np.int32,
    advantages=np.float32,
    answer_weights=np.float32,
    old_log_probs=np.float32,
    reference_log_probs=np.float32,
)


def array_dtypes(config: Config) -> dict[str, type]:
    """The dtype of each array of a batch of `config`."""
    posttrain = config.posttrain
    names = []
    if config.attention.shared_prefixes:
        names.append("prefix_ids")
    if posttrain.loss:
        names += ["advantages", "answer_weights"]
    if posttrain.loss not in ("", "dpo") and (posttrain.old_log_probs == "record" or config.rollouts.source):
        names.append("old_log_probs")  # with old_log_probs=policy for a metric only; NaN where a record has none
    if posttrain.uses_reference and posttrain.reference == "record":
        names.append("reference_log_probs")
    return ALWAYS | {name: OPTIONAL[name] for name in names}
