"""usage: jaxlc logprobs SOURCE TRACES OUT [--field=reference_log_probs] [--temperature=1]
[--entropy] [--experts] [--top_k=0]

Adds the log-probabilities of the tokens in the loss to traces: under the model of a run or of a
Hugging Face directory. The output has one JSON line per record, in order, and a run that is
interrupted resumes after the last one. What the values depend on, such as the model, is in
OUT.header.json: the command does not add to values of something else. Logits exist for a chunk of
tokens at a time.
"""

import base64
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import jaxlc
from jaxlc.cli.flags import import_jax, mesh_sizes
from jaxlc.config.command_line import ParsedCommand, VerbFlags, run_main
from jaxlc.config.values import Above0
from jaxlc.core.errors import UserError
from jaxlc.core.files import (
    difference,
    file_fingerprint,
    fingerprint_of,
    full_disk_explained,
    local_path,
    make_writable,
    read_json_file,
    replacing,
)
from jaxlc.core.text import progress_lines

_KEPT = "finished records are kept, and the same command resumes"


@dataclass(frozen=True, kw_only=True)
class Flags(VerbFlags):
    positional = ("source", "traces", "out")

    source: str  # workdir of a run, Hugging Face directory or hub id
    traces: str  # file of traces: .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow
    out: str  # .jsonl file to write: the records of traces with one more field
    # the field to add
    field: Literal["old_log_probs", "reference_log_probs"] = "reference_log_probs"
    temperature: Above0[float] = 1.0  # logits are divided by it, as in sampling
    entropy: bool = False  # also write the entropies of the next token, in the field entropies
    # also write the experts of each token, in the field routed_experts for posttrain.replay_routing
    experts: bool = False
    # also write this number of most probable tokens, in the fields teacher_tokens, teacher_log_probs and
    # teacher_tokenizer for posttrain.teacher_top_k
    top_k: int = 0
    step: int | None = None  # checkpoint to use; default: the latest
    # chatml, llama3 or a Jinja file; default: that of the run, or of the tokenizer
    chat_template: str = ""
    # sizes of mesh axes, such as context=4,tensor=2; default: the mesh of the run
    mesh: str | None = None
    simulated_devices: int = 0  # number of CPU devices to simulate


def _score(command: ParsedCommand[Flags]) -> int:
    flags = command.flags
    if flags.simulated_devices:
        jaxlc.start(simulated_devices=flags.simulated_devices)
    import_jax()
    import jax
    from jax.experimental.multihost_utils import broadcast_one_to_all

    from jaxlc.checkpoints.files import model_fingerprint
    from jaxlc.data.tokens.encoder import Encoder, template_if_any
    from jaxlc.posttrain.records import TraceReader
    from jaxlc.posttrain.traces import records_of

    out, source = local_path(flags.out), local_path(flags.traces)
    if out.resolve() == source.resolve():
        raise UserError(f"OUT is the file of the traces, {out}: use another OUT")
    make_writable(out.parent, "use another OUT")
    if out.suffix != ".jsonl":
        raise UserError(f"the output is {out}; expected a name that ends with .jsonl")
    run = jaxlc.load(flags.source, step=flags.step, mesh=mesh_sizes(flags.mesh))
    chat_template = flags.chat_template or run.config.data.chat_template
    encoder = Encoder(run.tokenizer, chat_template)
    reader = TraceReader(encoder, run.config.model.vocab_size)
    template = template_if_any(chat_template, run.tokenizer)
    header = dict(
        model=model_fingerprint(run.config, run.params), tokenizer=run.tokenizer.fingerprint,
        chat_template=template and fingerprint_of(template.source), traces=file_fingerprint(source), field=flags.field,
        temperature=flags.temperature, entropy=flags.entropy, **(dict(experts=True) if flags.experts else {}),
        **(dict(top_k=flags.top_k) if flags.top_k else {}),
    )  # fmt: skip
    if flags.experts and not run.config.model.layers_with_experts:
        raise UserError(
            f"--experts needs a model with experts, and {flags.source} has none; remove it"
        )
    if flags.top_k > run.config.model.vocab_size:
        raise UserError(
            f"--top_k={flags.top_k} is more than the {run.config.model.vocab_size} tokens of the model; use a smaller"
            " number"
        )
    # Processes must agree, also on file systems that show them different states of the file.
    num_stored = 0 if jax.process_index() else _num_records(out, header)
    num_done = int(broadcast_one_to_all(np.int32(num_stored)))
    num_records = 0
    with (
        full_disk_explained(out, lambda: f"{_KEPT} after you free space"),
        # Other processes than 0 compute the same records and write none.
        open(os.devnull if jax.process_index() else out, "a", encoding="utf-8") as file,
        progress_lines("scoring records", is_shown=jax.process_index() == 0) as update,
    ):
        for num_records, record in enumerate(records_of(source), start=1):
            if num_records <= num_done:
                continue
            traces = reader.read(record, is_sampled=True)
            scores = [_scores_of(run.model, trace, flags) for trace in traces]
            values = dict(record.values) | _fields(scores, run, flags)
            file.write(json.dumps(values, ensure_ascii=False, default=_json_value) + "\n")
            file.flush()
            update(num_records - num_done, 0)
    for warning in encoder.notes.lines(str(source)):
        print(f"warning: {warning}", file=sys.stderr)
    print(
        f"wrote {out}: {num_records:,} records, {min(num_done, num_records):,} of them in earlier runs"
    )
    return 0


def _fields(scores: Sequence[Any], run: Any, flags: Flags) -> dict[str, Any]:
    """What the command adds to a record, from the scores of its traces."""
    from jaxlc.data.sequences.loader import experts_dtype
    from jaxlc.posttrain.records import TEACHER, encoded_array

    values = {flags.field: _by_answer([x.log_probs[0].tolist() for x in scores])}
    if flags.entropy:
        values["entropies"] = _by_answer([x.entropies[0].tolist() for x in scores])
    if flags.experts:
        dtype = experts_dtype(run.config.model).base
        arrays = [encoded_array(x.experts[0, :-1].astype(dtype)) for x in scores]
        values["routed_experts"] = _by_answer(arrays)
    if flags.top_k:
        for name, of in zip(TEACHER, ("top_tokens", "top_log_probs")):
            values[name] = _by_answer([encoded_array(getattr(x, of)[0]) for x in scores])
        values["teacher_tokenizer"] = run.tokenizer.fingerprint
    return values


def _scores_of(model: Any, trace: Any, flags: Flags) -> Any:
    """The `TokenScores` of the tokens in the loss."""
    targets = np.flatnonzero(trace.in_loss)[None]
    settings = flags.temperature, flags.experts, flags.top_k
    return model.scores(trace.tokens[None], targets - 1, trace.tokens[targets], *settings)


def _json_value(value: Any) -> Any:
    """Values of Parquet columns that JSON does not have: arrays, bytes in base64, and as text dates
    and others.
    """
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _by_answer(values: Sequence[Any]) -> Any:
    """The values of a trace, or of a pair by their names."""
    return values[0] if len(values) == 1 else dict(zip(("chosen", "rejected"), values))


def _num_records(out: Path, header: dict[str, Any]) -> int:
    """Records that an earlier run wrote; removes a line that it did not finish. Writes the header
    of a new file.

    Raises:
      UserError: the file has another header or none. It is not changed.
    """
    path = out.with_suffix(".header.json")
    if not out.is_file() or not out.stat().st_size:
        with replacing(path) as file:
            file.write(json.dumps(header, indent=2).encode())
        return 0
    if changed := difference(read_json_file(path) if path.is_file() else {}, header):
        raise UserError(
            f"{out} was made with something else, according to {path.name} ({changed}): use another OUT, or remove the"
            " file"
        )
    with out.open("rb+") as file:
        lengths = [len(line) for line in file if line.endswith(b"\n")]
        file.truncate(sum(lengths))
    return len(lengths)


# (argv, program name first) -> exit status
main = functools.partial(
    run_main,
    _score,
    description=__doc__,
    flags=Flags,
    interrupted=f"interrupted; {_KEPT}",
)
