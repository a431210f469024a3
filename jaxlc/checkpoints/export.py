"""Writes the parameters of a checkpoint as a directory that `transformers` opens.

Besides weights and config.json, it has the tokenizer, the chat template and settings of generation:
inference engines read the chat template from chat_template.jinja, and the tokens that end an answer
from generation_config.json, config.json and the eos_token of tokenizer_config.json.
"""

import contextlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.checkpoints.files import (
    BASE,
    CHECKPOINTS_DIRECTORY,
    committed_steps,
    read_evaluations,
    read_meta,
)
from jaxlc.checkpoints.pretrained import untrained_tensors
from jaxlc.checkpoints.restore import StoredParams
from jaxlc.config import Config, from_dict
from jaxlc.config.flops import quantized_matrices
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.models.config_json import config_json_of, family_of, quantization_of
from jaxlc.config.models.families import Family
from jaxlc.config.models.hub import is_model_id
from jaxlc.config.models.pretrained import (
    CONFIG_FILE,
    COPY_DIRECTORY,
    GENERATION_FILE,
    PROCESSOR_FILES,
    TEXT_FILES,
    TOKENIZER_FILE,
    UNTRAINED_FILE,
    Pretrained,
    copy_file,
    eos_token_ids,
    find_directory,
    locate,
    original_of,
    read_json,
    with_language_model,
)
from jaxlc.config.values import flattened
from jaxlc.core import Update, UserError, print_to_stderr
from jaxlc.core.files import ADAPTER_FILE, groups_within, local_path, new_directory, write_json
from jaxlc.data.tokens.chat_templates import ChatTemplate, end_of_turn_id, without_generation_tags
from jaxlc.data.tokens.encoder import stops_of, trained_template
from jaxlc.data.tokens.tokenizers import (
    Tokenizer,
    load_tokenizer,
    starting_with,
    tokenizer_file,
    tokenizer_of,
)
from jaxlc.hf.adapters import read_adapter, write_adapters
from jaxlc.hf.files import BLOCKS, SCALES, Nf4Tensor, TensorFiles, TensorWriter
from jaxlc.hf.load import (
    Layout,
    Layouts,
    language_tensors,
    layouts_of,
    open_files,
    read_shard,
    shapes_of,
)
from jaxlc.models.quantized import FORMATS, MX_BLOCK, Mxfp4, is_quantized

_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_TOKENIZER_SETTINGS_BEFORE = "special_tokens_map.json"  # transformers 4 prefers its tokens


def write_text_files(
    config: Config, workdir: Path, target: Path, *, longest: int
) -> dict[str, Any]:
    """Writes the files to `target`; returns the fields of config.json that follow from them.

    The files of the model that training started from are copied. They change if the run trained on
    chats, or on longer sequences.

    Args:
      longest: tokens of the longest sequences that the model was trained on.
    Raises:
      UserError: the tokenizer or the chat template of the run cannot be read.
    """
    # Copies the tokenizer of the run, with its chat template, and the generation settings of its
    # model.
    source = original_of(config.model.init_from, workdir)
    base = None if source is None else source.directory
    directory = _tokenizer_directory(config, base)
    for name in TEXT_FILES:
        origin = base if name == GENERATION_FILE else directory
        if origin is not None and (origin / name).is_file():
            copy_file(origin, name, target)
    # turns off the fallback of transformers to config.json
    if _read(target / GENERATION_FILE) == {}:
        (target / GENERATION_FILE).unlink(missing_ok=True)
    changes: dict[str, Any] = {}
    has_tokenizer = (target / TOKENIZER_FILE).is_file()
    if has_tokenizer:
        tokenizer = tokenizer_of(replace(config.data, tokenizer=str(target)))
    else:  # the source may have none
        tokenizer = load_tokenizer("bytes")
        if config.data.tokenizer != tokenizer.name:
            print_to_stderr(
                f"note: the export has no tokenizer: {config.data.tokenizer} does not exist"
            )
    if tokenizer.start_ids.tolist() != tokenizer.own_start_ids.tolist():
        _write(
            target / TOKENIZER_FILE,
            starting_with(tokenizer.start_ids, read_json(target / TOKENIZER_FILE)),
        )
    template = trained_template(config, tokenizer) if has_tokenizer else None
    known = eos_token_ids(source.directory) if source else []
    stop_ids = stops_of(config, tokenizer, workdir, template).ids
    if template is not None:
        changes = _write_template(config, template, tokenizer, target)
    elif set(stop_ids) <= set(known):
        stop_ids = []
    if stop_ids and (template is not None or (target / GENERATION_FILE).is_file()):
        # with a generation_config.json, transformers ignores the token ids in config.json
        content = {} if source is None else source.config_json()
        names = [x for x in ("bos_token_id", "pad_token_id") if content.get(x) is not None]
        settings = _read(target / GENERATION_FILE) or {name: content[name] for name in names}
        _write(target / GENERATION_FILE, settings | dict(eos_token_id=stop_ids))
    _write_tokenizer_settings(target, changes, longest)
    return dict(eos_token_id=stop_ids if len(stop_ids) > 1 else stop_ids[0]) if stop_ids else {}


def _tokenizer_directory(config: Config, base: Path | None) -> Path | None:
    """The directory of the run's tokenizer: `base`, a copy that is always there, or of another
    tokenizer.
    """
    if config.data.tokenizer == "bytes":
        return base
    own = tokenizer_file(config.data.tokenizer)
    copy = None if base is None else base / TOKENIZER_FILE
    if (
        copy is not None
        and copy.is_file()
        and (not own.is_file() or own.read_bytes() == copy.read_bytes())
    ):
        return base
    return own.parent


def _write_template(
    config: Config, template: ChatTemplate, tokenizer: Tokenizer, target: Path
) -> dict[str, Any]:
    """Writes the template without tags that inference engines cannot parse.

    Returns:
      The changes of tokenizer_config.json, where None removes a field.
    """
    changes = dict[str, Any]()
    # a template with eos_token would render the new one
    if end_of_turn_id(template, tokenizer) is not None and "eos_token" not in template.source:
        changes["eos_token"] = template.end_of_turn
    source = without_generation_tags(template.source)
    if config.data.chat_template or source != template.source:
        (target / _TEMPLATE_FILE).write_text(source, encoding="utf-8")
        (target / "chat_template.json").unlink(missing_ok=True)
        changes["chat_template"] = None  # transformers prefers the file
    return changes


def _write_tokenizer_settings(target: Path, changes: dict[str, Any], longest: int) -> None:
    """Writes `changes` and, if the run trained on longer texts, the length to which tokenizers
    truncate.
    """
    path = target / _TOKENIZER_SETTINGS
    before = _read(path) or dict[str, Any]()
    if not before and changes:
        before = dict(tokenizer_class="PreTrainedTokenizerFast")
    limit = before.get("model_max_length")
    changes |= dict(model_max_length=longest) if limit is not None and limit < longest else {}
    after = {
        name: value
        for name, value in (before | changes).items()
        if changes.get(name, value) is not None
    }
    if after != before:
        _write(path, after)
    older = _read(target / _TOKENIZER_SETTINGS_BEFORE)
    if older and "eos_token" in changes:
        _write(target / _TOKENIZER_SETTINGS_BEFORE, older | dict(eos_token=changes["eos_token"]))


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file."""
    return read_json(path) if path.is_file() else None


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# name -> names in safetensors and in config.json
DTYPES = {"bf16": ("BF16", "bfloat16"), "fp32": ("F32", "float32")}
# precision.frozen -> the dtype of files that it does not round
_EXACT = {"bf16": "BF16", "fp16": "F16", "nf4": "", "mxfp4": "BF16"}


def export(
    workdir: Path,
    target: Path,
    *,
    step: int,
    dtype: str,
    max_shard_gb: float,
    adapters: bool,
    text_only: bool,
    base_model: str,
    load_params: Callable[[], Any],
    progress: Update,
) -> None:
    """Writes a checkpoint; see `jaxlc.export`.

    Args:
      workdir, target: absolute; `target` without symbolic links.
      load_params: returns all parameters of the step, for checkpoints without the frozen ones.
      progress: called with the bytes of parameters done and in total.
    """
    directory = workdir / CHECKPOINTS_DIRECTORY
    if dtype not in DTYPES:
        raise UserError(f"invalid dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if not max_shard_gb > 0:
        raise UserError(f"invalid max_shard_gb={max_shard_gb}: expected a number greater than 0")
    meta = read_meta(directory, step)
    config = from_dict(meta["config"])
    if base_model and (adapters or config.precision.frozen not in FORMATS):
        raise UserError(
            f"base={base_model!r} has no effect, since it replaces the weights that config.precision.frozen=nf4 or"
            " mxfp4 rounded in a merged export: remove it"
        )
    source = original_of(config.model.init_from, workdir)
    base = None if source is None else source.config_json()
    size, record = config.model.vocab_size, None
    if source is not None and not (adapters or text_only):
        record = _record_of(source, workdir, size)
    longest = length = _longest_sequence(directory, step)
    in_mxfp4, fields = _unchanged_mxfp4(config, base or {}, dtype, base_model)
    if text_only and base is not None and not family_of(base, config.model).architecture:
        length = max(length, base.get("max_position_embeddings", 0))
        fields = {name: base[name] for name in _TOKENS if name in base}
        base = None
    content = config_json_of(config.model, base, seq_len=length, dtype=DTYPES[dtype][1]) | fields
    # adapters, and what is trained with them, are in all checkpoints
    load_all = load_params if BASE in meta and not adapters else None
    params = StoredParams(workdir, step, config, load_all=load_all)
    family = family_of(base, config.model)
    advice = "export to a different directory"
    if target.is_mount():
        raise UserError(f"{target} is a mount point: {advice}, such as one in it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: remove it, or {advice}")
    with new_directory(target, advice) as partial:
        if adapters:
            num_tokens = (base or {}).get("vocab_size", size)
            name = _base_of_adapters(config, family, num_tokens)
            has_images = source is not None and source.has_images and not text_only
            write_adapters(config, family, params, partial, base=name, has_images=has_images)
        else:
            content |= write_text_files(config, workdir, partial, longest=longest)
            if source is not None and record is not None:
                for name in PROCESSOR_FILES:
                    if (source.directory / name).is_file():
                        copy_file(source.directory, name, partial)
                content = with_language_model(read_json(source.directory / CONFIG_FILE), content)
            write_json(partial / CONFIG_FILE, content)
            shard_bytes = int(max_shard_gb * 1e9)
            weights = DTYPES[dtype][0], shard_bytes, record or {}, base_model, in_mxfp4
            _write_weights(config, family, params, partial, *weights, progress)


def write_model_card(target: Path, workdir: Path, step: int, title: str) -> None:
    """Writes README.md of an export: its settings, data and scores.

    Args:
      target: the export.
      step: of the checkpoint in `workdir` that was exported.
    """
    directory = workdir / CHECKPOINTS_DIRECTORY
    config = from_dict(read_meta(directory, step)["config"])
    data = config.data
    base = config.model.init_from
    library = "peft" if (target / ADAPTER_FILE).is_file() else "transformers"
    header = [f"library_name: {library}", "tags: [jaxlc]"]
    header += [f"base_model: {base}"] if base and is_model_id(base) else []
    sources = [f"{x.name}, a share of {x.share:g}: {', '.join(x.paths)}" for x in data.mixture]
    sources = sources or [*data.traces, *config.rollouts.prompts] or [*data.sources]
    evaluation = flattened(read_evaluations(directory).get(step, {}))
    scores = [f"| {name} | {value:.4g} |" for name, value in evaluation.items()]
    lines = ["---", *header, "---", "", f"# {title}", ""]
    lines += [f"Step {step} of a run of jaxlc.", "", "## Data", "", *(f"- {x}" for x in sources)]
    lines += ["", "## Scores", ""]
    lines += ["| held out | |", "| --- | --- |", *scores] if scores else ["It was not evaluated."]
    lines += ["", "## Settings", "", "```text", repr(config), "```"]
    (target / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _record_of(source: Pretrained, workdir: Path, num_tokens: int) -> dict[str, Any] | None:
    """Which tensors of the original model are copied, and from where; None: it has no such tensors.
    Without those with a row for each token, such as a head of multi-token prediction, if
    the run has more tokens; prints their names.

    Args:
      num_tokens: of the vocabulary of the run.
    Raises:
      UserError: it has, and the run did not store which.
    """
    record = _read(source.directory / UNTRAINED_FILE)
    if record is None and source.has_images:
        raise UserError(
            f"{workdir} has no {COPY_DIRECTORY}/{UNTRAINED_FILE}, which names the tensors of images: export"
            " the language model alone, with --text_only"
        )
    before = source.config_json().get("vocab_size", num_tokens)
    if record is not None and before < num_tokens:
        tensors = record["tensors"]
        names = [name for name, tensor in tensors.items() if tensor["shape"][:1] == [before]]
        record["tensors"] = {name: x for name, x in tensors.items() if name not in names}
        if names:
            print_to_stderr(
                f"note: the export has no {', '.join(names)}: with rows for {before} of {num_tokens} tokens"
            )
    return record


def _is_run(init_from: str) -> bool:
    return bool(init_from) and local_path(init_from).exists() and locate(init_from).is_run


def _base_of_adapters(config: Config, family: Family, num_tokens: int) -> str:
    """What peft opens as the base of the adapters of a run, or "". Prints how to get the weights of
    training.

    Args:
      num_tokens: of the vocabulary of the base.
    """
    base = config.model.init_from
    frozen = config.precision.frozen
    size = config.model.vocab_size
    if _is_run(base):
        print_to_stderr(
            f"note: the adapters are for the weights of the run {base}, so base_model_name_or_path is null: export it"
            f" with `jaxlc export {base} BASE --dtype={frozen if frozen in DTYPES else 'fp32'}`, and load them on that"
            " directory"
        )
        return ""
    if num_tokens < size:
        print_to_stderr(
            f"note: the run added tokens to {base}, so call base.resize_token_embeddings({size}) before"
            " PeftModel.from_pretrained"
        )
    dtypes = _stored_dtypes(config, family) if base and frozen in _EXACT else set()
    if dtypes - {_EXACT.get(frozen)}:
        print_to_stderr(
            f"note: training rounded the frozen weights of {base} to {frozen} (config.precision.frozen): load the"
            f" adapters on the base in {frozen}, or expect results that differ from the merged export"
        )
    return base


def _stored_dtypes(config: Config, family: Family) -> set[str]:
    """The dtypes of the matrices of the Hugging Face model that a run started from, those that are
    frozen in bf16; none if its files are gone, or in NF4.
    """
    model = config.model
    with contextlib.suppress(UserError):
        files = TensorFiles(locate(model.init_from).directory)
        tensors = language_tensors(files, family, model).values()
        if any(isinstance(tensor, Nf4Tensor) for tensor in tensors):
            return set()
        return {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return set()


def _longest_sequence(directory: Path, step: int) -> int:
    """The longest sequences, in tokens, that the model of a checkpoint was trained on.

    A run keeps the checkpoint at the end of each stage. The run that it started from counts too, if
    it still exists.
    """
    longest = 0
    init_from = ""
    for number in committed_steps(directory):
        if number <= step:
            with contextlib.suppress(UserError):  # another checkpoint, which cannot be read
                stored = read_meta(directory, number)["config"]
                longest = max(longest, stored["data"]["seq_len"])
                init_from = stored["model"]["init_from"]
    if _is_run(init_from):
        source = locate(init_from)
        longest = max(
            longest, _longest_sequence(source.directory.parent, int(source.directory.name))
        )
    return longest


def _write_weights(
    config: Config,
    family: Family,
    params: StoredParams,
    target: Path,
    dtype: str,
    max_shard_bytes: int,
    record: Mapping[str, Any],
    base_model: str,
    in_mxfp4: Set[str],
    progress: Update,
) -> None:
    """Reads one stacked parameter, or a few small ones, at a time to host memory, and writes their
    tensors, after those of `record`.

    Args:
      base_model: has the matrices in 4 bits, before quantization; "": they are dequantized.
      in_mxfp4: paths of the matrices that are written as they are.
    """
    model = config.model
    shapes = shapes_of(model)
    from_base = {}
    if base_model:
        directory = find_directory(base_model, "--base", with_weights=True)
        base_files, base_layouts = open_files(directory, family, model)
        from_base = quantized_matrices(model, config)
    if config.precision.frozen in FORMATS:
        form = config.precision.frozen.upper()
        weights = f"weights of {base_model}" if base_model else f"dequantized {form} weights"
        experts = "; experts stay in MXFP4" if in_mxfp4 else ""
        print_to_stderr(
            f"note: the export has the {weights} with the adapters, rounded to {dtype}{experts}"
        )
    layouts = layouts_of(family, model)
    others = record.get("tensors", {})
    prefix = record.get("prefix", "")
    described = _described(layouts, dtype, in_mxfp4)
    tensors = {family.with_prefix(name, prefix): x for name, x in described.items()}
    tensors |= {name: (x["dtype"], tuple(x["shape"])) for name, x in others.items()}
    with TensorWriter(target, tensors, max_shard_bytes) as files:
        for name, tensor in untrained_tensors(record):
            files.write_bytes(name, tensor.bytes)
        paths = list(layouts)
        sizes = [x.size * x.dtype.itemsize for x in shapes.values()]
        for group in groups_within(sizes):
            progress(sum(sizes[: group[0]]), sum(sizes))
            for path, array in params.read([paths[index] for index in group]).items():
                layout = layouts[path]
                adapter = read_adapter(config, params, path)
                if path in in_mxfp4:
                    _write_mxfp4(files, layout, array)
                    continue
                if path in from_base:
                    index = tuple((0, size, 1) for size in shapes[path].shape)
                    array = read_shard(base_files, base_layouts[path], index, shapes[path])
                elif is_quantized(array):
                    array = np.asarray(array.dequantized())
                for place, weight in zip(layout.places, layout.arrays(array), strict=True):
                    merged = weight if adapter is None else adapter.merged(weight, place)
                    name = family.with_prefix(layout.name_at(place), prefix)
                    for region, part in layout.stored_parts(merged, place):
                        files.write(name, part, region)


def _unchanged_mxfp4(
    config: Config, base: Mapping[str, Any], dtype: str, base_model: str
) -> tuple[Set[str], dict[str, Any]]:
    """The paths of the experts that the export has in MXFP4, and the field of config.json that says
    so; empty if the model does not have it, or a matrix of experts is trained or has adapters.
    """
    quantization = quantization_of(base)
    found = {
        path for path, x in quantized_matrices(config.model, config).items() if x.format == "mxfp4"
    }
    experts = {path for path in shapes_of(config.model) if path.endswith(EXPERT_PROJECTIONS)}
    has_adapters = not {*EXPERT_PROJECTIONS}.isdisjoint(config.lora.projections)
    is_kept = quantization.get("quant_method") == "mxfp4" and dtype == "bf16" and not base_model
    if not found or experts - found or has_adapters or not is_kept:
        return set(), {}
    return found, dict(quantization_config=quantization)


def _write_mxfp4(files: TensorWriter, layout: Layout, experts: Mxfp4) -> None:
    """Writes the codes and scales of the experts of all layers."""
    rows = layout.stored_columns(slice(None))
    for name, codes, scales in zip(layout.names, *map(np.asarray, experts.arrays)):
        blocks = codes.reshape(*scales.shape, MX_BLOCK // 2)
        files.write(name + BLOCKS, blocks, (slice(None), rows))
        files.write(name + SCALES, scales, (slice(None), rows))


def _described(
    layouts: Layouts, dtype: str, in_mxfp4: Set[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of all tensors: embedding, layer by layer, final norm, head."""
    tensors = []
    for path, layout in layouts.items():
        for place in layout.places:
            layer = math.inf if layout.layers is None else layout.layers[place[0]]
            name = layout.name_at(place)
            shape = layout.stored_shape
            if path == "embedding":
                layer = -1
            if path not in in_mxfp4:
                own_dtype = "F32" if layout.tensor.is_float32 else dtype
                tensors.append((layer, name, (own_dtype, shape)))
                continue
            experts, inputs, outputs = shape
            scales = experts, outputs, inputs // MX_BLOCK
            tensors.append((layer, name + BLOCKS, ("U8", (*scales, MX_BLOCK // 2))))
            tensors.append((layer, name + SCALES, ("U8", scales)))
    return {name: described for _, name, described in sorted(tensors, key=operator.itemgetter(0))}
