"""The files of an exported model besides weights and config.json: tokenizer, chat template and generation settings.

Inference engines read the chat template from chat_template.jinja, and the tokens that end an answer from
generation_config.json, config.json and the eos_token of tokenizer_config.json.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxlc.config import Config
from jaxlc.config.models.pretrained import (
    GENERATION_FILE,
    TEXT_FILES,
    TOKENIZER_FILE,
    Pretrained,
    copy_file,
    eos_token_ids,
    read_json,
)
from jaxlc.data.tokens.chat import ChatTemplate
from jaxlc.data.tokens.chat_environment import without_generation_tags
from jaxlc.data.tokens.fitting_template import end_of_turn_id
from jaxlc.data.tokens.stops import stops_of, trained_template
from jaxlc.data.tokens.tokenizers import Tokenizer, load_tokenizer, starting_with, tokenizer_file, tokenizer_of

_TEMPLATE_FILE, _TOKENIZER_SETTINGS = "chat_template.jinja", "tokenizer_config.json"
_TOKENIZER_SETTINGS_BEFORE = "special_tokens_map.json"  # transformers 4 prefers its tokens


def write_text_files(config: Config, source: Pretrained | None, target: Path, *, longest: int) -> dict[str, Any]:
    """Writes the files to `target`; returns the fields of config.json that follow from them.

    The files of the model that training started from are copied. They change if the run trained on chats, or on longer
    sequences.

    Args:
      longest: tokens of the longest sequences that the model was trained on.
    Raises:
      UserError: the tokenizer or the chat template of the run cannot be read.
    """
    _copy(config, source, target)
    changes: dict[str, Any] = {}
    has_tokenizer = (target / TOKENIZER_FILE).is_file()
    tokenizer = tokenizer_of(replace(config.data, tokenizer=str(target))) if has_tokenizer else load_tokenizer("bytes")
    if tokenizer.start_ids.tolist() != tokenizer.own_start_ids.tolist():
        _write(target / TOKENIZER_FILE, starting_with(tokenizer.start_ids, read_json(target / TOKENIZER_FILE)))
    template = trained_template(config, tokenizer) if has_tokenizer else None
    known = eos_token_ids(source.directory) if source else []
    stop_ids = stops_of(config, tokenizer, source, template).ids
    if template is not None:
        changes = _write_template(config, template, tokenizer, target)
    elif set(stop_ids) <= set(known):
        stop_ids = []
    if stop_ids and (template is not None or (target / GENERATION_FILE).is_file()):
        settings = _read(target / GENERATION_FILE) or _known_ids(source)
        _write(target / GENERATION_FILE, settings | dict(eos_token_id=stop_ids))
    _write_tokenizer_settings(target, changes, longest)
    return dict(eos_token_id=stop_ids if len(stop_ids) > 1 else stop_ids[0]) if stop_ids else {}


def _copy(config: Config, source: Pretrained | None, target: Path) -> None:
    """Copies the tokenizer of the run, with its chat template, and the generation settings of its model."""
    base = None if source is None else source.directory
    directory = _tokenizer_directory(config, base)
    for name in TEXT_FILES:
        origin = base if name == GENERATION_FILE else directory
        if origin is not None and (origin / name).is_file():
            copy_file(origin, name, target)
    if _read(target / GENERATION_FILE) == {}:  # turns off the fallback of transformers to config.json
        (target / GENERATION_FILE).unlink(missing_ok=True)


def _tokenizer_directory(config: Config, base: Path | None) -> Path | None:
    """The directory of the run's tokenizer: `base`, a copy that is always there, or that of another tokenizer."""
    if config.data.tokenizer == "bytes":
        return base
    own = tokenizer_file(config.data.tokenizer)
    copy = None if base is None else base / TOKENIZER_FILE
    if copy is not None and copy.is_file() and (not own.is_file() or own.read_bytes() == copy.read_bytes()):
        return base
    return own.parent


def _write_template(config: Config, template: ChatTemplate, tokenizer: Tokenizer, target: Path) -> dict[str, Any]:
    """Writes the template without tags that inference engines cannot parse.

    Returns:
      The changes of tokenizer_config.json, where None removes a field.
    """
    changes = dict[str, Any]()
    if (
        end_of_turn_id(template, tokenizer) is not None and "eos_token" not in template.source
    ):  # which would render it otherwise
        changes["eos_token"] = template.end_of_turn
    source = without_generation_tags(template.source)
    if config.data.chat_template or source != template.source:
        (target / _TEMPLATE_FILE).write_text(source, encoding="utf-8")
        (target / "chat_template.json").unlink(missing_ok=True)
        changes["chat_template"] = None  # transformers prefers the file
    return changes


def _write_tokenizer_settings(target: Path, changes: dict[str, Any], longest: int) -> None:
    """Writes `changes` and, if the run trained on longer texts, the length to which tokenizers truncate."""
    path = target / _TOKENIZER_SETTINGS
    before = _read(path) or dict[str, Any]()
    if not before and changes:
        before = dict(tokenizer_class="PreTrainedTokenizerFast")
    limit = before.get("model_max_length")
    changes |= dict(model_max_length=longest) if limit is not None and limit < longest else {}
    after = {name: value for name, value in (before | changes).items() if changes.get(name, value) is not None}
    if after != before:
        _write(path, after)
    older = _read(target / _TOKENIZER_SETTINGS_BEFORE)
    if older and "eos_token" in changes:
        _write(target / _TOKENIZER_SETTINGS_BEFORE, older | dict(eos_token=changes["eos_token"]))


def _known_ids(source: Pretrained | None) -> dict[str, int]:
    """The special tokens of config.json, which transformers ignores if there is a generation_config.json."""
    content = {} if source is None else source.config_json()
    return {name: content[name] for name in ("bos_token_id", "pad_token_id") if content.get(name) is not None}


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file."""
    return read_json(path) if path.is_file() else None


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
