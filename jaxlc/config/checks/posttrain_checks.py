"""Checks of config.posttrain, shared prefixes and traces against other settings. Imports no jax."""

from collections.abc import Iterable, Iterator

from jaxlc.config.frozen import Config
from jaxlc.config.schema import DataConfig, PosttrainConfig, RolloutsConfig

_OF_DPO = ("beta", "label_smoothing")
_OF_POLICY_LOSSES = (
    "clip_low", "clip_high", "ratio", "kl", "old_log_probs", "scale_advantages", "mask_truncated", "max_answer_tokens",
)  # fmt: skip
_OF_MODEL = ("prompts", "prompts_per_step", "answers_per_prompt", "max_tokens", "top_p", "reward", "reward_seconds")


def posttrain_problems(config: Config) -> Iterator[str]:
    """Reasons why `config` cannot train on traces as set."""
    yield from _prefix_problems(config)
    yield from _loss_problems(config)
    yield from _rollout_problems(config)
    data = config.data
    used = "config.rollouts.source" if config.rollouts.source else "config.data.traces"
    has_traces = bool(data.traces or config.rollouts.source)
    if has_traces and (data.mixture or data.eval_sources or data.sources not in ((), DataConfig().sources)):
        yield (
            f"{used} is set together with config.data.sources, data.mixture or data.eval_sources; clear these, or clear"
            f" it with --{used}="
        )


def _without_effect(
    section: str, values: PosttrainConfig | RolloutsConfig, names: Iterable[str], reason: str
) -> Iterator[str]:
    """The settings among `names` that are not the default."""
    for name in names:
        if getattr(values, name) != getattr(type(values)(), name):
            yield f"config.{section}.{name}={getattr(values, name)!r} has no effect {reason}"


def _prefix_problems(config: Config) -> Iterator[str]:
    if config.attention.shared_prefixes and not config.attention.document_mask:
        yield ("config.attention.shared_prefixes=True needs a document mask; use --config.attention.document_mask=True")


def _rollout_problems(config: Config) -> Iterator[str]:
    rollouts, posttrain = config.rollouts, config.posttrain
    if not rollouts.source:
        reason = "without config.rollouts.source; set --config.rollouts.source=model or files"
        yield from _without_effect("rollouts", rollouts, vars(rollouts), reason)
        return
    setting = f"config.rollouts.source={rollouts.source!r}"
    unused = _OF_MODEL if rollouts.source == "files" else ("wait_seconds",)
    yield from _without_effect("rollouts", rollouts, unused, f"with {setting}; remove it")
    if config.data.traces:
        yield f"{setting} replaces config.data.traces; clear these with --config.data.traces="
    if posttrain.loss in ("", "dpo"):
        yield f"{setting} needs a policy loss; use --config.posttrain.loss=grpo, dapo or dr_grpo"
    every, checkpoints = rollouts.export_every_steps, config.train.checkpoint_every_steps
    if every and (rollouts.source != "files" or not checkpoints or every % checkpoints):
        yield (
            f"config.rollouts.export_every_steps={every} exports checkpoints for another program: it needs"
            " config.rollouts.source='files' and a multiple of config.train.checkpoint_every_steps; use"
            f" --config.train.checkpoint_every_steps={every}"
        )
    if rollouts.export_command and not every:
        yield "config.rollouts.export_command has no effect without config.rollouts.export_every_steps; set both"
    if rollouts.source == "files":
        return
    if rollouts.answers_per_prompt == 1:
        yield f"{setting} compares the answers of a prompt; use --config.rollouts.answers_per_prompt=2 or more"
    for name in ("prompts", "reward"):
        if not getattr(rollouts, name):
            yield f"{setting} needs config.rollouts.{name}; set it"
    if posttrain.uses_reference and posttrain.reference == "record":
        yield (
            f"{setting} has no reference_log_probs; use --config.posttrain.reference=model, or base with LoRA, or set"
            " kl to 0"
        )


def _loss_problems(config: Config) -> Iterator[str]:
    posttrain = config.posttrain
    if not posttrain.loss:
        reason = "without config.posttrain.loss; set --config.posttrain.loss=grpo, dapo, dr_grpo or dpo"
        yield from _without_effect("posttrain", posttrain, vars(posttrain), reason)
        return
    setting = f"config.posttrain.loss={posttrain.loss!r}"
    unused = _OF_POLICY_LOSSES if posttrain.loss == "dpo" else _OF_DPO
    if posttrain.loss in ("grpo", "dapo"):
        unused = (*unused, "max_answer_tokens")
    yield from _without_effect("posttrain", posttrain, unused, f"with {setting}; remove it")
    if posttrain.loss == "dpo" and not config.attention.shared_prefixes:
        yield f"{setting} needs the answers of a pair in one sequence; use --config.attention.shared_prefixes=True"
        if posttrain.reference == "record":
            yield (
                "config.posttrain.reference='record' reads reference_log_probs of the records, which `jaxlc logprobs`"
                " adds; without them, set it to base and config.lora.rank, or to model"
            )
    if posttrain.loss == "dr_grpo" and not posttrain.max_answer_tokens:
        yield f"{setting} divides by a constant length; set config.posttrain.max_answer_tokens"
    yield from _reference_problems(config)
    if not config.attention.document_mask:
        yield f"{setting} needs a document mask; use --config.attention.document_mask=True"
    if config.precision.compute == "fp16":
        yield f"unsupported: {setting} with config.precision.compute='fp16'; use --config.precision.compute=bf16"
    if config.train.z_loss:
        yield f"unsupported: {setting} with config.train.z_loss={config.train.z_loss:g}; use --config.train.z_loss=0"


def _reference_problems(config: Config) -> Iterator[str]:
    posttrain, model = config.posttrain, config.model
    if posttrain.reference_model and not posttrain.uses_reference_model:
        yield (
            f"config.posttrain.reference_model={posttrain.reference_model!r} has no effect without"
            " config.posttrain.reference='model' and a loss that uses it, dpo or one with kl; set these, or remove it"
        )
    if not posttrain.uses_reference:
        return
    if posttrain.reference == "base":
        if not config.lora.rank:
            yield (
                "config.posttrain.reference='base' is the model without adapters, and config.lora.rank is 0; use LoRA,"
                " or --config.posttrain.reference=record"
            )
        if config.train.trainable:
            yield (
                f"config.posttrain.reference='base' with config.train.trainable={','.join(config.train.trainable)},"
                " which changes the base model; use --config.posttrain.reference=record"
            )
    if posttrain.reference != "model":
        return
    if not (posttrain.reference_model or model.init_from):
        yield (
            "config.posttrain.reference='model' needs weights: set config.posttrain.reference_model or"
            " config.model.init_from"
        )
