"""Checks of a config before JAX starts: ranges, and settings that contradict each other. Imports no
jax.

`check` calls all of them. This module has the checks of attention, data, sources of a mixture,
memory, runtime, checkpoints, samples, post-training and rollouts.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from jaxlc.config.checks.layer_checks import (
    layer_problems,
    layers_by_path,
    lora_problems,
    precision_problems,
    size_problems,
    unsupported_problems,
    unused_problems,
    without_effect,
)
from jaxlc.config.checks.mesh_checks import (
    check_num_devices,
    length_problems,
    mesh_overrides,
    nearest_multiples,
    node_problems,
    split_problems,
    tile_problems,
    working_mesh,
)
from jaxlc.config.checks.stage_checks import training_problems
from jaxlc.config.frozen import SECTIONS, Config
from jaxlc.config.kinds import tensor_names
from jaxlc.config.models.model_schema import rope_problems
from jaxlc.config.schema import AttentionConfig, DataConfig, PosttrainConfig, SourceConfig
from jaxlc.config.values import invalid_value, range_problems
from jaxlc.core import UserError, nearest_name, raise_all, raise_first


def checkpoint_problems(config: Config) -> Iterator[str]:
    """The settings that keep checkpoints which are not saved, or not evaluated."""
    train = config.train
    saves = train.checkpoint_every_steps
    evaluations = train.eval_every_steps
    if bool(train.local_checkpoints) != bool(train.local_checkpoint_every_steps):
        yield (
            f"config.train.local_checkpoints={train.local_checkpoints!r} and"
            f" config.train.local_checkpoint_every_steps={train.local_checkpoint_every_steps} have an effect only"
            " together: set both or none"
        )
    if train.keep_every_steps and (not saves or train.keep_every_steps % saves):
        yield (
            f"config.train.keep_every_steps={train.keep_every_steps} is not a multiple of"
            f" config.train.checkpoint_every_steps={saves}, so these steps have no checkpoints; use"
            f" --config.train.checkpoint_every_steps={train.keep_every_steps}"
        )
    if train.keep_best_checkpoints and (not saves or not evaluations or saves % evaluations):
        yield (
            f"config.train.keep_best_checkpoints={train.keep_best_checkpoints} compares the held-out losses of"
            f" checkpoints, and config.train.checkpoint_every_steps={saves} is not a multiple of"
            f" config.train.eval_every_steps={evaluations}; use"
            f" --config.train.eval_every_steps={saves or 1}"
            f"{'' if saves else ' --config.train.checkpoint_every_steps=1'}"
        )


def sample_problems(config: Config) -> Iterator[str]:
    """The settings of samples and of early stopping that have no effect, or are unsupported."""
    train = config.train
    if bool(train.sample_every_steps) != bool(train.sample_prompts):
        yield (
            f"config.train.sample_every_steps={train.sample_every_steps} and"
            f" config.train.sample_prompts={train.sample_prompts} have an effect only together: set both or none"
        )
    if not train.sample_every_steps:
        names = ("sample_tokens", "sample_temperature", "sample_chat")
        reason = "without config.train.sample_every_steps; set it, or remove this"
        yield from without_effect("train", train, names, reason)
    if train.sample_every_steps and config.memory.parameters == "host":
        yield (
            "unsupported: config.train.sample_every_steps with config.memory.parameters='host'; use"
            " --config.train.sample_every_steps=0 --config.train.sample_prompts="
        )
    for name in ("keep_best_checkpoints", "early_stop_evals"):
        value = vars(train)[name]
        if value and not train.eval_sequences:
            yield (
                f"config.train.{name}={value} compares held-out losses, and config.train.eval_sequences=0 has none;"
                " use --config.train.eval_sequences=4"
            )
    if train.early_stop_evals and not train.eval_every_steps:
        yield (
            f"config.train.early_stop_evals={train.early_stop_evals} has no effect without"
            " config.train.eval_every_steps; set both"
        )


def _source_problems(source: SourceConfig, seq_len: int, names: list[str]) -> Iterator[str]:
    if not source.paths or "" in source.paths:
        others = [name for name in names if name != source.name]
        nearest = nearest_name(source.name, others)
        question = f"; did you mean the source {nearest}?" if nearest else ""
        yield f"paths is {source.paths}: give files, directories or glob patterns{question}"
    if source.chunk_tokens and not 1 <= source.chunk_tokens <= seq_len:
        yield f"chunk_tokens={source.chunk_tokens}: expected 1 to config.data.seq_len={seq_len}, or 0"
    if source.chunk_tokens and source.pool == "full_length":
        yield f"chunk_tokens={source.chunk_tokens} contradicts pool='full_length', whose chunks are full sequences"
    if source.overlong == "drop" and source.pool == "full_length":
        yield "overlong='drop' contradicts pool='full_length': no document would be left; use overlong='truncate'"
    chats = "chat_field" if source.chat_field else "chat_format"
    if source.token_field and source.has_chats:
        yield f"token_field={source.token_field!r} and {chats}={getattr(source, chats)!r} are both set: set one of them"
    if source.answer_weights != "token" and not source.has_chats:
        yield f"answer_weights={source.answer_weights!r} has no effect without chat_field; set it, such as to messages"
    if source.text_field != "text" and (source.has_chats or source.token_field):
        other = chats if source.has_chats else "token_field"
        yield f"text_field={source.text_field!r} has no effect with {other}={getattr(source, other)!r}; remove one"
    if source.max_tokens and source.max_tokens < source.min_tokens:
        yield f"max_tokens={source.max_tokens} is less than min_tokens={source.min_tokens}: no document is left"
    limits = source.length_limits
    weights = source.length_weights
    if list(limits) != sorted(set(limits)) or any(limit < 1 for limit in limits):
        yield f"length_limits={limits}: expected increasing numbers of tokens, at least 1"
    if (weights or limits) and len(weights) != len(limits) + 1:
        yield (
            f"length_weights has {len(weights)} values and length_limits {len(limits)}: expected one weight more than"
            " limits"
        )
    if weights and (min(weights) < 0 or max(weights) == 0):
        yield f"length_weights={weights}: expected weights of at least 0, one of them greater"


_PAIR_SETTINGS = ("label_smoothing", "target_margin")
_LABELED_SETTINGS = ("desirable_weight", "undesirable_weight")
_POLICY_SETTINGS = (
    "clip_low", "clip_high", "ratio", "kl", "old_log_probs", "scale_advantages", "mask_truncated", "max_answer_tokens",
    "delta", "importance_weights", "off_policy_mask_threshold", "replay_routing",
    "no_advantage",
)  # fmt: skip
_PREFERENCE_SETTINGS = ("beta", *_PAIR_SETTINGS, *_LABELED_SETTINGS)
_UNUSED = dict(  # by loss
    dpo=(*_POLICY_SETTINGS, *_LABELED_SETTINGS, "target_margin"),
    simpo=(*_POLICY_SETTINGS, *_LABELED_SETTINGS),
    kto=(*_POLICY_SETTINGS, *_PAIR_SETTINGS),
    apo_zero_unpaired=(*_POLICY_SETTINGS, *_PAIR_SETTINGS),
    grpo=(*_PREFERENCE_SETTINGS, "max_answer_tokens"),
    dapo=(*_PREFERENCE_SETTINGS, "max_answer_tokens"),
    dr_grpo=_PREFERENCE_SETTINGS,
    cispo=(*_PREFERENCE_SETTINGS, "max_answer_tokens", "clip_low", "delta"),
    reverse_kl=(  # advantages are of tokens
        *_PREFERENCE_SETTINGS, "max_answer_tokens", "kl", "ratio", "off_policy_mask_threshold", "scale_advantages",
        "no_advantage",
    ),
)  # fmt: skip
_WEIGHT_SETTINGS = ("weight_mode", "weight_min", "weight_max")
_FILE_SETTINGS = (
    "source",
    "directory",
    "wait_seconds",
    "max_policy_age",
    "export_every_steps",
    "export_command",
)
_SERVER_SETTINGS = (
    "server",
    "server_directory",
    "server_seconds",
    "server_max_loras",
    "server_data_parallel",
    "lag",
)


def posttrain_problems(config: Config) -> Iterator[str]:
    """Reasons why `config` cannot train on traces as set."""
    if config.attention.shared_prefixes and not config.attention.document_mask:
        yield (
            f"config.attention.shared_prefixes={config.attention.shared_prefixes} needs a document mask;"
            " use --config.attention.document_mask=True"
        )

    if config.data.shared_tokens != "leaf" and config.attention.shared_prefixes < 2:
        yield (
            f"config.data.shared_tokens={config.data.shared_tokens!r} has no effect without tokens in the loss that"
            " traces share; set --config.attention.shared_prefixes=2 or more"
        )
    yield from _loss_problems(config)
    yield from _rollout_problems(config)
    data = config.data
    used = "config.rollouts.source" if config.rollouts.source else "config.data.traces"
    has_traces = bool(data.traces or config.rollouts.source)
    if has_traces and (
        data.mixture or data.eval_sources or data.sources not in ((), DataConfig().sources)
    ):
        yield (
            f"{used} is set together with config.data.sources, data.mixture or data.eval_sources; clear these, or clear"
            f" it with --{used}="
        )


def _rollout_problems(config: Config) -> Iterator[str]:
    rollouts = config.rollouts
    posttrain = config.posttrain
    if not rollouts.source:
        reason = (
            "without config.rollouts.source; set --config.rollouts.source=model, server or files"
        )
        yield from without_effect("rollouts", rollouts, vars(rollouts), reason)
        return
    setting = f"config.rollouts.source={rollouts.source!r}"
    unused = {
        "files": [name for name in vars(rollouts) if name not in _FILE_SETTINGS],
        "model": ("wait_seconds", "max_policy_age", *_SERVER_SETTINGS),
        "server": ("wait_seconds", "max_policy_age", "max_replacements"),
    }[rollouts.source]
    yield from without_effect("rollouts", rollouts, unused, f"with {setting}; remove it")
    compares = posttrain.is_policy and posttrain.loss != "reverse_kl"
    if posttrain.no_advantage == "keep" or not compares:
        reason = "without a policy loss that drops groups (config.posttrain.no_advantage); use 0"
        yield from without_effect("rollouts", rollouts, ("max_replacements",), reason)
    if config.data.traces:
        yield f"{setting} replaces config.data.traces; clear these with --config.data.traces="
    has_teacher = posttrain.teacher_top_k and posttrain.temperature == 1
    if rollouts.teacher_server and not has_teacher:
        yield (
            "config.rollouts.teacher_server gives the candidates of config.posttrain.teacher_top_k; set it, and"
            " --config.posttrain.temperature=1"
        )
    if not posttrain.is_policy and not rollouts.teacher_server:
        yield f"{setting} needs a policy loss; use --config.posttrain.loss=grpo, dapo, dr_grpo or cispo"
    every = rollouts.export_every_steps
    checkpoints = config.train.checkpoint_every_steps
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
    if rollouts.source == "server":
        yield from _server_problems(config)
    if compares and rollouts.answers_per_prompt == 1:
        yield f"{setting} compares the answers of a prompt; use --config.rollouts.answers_per_prompt=2 or more"
    if posttrain.old_log_probs == "record":
        yield (
            f"{setting} has no old_log_probs, only those of the sampler; use --config.posttrain.old_log_probs=policy,"
            " or sampled"
        )
    for name in ("prompts", "reward"):
        if not getattr(rollouts, name):
            yield f"{setting} needs config.rollouts.{name}; set it"
    if posttrain.uses_reference and posttrain.reference == "record":
        yield (
            f"{setting} has no reference_log_probs; use --config.posttrain.reference=model, or base with LoRA, or set"
            " kl to 0"
        )


def _server_problems(config: Config) -> Iterator[str]:
    rollouts = config.rollouts
    if not rollouts.server:
        yield "config.rollouts.source='server' needs config.rollouts.server, such as http://localhost:8000; set it"
    if not config.lora.rank:
        yield (
            "config.rollouts.source='server' gives the server adapters; set config.lora.rank, or for whole weights"
            " config.rollouts.source='files' with export_every_steps"
        )
    if rollouts.server_max_loras < rollouts.lag + 2:
        yield (
            f"config.rollouts.lag={rollouts.lag} needs {rollouts.lag + 2} adapters in the server; start it with"
            f" --max-loras={rollouts.lag + 2} or more, and declare that: --config.rollouts.server_max_loras=NUMBER"
        )
    if rollouts.server_data_parallel > 1:
        yield (
            f"config.rollouts.server_data_parallel={rollouts.server_data_parallel}: an adapter may reach only some"
            " engines; start the server with --data-parallel-size=1, and use --config.rollouts.server_data_parallel=1"
        )
    if config.posttrain.importance_weights and rollouts.top_p < 1:
        yield (
            f"config.rollouts.top_p={rollouts.top_p:g} changes the log-probabilities of a server, which"
            " config.posttrain.importance_weights compares; use --config.rollouts.top_p=1"
        )


def _loss_problems(config: Config) -> Iterator[str]:
    posttrain = config.posttrain
    if not posttrain.loss:
        reason = (
            "without config.posttrain.loss; set it, such as --config.posttrain.loss=grpo or dpo"
        )
        used = ("teacher_top_k", "temperature") if posttrain.teacher_top_k else ()
        unused = [name for name in vars(posttrain) if name not in used]
        yield from without_effect("posttrain", posttrain, unused, reason)
        return
    if posttrain.teacher_top_k:
        yield (
            f"config.posttrain.teacher_top_k={posttrain.teacher_top_k} with config.posttrain.loss={posttrain.loss!r}: a"
            " top-k KL divergence as an advantage has no gradient in expectation, since it does not depend on the"
            " sampled token; use --config.posttrain.loss= to differentiate it, or --config.posttrain.loss=reverse_kl"
            " with --config.posttrain.teacher_top_k=0"
        )
    setting = f"config.posttrain.loss={posttrain.loss!r}"
    yield from without_effect(
        "posttrain", posttrain, _UNUSED[posttrain.loss], f"with {setting}; remove it"
    )
    yield from _weight_problems(posttrain)
    if posttrain.is_pairwise and not config.attention.shared_prefixes:
        yield f"{setting} needs the answers of a pair in one sequence; use --config.attention.shared_prefixes=1"
        if posttrain.uses_reference and posttrain.reference == "record":
            yield (
                "config.posttrain.reference='record' reads reference_log_probs of the records, which `jaxlc logprobs`"
                " adds; without them, set it to base and config.lora.rank, or to model"
            )
    if config.data.shared_tokens == "node" and not posttrain.is_policy:
        yield f"{setting} sums over the tokens of an answer; use --config.data.shared_tokens=leaf"
    if posttrain.loss == "dr_grpo" and not posttrain.max_answer_tokens:
        yield f"{setting} divides by a constant length; set config.posttrain.max_answer_tokens"
    yield from _reference_problems(config)
    if posttrain.replay_routing and not config.model.layers_with_experts:
        yield (
            "config.posttrain.replay_routing=True needs a model with experts; use"
            " --config.posttrain.replay_routing=False"
        )
    if not config.attention.document_mask:
        yield f"{setting} needs a document mask; use --config.attention.document_mask=True"
    if config.precision.compute == "fp16":
        yield f"unsupported: {setting} with config.precision.compute='fp16'; use --config.precision.compute=bf16"
    if config.train.z_loss:
        yield f"unsupported: {setting} with config.train.z_loss={config.train.z_loss:g}; use --config.train.z_loss=0"


def _weight_problems(posttrain: PosttrainConfig) -> Iterator[str]:
    low = posttrain.weight_min
    high = posttrain.weight_max
    limit = 1 + posttrain.clip_high
    if not posttrain.importance_weights:
        reason = "without config.posttrain.importance_weights; set it to True"
        yield from without_effect("posttrain", posttrain, _WEIGHT_SETTINGS, reason)
    elif posttrain.old_log_probs == "sampled":
        yield (
            "config.posttrain.importance_weights=True compares old with sampled log-probabilities, and"
            " config.posttrain.old_log_probs='sampled' makes them equal; use --config.posttrain.old_log_probs=policy,"
            " or record with the values of `jaxlc logprobs --field=old_log_probs`"
        )
    if 0 < high <= low:
        yield f"config.posttrain.weight_min={low:g} is not less than weight_max={high:g}; use a lower one"
    if posttrain.loss != "cispo" and 0 < posttrain.delta <= limit:
        yield (
            f"config.posttrain.delta={posttrain.delta:g} is not above 1 + config.posttrain.clip_high={limit:g};"
            " increase it"
        )


def _reference_problems(config: Config) -> Iterator[str]:
    posttrain = config.posttrain
    model = config.model
    is_used = posttrain.uses_reference and posttrain.reference in ("auto", "model")
    if posttrain.reference_model and not is_used:
        yield (
            f"config.posttrain.reference_model={posttrain.reference_model!r} has no effect without"
            " config.posttrain.reference='model' and a loss that uses it, such as dpo or one with kl; set these, or"
            " remove it"
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
    if posttrain.loss == "kto" and posttrain.reference == "record":
        yield (
            "config.posttrain.reference='record' has no log-probabilities of the mismatched answers of"
            " config.posttrain.loss='kto'; use --config.posttrain.reference=model, or base with LoRA"
        )
    if posttrain.reference != "model":
        return
    if not (posttrain.reference_model or model.init_from):
        yield (
            "config.posttrain.reference='model' needs weights: set config.posttrain.reference_model or"
            " config.model.init_from"
        )


def check(config: Config, *, on_devices: bool = True) -> None:
    """Checks all values of `config`.

    Args:
      on_devices: whether the mesh is checked, too.
    Raises:
      UserError: all values that are out of range; or all that contradict others.
    """
    raise_all(
        problem
        for section in SECTIONS
        for problem in range_problems(section, getattr(config, section))
    )
    sizes = config.model.by_path.items()
    too_large = {x: size for x, size in sizes if isinstance(size, int) and size >= 2**31}
    raise_all(invalid_value(f"model.{x}", too_large[x], "less than 2^31") for x in too_large)
    unused = [*unused_problems(config)]
    in_model = (problem for problem in unused if problem.startswith("config.model."))
    for first in (layer_problems(config), in_model, size_problems(config)):
        raise_first(first)  # later ones rely on the sizes
    checks = (lambda _: unused, *_CHECKS, *([_mesh_problems] if on_devices else []))
    raise_all(problem for problems in checks for problem in problems(config))


def _mesh_problems(config: Config) -> Iterator[str]:
    """What the mesh does not divide: first devices and heads, whose advice is another mesh, then
    lengths.
    """
    try:
        if config.runtime.simulated_devices:
            check_num_devices(
                config, config.runtime.simulated_devices, "config.runtime.simulated_devices is"
            )
    except UserError as error:
        yield str(error)
        return
    for problem in split_problems(config):
        mesh = working_mesh(config, config.mesh.num_devices)
        advice = "a smaller --config.mesh.tensor or --config.mesh.context"
        if mesh:
            advice = mesh_overrides(config.mesh, mesh)
        elif not any(split_problems(replace(config, attention=AttentionConfig()))):
            advice = "--config.attention.strategy=ring"
        yield f"{problem}; use {advice}"
        return
    yield from [*length_problems(config), *node_problems(config)] or tile_problems(config)


def _rope_problems(config: Config) -> Iterator[str]:
    layers = layers_by_path(config.model)
    yield from dict.fromkeys(problem for _, layer in layers for problem in rope_problems(layer))


def _attention_problems(config: Config) -> Iterator[str]:
    attention = config.attention
    if attention.strategy != "hybrid" and attention.ulysses_degree > 1:
        yield (
            f"config.attention.ulysses_degree={attention.ulysses_degree} is for strategy 'hybrid', and"
            f" config.attention.strategy is {attention.strategy!r}; use --config.attention.ulysses_degree=1"
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    setting = "optimizer.schedule_steps" if optimizer.schedule_steps else "train.steps"
    steps = optimizer.schedule_steps or config.train.steps
    if optimizer.schedule == "wsd":
        if optimizer.decay_steps == 0:
            yield (
                "config.optimizer.schedule='wsd' needs config.optimizer.decay_steps, usually a tenth of the steps;"
                f" use --config.optimizer.decay_steps={max(1, steps // 10)}"
            )
        if optimizer.warmup_steps + optimizer.decay_steps > steps and not config.train.epochs:
            yield (
                f"config.optimizer.warmup_steps={optimizer.warmup_steps} and decay_steps={optimizer.decay_steps} do not"
                f" fit into config.{setting}={steps}; shorten them or train for"
                f" {optimizer.warmup_steps + optimizer.decay_steps} steps or more"
            )
    if optimizer.schedule == "constant":
        reason = "with config.optimizer.schedule='constant'; remove it"
        yield from without_effect("optimizer", optimizer, ("final_learning_rate_ratio",), reason)
    if optimizer.decay_steps and optimizer.schedule != "wsd":
        yield (
            f"config.optimizer.decay_steps={optimizer.decay_steps} has no effect with config.optimizer.schedule="
            f"{optimizer.schedule!r}, which has no separate decay; use --config.optimizer.schedule=wsd with it, or set"
            " it to 0"
        )
    if optimizer.name != "muon":
        muon_settings = ("momentum", "muon_scale", "muon_heads")
        reason = "without --config.optimizer.name=muon; set it, or remove this"
        yield from without_effect("optimizer", optimizer, muon_settings, reason)
    if optimizer.initial_learning_rate_ratio and not optimizer.warmup_steps:
        yield (
            f"config.optimizer.initial_learning_rate_ratio={optimizer.initial_learning_rate_ratio} has no effect"
            " without a warm-up; set config.optimizer.warmup_steps, or set it to 0"
        )


def _data_problems(config: Config) -> Iterator[str]:
    if not (
        config.data.sources or config.data.mixture or config.data.traces or config.rollouts.source
    ):
        yield "config.data.sources is empty: give files, directories, glob patterns, or 'python-stdlib'"
    for name, sources in (
        ("sources", config.data.sources),
        ("eval_sources", config.data.eval_sources),
    ):
        if "" in sources:
            yield f"config.data.{name} is {sources}, with an empty name in it; remove the empty name"
    if config.data.mixture and config.data.sources not in ((), DataConfig().sources):
        yield (
            "config.data.sources and config.data.mixture are both set: add the sources to the mixture, as a source, or"
            " clear them with --config.data.sources="
        )
    if not config.data.eval_sources:
        reason = "without config.data.eval_sources, since held-out chats are read like the training chats; remove it"
        yield from without_effect(
            "data", config.data, ("eval_chat_format", "eval_chat_field"), reason
        )
    if not config.data.stream:
        reason = "without --config.data.stream=True; set it, or remove this"
        yield from without_effect("data", config.data, ("stream_cache_gib",), reason)
    names = [source.name for source in config.data.mixture]
    if names and all(source.share == 0 for source in config.data.mixture):
        yield "all shares of config.data.mixture are 0: give a source a share greater than 0"
    for source in config.data.mixture:
        yield from range_problems(f"data.mixture.{source.name}", source)
        for problem in _source_problems(source, config.data.seq_len, names):
            yield f"config.data.mixture.{source.name}.{problem}"
    # a stream does not have the whole corpus, and reads only data.sources
    data = config.data
    sources = [source for source in data.mixture if source.share]
    has_heldout = not data.eval_sources and config.train.eval_sequences
    unsupported = {
        "config.data.traces or config.rollouts": data.traces or config.rollouts.source,
        "several sources in config.data.mixture; use one, as their shares need the padding of all": sources[
            1:
        ],
        "pool='full_length'; use min_tokens": any(x.pool == "full_length" for x in sources),
        "text_suffixes, whose files it does not read": any(x.text_suffixes for x in sources),
        "answer_weights='answer'; use token": any(x.answer_weights == "answer" for x in sources),
        "config.train.epochs; use --config.train.steps or --config.train.tokens": config.train.epochs,
        "config.data.eval_fraction; set --config.data.eval_sources, or --config.train.eval_sequences=0": has_heldout,
    }
    for what, is_used in unsupported.items():
        if data.stream and is_used:
            yield f"unsupported: config.data.stream with {what}"


def _memory_problems(config: Config) -> Iterator[str]:
    memory = config.memory
    for setting, names in (("save", memory.save), ("offload", memory.offload)):
        for name in names:
            if name not in tensor_names():
                yield f"config.memory.{setting} names {name!r}, which is not one of {', '.join(tensor_names())}"
    twice = sorted(set(memory.save) & set(memory.offload))
    if twice:
        yield f"config.memory.save and config.memory.offload both name {twice[0]!r}; remove it from one of them"
    if memory.remat == "none" and (
        memory.save or memory.offload or memory.layers_per_remat_group > 1
    ):
        yield (
            "config.memory.remat='none' saves all activations on the device, so memory.save, memory.offload and"
            " memory.layers_per_remat_group have no effect; use --config.memory.remat=full or attention with them"
        )
    if memory.remat == "none" and memory.parameters == "host":
        yield (
            "unsupported: config.memory.parameters='host' with memory.remat='none', which would keep the copied weights"
            " of all layers on the device; use --config.memory.remat=full or attention"
        )
    if memory.remat == "matmuls" and memory.offload:
        yield (
            "unsupported: config.memory.remat='matmuls' with memory.offload; use --config.memory.remat=full and name"
            " the tensors in memory.save and memory.offload"
        )


def _runtime_problems(config: Config) -> Iterator[str]:
    runtime = config.runtime
    if 0 < runtime.num_processes <= runtime.process_id:
        yield (
            f"config.runtime.process_id={runtime.process_id} is too large for num_processes={runtime.num_processes};"
            " processes are numbered from 0"
        )
    if runtime.num_processes and runtime.simulated_devices % runtime.num_processes:
        yield (
            f"config.runtime.simulated_devices={runtime.simulated_devices} does not divide among"
            f" num_processes={runtime.num_processes};"
            f" use {nearest_multiples(runtime.simulated_devices, runtime.num_processes)}"
        )
    address = runtime.coordinator_address
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdigit()):
        yield f"invalid value {address!r} for config.runtime.coordinator_address: expected host:port"
    if runtime.transport == "peer" and runtime.num_processes > 1:
        yield (
            "unsupported: config.runtime.transport='peer', which copies within one process, with"
            f" num_processes={runtime.num_processes}; use --config.runtime.transport=symmetric, nvshmem or nccl"
        )
    if runtime.unified_memory_fraction and not runtime.unified_memory:
        yield (
            f"config.runtime.unified_memory_fraction={runtime.unified_memory_fraction} has no effect without unified"
            " memory; use --config.runtime.unified_memory=True with it"
        )


def _profile_problems(config: Config) -> Iterator[str]:
    steps = config.profile.steps
    if not steps:
        reason = "without config.profile.steps; set it, or remove this"
        yield from without_effect("profile", config.profile, ("tool", "processes"), reason)
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", steps)
    if steps and (match is None or int(match[1]) >= int(match[2])):
        yield f"invalid value {steps!r} for config.profile.steps: expected FIRST:END, such as 10:13 for steps 10 to 12"


_CHECKS = (  # they do not depend on each other
    unsupported_problems,
    _rope_problems,
    _attention_problems,
    _optimizer_problems,
    _data_problems,
    _memory_problems,
    _runtime_problems,
    _profile_problems,
    checkpoint_problems,
    sample_problems,
    precision_problems,
    lora_problems,
    training_problems,
    posttrain_problems,
)
