"""Losses of TRL for tests/hf/test_trl_losses.py, in an environment of its own:

    python tests/hf/trl_losses.py INPUTS.npz OUT.npz SETTINGS

It calls the functions of TRL's trainers that compute the losses, with objects that have only the
attributes they read.
"""

import collections
import inspect
import json
import math
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import torch
import trl
from trl import DPOTrainer, GRPOTrainer


def importance_weights(arrays: dict[str, torch.Tensor], trainer: SimpleNamespace) -> torch.Tensor:
    """Executes the lines of GRPOTrainer that compute the weights, in the middle of a function that
    also generates the answers.
    """
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    first = source.index("# Compute the importance sampling ratio when using vLLM")
    last = source.index("# Compute the per-token log probabilities for the reference model")
    begin = source.rindex("\n", 0, first) + 1
    values = dict(torch=torch, math=math, self=trainer, tool_mask=None)
    values |= dict(completion_mask=arrays["mask"], old_per_token_logps=arrays["old"])
    values |= dict(sampling_per_token_logps=arrays["sampled"])
    lines = source[begin : source.rindex("\n", 0, last)]
    exec(textwrap.dedent(lines), values)  # noqa: S102
    return values["vllm_importance_sampling_ratio"]


def policy_loss(arrays: dict[str, torch.Tensor], settings: dict) -> torch.Tensor:
    log_probs, mask = arrays["log_probs"], arrays["mask"]
    one_process = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    is_cispo = settings["loss"] == "cispo"  # its limit is not added to 1
    weighs = settings.get("importance_weights", False)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        importance_sampling_level=settings["ratio"],
        beta=settings["kl"],
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"] + is_cispo,
        loss_type=settings["loss"],
        max_completion_length=settings["max_answer_tokens"],
        args=SimpleNamespace(
            delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
        ),
        use_vllm=weighs,
        vllm_importance_sampling_correction=weighs,
        vllm_importance_sampling_mode=settings.get("weight_mode", "token_truncate"),
        vllm_importance_sampling_clip_min=settings.get("weight_min"),
        vllm_importance_sampling_clip_max=settings.get("weight_max", 3.0) or None,
        current_gradient_accumulation_steps=1,
        accelerator=one_process,
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        ),
    )
    if settings["old_log_probs"] != "record":
        # what TRL computes before the first update, if it has vLLM
        arrays = arrays | dict(old=log_probs.detach())
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask.float())
    inputs |= dict(advantages=arrays["advantages"], num_items_in_batch=mask.sum())
    inputs |= dict(old_per_token_logps=arrays["old"], ref_per_token_logps=arrays["reference"])
    inputs |= dict(sampling_per_token_logps=arrays["sampled"])
    if weighs:
        inputs |= dict(importance_sampling_ratio=importance_weights(arrays, trainer))
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def preference_loss(arrays: dict[str, torch.Tensor], settings: dict) -> torch.Tensor:
    """Rows are all chosen answers, then all rejected ones."""
    log_probs, mask = arrays["log_probs"], arrays["mask"]
    chosen, rejected = (arrays["reference"] * mask).sum(1).chunk(2)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=settings["beta"],
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
    )
    width = log_probs.shape[1]
    zeros = torch.zeros(mask.shape)
    outputs = SimpleNamespace(
        log_probs=log_probs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    inputs = dict(
        attention_mask=mask,
        input_ids=torch.zeros(len(mask), width + 1, dtype=torch.long),
        completion_mask=torch.nn.functional.pad(mask, (1, 0)),
        ref_chosen_logps=chosen,
        ref_rejected_logps=rejected,
    )
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)


if __name__ == "__main__":
    arrays = {name: torch.from_numpy(x) for name, x in np.load(sys.argv[1]).items()}
    results = {"version": trl.__version__}
    for number, settings in enumerate(json.loads(sys.argv[3])):
        log_probs = arrays["log_probs"].clone().requires_grad_(True)
        loss = preference_loss if settings["loss"] == "dpo" else policy_loss
        value = loss(arrays | dict(log_probs=log_probs), settings)
        value.backward()
        results |= {f"loss{number}": value.item(), f"gradient{number}": log_probs.grad.numpy()}
    np.savez(sys.argv[2], **results)
