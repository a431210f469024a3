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
from trl import DPOTrainer, GRPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer


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


def labeled_loss(arrays: dict[str, torch.Tensor], settings: dict) -> torch.Tensor:
    """Of answers whose label is true if their advantage is positive; `old` and `sampled` are the
    log-probabilities of the mismatched answers, of the policy and of the reference, or the other
    way round: the estimate of the divergence is negative, or positive.
    """
    new, reference = ("old", "sampled") if settings["beta"] < 0.2 else ("sampled", "old")
    mask, width = arrays["mask"], arrays["mask"].shape[1]
    ids = torch.zeros(len(mask), width + 1, dtype=torch.long)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        calculate_KL=settings["loss"] == "kto",
        loss_type=settings["loss"],
        beta=settings["beta"],
        desirable_weight=settings.get("desirable_weight", 1.0),
        undesirable_weight=settings.get("undesirable_weight", 1.0),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": collections.defaultdict(list)},
    )
    trainer._compute_kl_logps = lambda *args: KTOTrainer._compute_kl_logps(trainer, *args)

    def model(**kwargs):
        log_probs = arrays[new] if kwargs["input_ids"].any() else arrays["log_probs"]
        zeros = torch.zeros(mask.shape)
        return SimpleNamespace(log_probs=log_probs * mask, entropy=zeros, mean_logits=zeros)

    inputs = dict(
        input_ids=ids,
        attention_mask=ids,
        completion_mask=torch.nn.functional.pad(mask, (1, 0)),
        label=arrays["advantages"] > 0,
        ref_logps=(arrays["reference"] * mask).sum(1),
        KL_input_ids=ids + 1,
        KL_attention_mask=ids,
        KL_completion_mask=torch.nn.functional.pad(mask, (1, 0)),
        ref_KL_logps=(arrays[reference] * mask).sum(1),
    )
    return KTOTrainer._compute_loss(trainer, model, inputs, False)


def simpo_loss(arrays: dict[str, torch.Tensor], settings: dict) -> torch.Tensor:
    """Rows are all chosen answers, then all rejected ones."""
    mask = arrays["mask"]
    trainer = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        beta=settings["beta"],
        simpo_gamma=settings["target_margin"],
        label_smoothing=settings.get("label_smoothing", 0.0),
        accelerator=SimpleNamespace(device="cpu"),
    )
    # logits of two tokens, of which the second has the log-probability
    log_probs = torch.nn.functional.pad(arrays["log_probs"], (0, 1))
    others = torch.log(-torch.expm1(log_probs.clamp(max=-1e-3)))
    labels = torch.nn.functional.pad(torch.where(mask > 0, 1, -100), (1, 0), value=-100)
    means = CPOTrainer.get_batch_logps(torch.stack([others, log_probs], -1), labels, True)
    return CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()


LOSSES = dict(dpo=preference_loss, simpo=simpo_loss, kto=labeled_loss)
LOSSES["apo_zero_unpaired"] = labeled_loss

if __name__ == "__main__":
    arrays = {name: torch.from_numpy(x) for name, x in np.load(sys.argv[1]).items()}
    results = {"version": trl.__version__}
    for number, settings in enumerate(json.loads(sys.argv[3])):
        log_probs = arrays["log_probs"].clone().requires_grad_(True)
        loss = LOSSES.get(settings["loss"], policy_loss)
        value = loss(arrays | dict(log_probs=log_probs), settings)
        value.backward()
        results |= {f"loss{number}": value.item(), f"gradient{number}": log_probs.grad.numpy()}
    np.savez(sys.argv[2], **results)
