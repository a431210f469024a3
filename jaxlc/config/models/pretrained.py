"""Resolves `model.init_from`: a Hugging Face directory, a model of the hub, or a run; and warns about
sequences longer than the context length of a pretrained model. Imports no jax.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlc.config.frozen import setting_text
from jaxlc.config.kinds import scaled_kinds
from jaxlc.config.models import hub
from jaxlc.config.models.config_json import (
    CHANGEABLE_SETTINGS,
    language_model_of,
    settings_of,
    stored_settings,
)
from jaxlc.config.models.model_schema import KindConfig, ModelConfig, model_from, with_scaling
from jaxlc.config.models.presets import model_name
from jaxlc.config.values import defaults_of, flattened
from jaxlc.core import Unsupported, UserError, raise_all, reason_of
from jaxlc.core.files import (
    ADAPTER_FILE,
    check_no_pointers,
    file_inside,
    local_path,
    nearest_path,
    other_format,
    read_json_file,
)

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
# Of the tokenizer, the chat template and generation.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_FILE,
)
# of images
PROCESSOR_FILES = tuple(
    f"{x}_config.json" for x in ("preprocessor", "processor", "video_preprocessor")
)
# Names, dtypes, shapes and digests of the tensors that are not trained, and the model that has them.
UNTRAINED_FILE = "untrained.json"
# in the workdir of a run: config.json and the files above of the model it started from
COPY_DIRECTORY = "pretrained"


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model to start from."""

    init_from: str
    directory: Path  # with config.json, or of one checkpoint of a run
    is_run: bool

    def model_settings(self) -> dict[str, Any]:
        """The settings of ModelConfig without preset and init_from.

        Raises:
          UserError: the description of the model cannot be read, or is unsupported.
        """
        if self.is_run:
            return stored_settings(self.run_config()["model"], str(self.directory))
        return settings_of(self.config_json(), str(self.directory / CONFIG_FILE))

    def data_settings(self) -> dict[str, str]:
        """The settings of `data` that belong to the model: tokenizer, whose file may not exist, and
        how texts start.
        """
        if not self.is_run:
            return dict(tokenizer=str(self.directory / TOKENIZER_FILE))
        stored = self.run_config()["data"]
        names = ("tokenizer", "chat_template", "start_token")
        return {"start_token": ""} | {name: stored[name] for name in names if name in stored}

    def config_json(self) -> dict[str, Any]:
        """The fields of the language model in config.json; not for runs."""
        return dict(language_model_of(read_json(self.directory / CONFIG_FILE)))

    @property
    def has_images(self) -> bool:
        """Whether config.json is that of a model with images around a language model."""
        config = read_json(self.directory / CONFIG_FILE)
        return language_model_of(config) is not config

    def run_config(self) -> dict[str, dict[str, Any]]:
        """The config that a run stored in the checkpoint; not for Hugging Face models."""
        meta = read_json(self.directory / "meta" / "metadata")
        if "config" not in meta:
            raise UserError(
                f"the checkpoint {self.directory} has no config; use a different model.init_from"
            )
        return meta["config"]


def locate(init_from: str, *, with_weights: bool = False) -> Pretrained:
    """Finds what `init_from` names; downloads a model of the hub, its weights only if
    `with_weights`.

    Raises:
      UserError: there is no such directory, or it contains no model.
    """
    what = "config.model.init_from"
    path = find_directory(init_from, what, with_weights=with_weights)
    if (path / CONFIG_FILE).is_file():
        return Pretrained(init_from=init_from, directory=path, is_run=False)
    if (path / "meta" / "metadata").is_file():
        return Pretrained(init_from=init_from, directory=path, is_run=True)
    checkpoints = path / "checkpoints"
    steps = (
        [int(child.name) for child in checkpoints.iterdir() if child.name.isdigit()]
        if checkpoints.is_dir()
        else []
    )
    if steps:
        return Pretrained(init_from=init_from, directory=checkpoints / str(max(steps)), is_run=True)
    raise _no_model(init_from, what, f"{path} contains neither config.json nor checkpoints/")


def find_directory(name: str, what: str, *, with_weights: bool) -> Path:
    """The directory `name`, or the copy of a model of the hub, which is downloaded if there is no such directory.

    Args:
      name: a path, or a hub id ORGANIZATION/NAME.
      what: the setting or argument that has this value, for errors.
    Raises:
      UserError: there is no such directory, and no such model, or its files are pointers of Git LFS.
      Unsupported: it has a model in another format.
    """
    path = local_path(name)
    if not path.exists():
        if hub.is_model_id(name):
            return hub.download(
                name, what, hub.MODEL_FILES if with_weights else hub.DESCRIPTION_FILES
            )
        near = nearest_path(path) or nearest_path("runs" / path)
        raise _no_model(name, what, f"no such directory{f', did you mean {near}?' if near else ''}")
    has_model = any((path / name).exists() for name in (CONFIG_FILE, "checkpoints", "meta"))
    is_model = has_model and not (path / ADAPTER_FILE).is_file()
    if not is_model and (problem := other_format(path)):
        raise Unsupported(f"unsupported: {what} {name!r} {problem}")
    check_no_pointers(path)
    return path


def _no_model(name: str, what: str, problem: str) -> UserError:
    return UserError(
        f"invalid value {name!r} for {what} ({problem}): expected a Hugging Face directory with config.json and"
        " safetensors files, the workdir of a run, or a hub id ORGANIZATION/NAME"
    )


def original_of(init_from: str, workdir: Path | None = None) -> Pretrained | None:
    """The Hugging Face model that training started from, directly or through other runs; None: random weights.

    Args:
      init_from: of the run.
      workdir: of the run. If it has a copy of the model's files, the result is that copy, without weights.
    Raises:
      UserError: there is no copy, and the model or one of the runs does not exist any more.
    """
    while True:
        if workdir is not None and (workdir / COPY_DIRECTORY / CONFIG_FILE).is_file():
            return Pretrained(init_from=init_from, directory=workdir / COPY_DIRECTORY, is_run=False)
        if not init_from:
            return None
        source = locate(init_from)
        if not source.is_run:
            return source
        init_from = source.run_config()["model"]["init_from"]
        workdir = source.directory.parent.parent


def copy_description(init_from: str, workdir: Path) -> None:
    """Copies the files of the original model besides its weights to `workdir`, so that an export
    does not need it for them.

    Raises:
      UserError: a file that an export reads cannot be read.
    """
    original = original_of(init_from)
    if original is None:
        return
    eos_token_ids(original.directory)
    target = workdir / COPY_DIRECTORY
    target.mkdir(exist_ok=True)
    for name in (*TEXT_FILES, *PROCESSOR_FILES, CONFIG_FILE, UNTRAINED_FILE):
        if (original.directory / name).is_file():
            copy_file(original.directory, name, target)


def with_language_model(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model whose language model has other fields than in `config`.

    Args:
      config: of a language model, or of a model with images.
      fields: as `language_model_of` returns them.
    """
    before = language_model_of(config)
    outer = dict(config)
    if before is config:
        return dict(fields)
    text = outer["text_config"] = dict(config["text_config"])
    for name in before.keys() - fields.keys():
        outer.pop(name, None)
        text.pop(name, None)
    for name in (name for name in fields if name not in before or fields[name] != before[name]):
        for part in [x for x in (outer, text) if name in x] or [text]:
            part[name] = fields[name]
    return outer


def copy_file(directory: Path, name: str, target: Path) -> None:
    """Copies a file of a model to the directory `target`.

    Raises:
      UserError: it is a symbolic link to a file outside of the model.
    """
    try:
        source = file_inside(directory, name)
    except ValueError as error:
        raise UserError(f"cannot copy {directory / name}: {error}") from None
    (target / name).unlink(missing_ok=True)  # it may be a link as well
    shutil.copyfile(source, target / name)


def eos_token_ids(directory: Path) -> list[int]:
    """The tokens that end generation: of generation_config.json or, if it names none, of
    config.json.

    Raises:
      UserError: a file cannot be read.
    """
    for name in (GENERATION_FILE, CONFIG_FILE):
        content = read_json(directory / name) if (directory / name).is_file() else {}
        for fields in (content, content.get("text_config") or {}):
            named = fields.get("eos_token_id")
            ids = [x for x in (named if isinstance(named, list) else [named]) if isinstance(x, int)]
            if ids:
                return ids
    return []


def with_overrides(pretrained: Pretrained, explicit: dict[str, Any]) -> dict[str, Any]:
    """The settings of the model, with those of `explicit` that may differ from it: RoPE, the
    window, and a larger vocabulary.

    Raises:
      UserError: other settings of `explicit` differ; the message names all differences.
    """
    settings = {"kinds": dict[str, Any](), **pretrained.model_settings()}
    stored = flattened(settings)
    defaults = defaults_of(KindConfig)
    problems: list[str] = []
    for path, value in flattened(explicit).items():
        name = path.partition(".")[0]
        field = path.rpartition(".")[2]
        known = stored.get(path, defaults.get(field) if name == "kinds" else value)
        is_larger = name == "vocab_size" and value > known
        if path not in CHANGEABLE_SETTINGS and known != value and not is_larger:
            problems.append(
                f"config.model.{path}={setting_text(value)} contradicts {pretrained.init_from}, which has"
                f" {setting_text(known)}: remove that setting, or use --config.model.{path}={setting_text(known)}"
            )
    raise_all(problems)
    return with_scaling(
        settings, {name: value for name, value in explicit.items() if name != "kinds"}
    )


def read_json(path: Path, advice: str = "use a different model.init_from") -> dict[str, Any]:
    """The object in a JSON file of a model, a tokenizer, or adapters.

    Args:
      advice: the end of the error.
    Raises:
      UserError: it cannot be read.
    """
    try:
        content = read_json_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({reason_of(error)}); {advice}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} contains no JSON object; {advice}")
    return content


_BY_FACTOR = ("linear", "ntk", "llama3")  # kinds of scaling that a larger factor alone extends


def context_tokens(model: ModelConfig, trained_tokens: int = 0) -> int | None:
    """The longest sequence in tokens for which the weights and the RoPE of `model` are meant; None: unlimited, unknown.

    It is the length of the base model (max_position_embeddings of its config.json, or data.seq_len of a run), times the
    scaling that the settings add. It is unknown with another rope.theta, which extends the context as well, and without
    layers of kind full there is no limit.

    Args:
      trained_tokens: data.seq_len of the run that trained the weights; 0: they are those of model.init_from.
    """
    if scaled_kinds().isdisjoint(model.attentions) or model.rope.scaling == "dynamic_ntk":
        return None
    if not model.init_from:
        return trained_tokens or None
    base = _base_of(model)
    if base is None or model.rope.theta != base[0]["rope.theta"]:
        return None
    settings, length = base
    factor = settings["rope.factor"]
    original = settings["rope.original_tokens"] or length / factor
    is_same = model.rope.scaling == settings["rope.scaling"]
    if model.rope.scaling == "none":
        reached = length if is_same else original
    else:
        reached = model.rope.factor * (model.rope.original_tokens or original)
        if is_same:
            reached = max(reached, length * model.rope.factor / factor)
    return max(trained_tokens, int(reached))


def context_warning(
    model: ModelConfig, num_tokens: int, *, trained_tokens: int | None = None, stage: str = ""
) -> str | None:
    """One sentence if sequences of `num_tokens` are longer than the context of `model`, with the settings that extend
    it; None if they are not.

    Args:
      trained_tokens: None: a run is going to train the model. Otherwise, the model is used as it is; see
        `context_tokens`.
      stage: the name of the stage that trains, "" in a run without stages.
    """
    context = context_tokens(model, trained_tokens or 0)
    if context is None or num_tokens <= context:
        return None
    prefix = f"config.stages.{stage}." if stage else "config."
    if model.rope.scaling in _BY_FACTOR:
        longer = dict(factor=math.ceil(model.rope.factor * num_tokens / context))
    else:
        original = model.rope.original_tokens or context
        factor = math.ceil(num_tokens / original)
        longer = dict(scaling="yarn", factor=factor, original_tokens=original)
    flags = " ".join(f"--{prefix}model.rope.{name}={value}" for name, value in longer.items())
    limit = f"{context:,} tokens with its RoPE"
    if trained_tokens is None:
        return (
            f"{prefix}data.seq_len={num_tokens} is longer than the context of {model_name(vars(model))}, {limit}: use"
            f" {flags}, or shorter sequences (docs/extend_context.md)"
        )
    return (
        f"{num_tokens:,} tokens are more than the context of the model, {limit}, so expect poor results: to extend it,"
        f" train it with {flags} (docs/extend_context.md)"
    )


def _base_of(model: ModelConfig) -> tuple[Mapping[str, Any], int] | None:
    """The settings and the context length of model.init_from; None if it is gone or does not name
    its length.
    """
    try:
        source = locate(model.init_from)
        settings = source.model_settings()
        if source.is_run:
            stored = source.run_config()
            names = {name: stored["model"][name] for name in ("preset", "init_from")}
            length = stored["data"]["seq_len"]
            length = context_tokens(model_from({**settings, **names}), length) or length
        else:
            length = source.config_json()["max_position_embeddings"]
    except (UserError, KeyError):
        return None
    return (settings, length) if length else None
