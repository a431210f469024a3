"""Checks of config.posttrain, shared prefixes and traces against other settings. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.data_schema import DataConfig
from jaxlc.config.frozen import Config
from jaxlc.config.posttrain_schema import PosttrainConfig, RolloutsConfig


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


def _prefix_problems(config: Config) -> Iterator[str]:
    attention, model = config.attention, config.model
    if not attention.shared_prefixes:
        return
    setting = "config.attention.shared_prefixes=True"
    if not attention.document_mask:
        yield f"{setting} needs a document mask; use --config.attention.document_mask=True"
    if config.memory.tile_tokens:
        yield (
            f"unsupported: {setting} with config.memory.tile_tokens={config.memory.tile_tokens}; use"
            " --config.memory.tile_tokens=0 with more context ranks, or --config.attention.shared_prefixes=False, which"
            " repeats the prefixes"
        )
    is_sliding = any(map(model.window_of, model.layer_kinds))
    if is_sliding and config.mesh.context > 1 and attention.strategy != "ulysses":
        yield (
            f"unsupported: {setting} with sliding layers and config.attention.strategy={attention.strategy!r}; use"
            " --config.attention.strategy=ulysses, or --config.attention.shared_prefixes=False, which repeats the"
            " prefixes"
        )


def _rollout_problems(config: Config) -> Iterator[str]:
    rollouts, posttrain = config.rollouts, config.posttrain
    if not rollouts.source:
        for name, default in vars(RolloutsConfig()).items():
            if getattr(rollouts, name) != default:
                yield (
                    f"config.rollouts.{name}={getattr(rollouts, name)!r} has no effect without config.rollouts.source;"
                    " set --config.rollouts.source=model or files"
                )
        return
    setting = f"config.rollouts.source={rollouts.source!r}"
    if config.data.traces:
        yield f"{setting} replaces config.data.traces; clear these with --config.data.traces="
    if posttrain.loss in ("", "dpo"):
        yield f"{setting} needs a policy loss; use --config.posttrain.loss=grpo, dapo or dr_grpo"
    if rollouts.source == "files":
        return
    for name in ("prompts", "reward"):
        if not getattr(rollouts, name):
            yield f"{setting} needs config.rollouts.{name}; set it"
    if posttrain.uses_reference and posttrain.reference == "record":
        yield f"{setting} has no reference_log_probs; use --config.posttrain.reference=base with LoRA, or set kl to 0"
    if posttrain.old_log_probs == "record" and posttrain.temperature != 1:
        yield (
            f"config.posttrain.old_log_probs='record' with posttrain.temperature={posttrain.temperature:g}: the sampler"
            " knows log-probabilities at temperature 1; use --config.posttrain.old_log_probs=policy"
        )


def _loss_problems(config: Config) -> Iterator[str]:
    posttrain = config.posttrain
    if not posttrain.loss:
        for name, default in vars(PosttrainConfig()).items():
            if getattr(posttrain, name) != default:
                yield (
                    f"config.posttrain.{name}={getattr(posttrain, name)!r} has no effect without config.posttrain.loss;"
                    " set --config.posttrain.loss=grpo, dapo, dr_grpo or dpo"
                )
        return
    setting = f"config.posttrain.loss={posttrain.loss!r}"
    if posttrain.loss == "dpo" and not config.attention.shared_prefixes:
        yield f"{setting} needs the answers of a pair in one sequence; use --config.attention.shared_prefixes=True"
    if posttrain.loss == "dr_grpo" and not posttrain.max_answer_tokens:
        yield f"{setting} divides by a constant length; set config.posttrain.max_answer_tokens"
    if posttrain.uses_reference and posttrain.reference == "base":
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
    if not config.attention.document_mask:
        yield f"{setting} needs a document mask; use --config.attention.document_mask=True"
    if config.precision.compute == "fp16":
        yield f"unsupported: {setting} with config.precision.compute='fp16'; use --config.precision.compute=bf16"
    if config.train.z_loss:
        yield f"unsupported: {setting} with config.train.z_loss={config.train.z_loss:g}; use --config.train.z_loss=0"
