"""The verbs that use a model, of a run or of a Hugging Face directory: `generate`, `chat`, `eval`
and `logprobs`.
"""

import asyncio
import base64
import contextlib
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

import jaxlc
from jaxlc.cli.flags import ModelFlags, SamplingFlags, import_jax, mesh_sizes, settings_in
from jaxlc.config import ModelConfig
from jaxlc.config.checks.stage_checks import NEEDLE, eval_settings
from jaxlc.config.command_line import ParsedCommand
from jaxlc.config.schema import EvalSettings, SamplingSettings
from jaxlc.config.values import Above0, From1, Tokens
from jaxlc.core import UserError, print_to_stderr, progress_lines, reason_of
from jaxlc.core.files import (
    difference,
    file_fingerprint,
    fingerprint_of,
    full_disk_explained,
    local_path,
    locked_at_once,
    make_writable,
    read_json_file,
    replacing,
)


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(SamplingFlags):
    """usage: jaxlc generate SOURCE --prompt=TEXT [--max_tokens=N] [--temperature=T]

    Continues a prompt with the model of a run or of a Hugging Face directory, on all devices of a mesh.
    `jaxlc plan --prompt_tokens=TOKENS` prints the memory of a KV cache.
    """

    prompt: str | None = None  # text to continue
    prompt_file: str = ""  # file with the text to continue; -: standard input
    max_tokens: From1[int] = 256  # largest number of new tokens
    stop: list[str] | None = None  # string that ends the text; may be repeated
    chat: bool = False  # the prompt is a message of a user in the chat template of the model
    chunk_tokens: int = 0  # prompt tokens computed at once; 0: 2048 per rank


def run_generate(command: ParsedCommand[GenerateFlags]) -> int:
    flags = command.flags
    if (flags.prompt is None) == (not flags.prompt_file):
        raise UserError("give one prompt: --prompt=TEXT or --prompt_file=FILE")
    _start_simulated(flags)
    if (text := flags.prompt) is None:
        path = flags.prompt_file
        try:
            content = sys.stdin.buffer.read() if path == "-" else local_path(path).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read --prompt_file={path} ({reason_of(error)})") from error
        text = content.decode(errors="replace")
    generation = jaxlc.generate(
        flags.source,
        text,
        max_tokens=flags.max_tokens,
        **settings_in(flags, SamplingSettings),
        stop=flags.stop or [],
        step=flags.step,
        mesh=mesh_sizes(flags.mesh),
        chunk_tokens=flags.chunk_tokens,
        chat=flags.chat,
        chat_template=flags.chat_template,
        adapter=flags.adapter,
        stream=lambda _, new: print(new, end="", flush=True),
    )
    print()
    print_to_stderr(
        f"prompt {generation.num_prompt_tokens:,} tokens, new {len(generation.tokens):,} tokens,"
        f" ended by {generation.finish_reason}"
    )
    return 0


def _start_simulated(flags: ModelFlags) -> None:
    """Starts JAX with the CPU devices of --simulated_devices, if it is given."""
    if flags.simulated_devices:
        jaxlc.start(simulated_devices=flags.simulated_devices)


@dataclass(frozen=True, kw_only=True)
class ChatFlags(SamplingFlags):
    """usage: jaxlc chat SOURCE [--system=TEXT] [--temperature=T]

    Chats with the model of a run or of a Hugging Face directory. The model is loaded once, and each
    turn computes its new tokens only. Ctrl-C ends an answer; Ctrl-D, or /exit, the chat; /undo
    removes the last turn.
    """

    system: str = ""  # the system prompt
    max_tokens: From1[int] = 1024  # largest number of tokens of an answer
    # largest number of tokens of the chat, for which the KV cache has memory
    max_context: From1[int] = 32_768


def run_chat(command: ParsedCommand[ChatFlags]) -> int:
    flags = command.flags
    _start_simulated(flags)
    from jaxlc.generation.generate_text import ChatSession
    from jaxlc.generation.sampling import Sampling

    session = ChatSession(
        jaxlc.load(
            flags.source, step=flags.step, mesh=mesh_sizes(flags.mesh), adapter=flags.adapter
        ),
        system=flags.system,
        sampling=Sampling(**settings_in(flags, SamplingSettings)),
        max_tokens=flags.max_tokens,
        max_context=flags.max_context,
        chat_template=flags.chat_template,
    )
    for line in _lines():
        if line == "/undo":
            session.undo()
            continue
        try:
            with _interrupts() as is_interrupted:
                answer = session.say(
                    line, lambda _, new: print(new, end="", flush=True), is_interrupted
                )
        except UserError as error:  # such as a chat that is too long; the history stays
            print_to_stderr(f"error: {error}")
            continue
        print("" if answer.finish_reason == "stop" else f" [{answer.finish_reason}]")
    return 0


def _lines() -> Iterator[str]:
    """The messages of the user, without empty ones."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        for line in iter(lambda: input(prompt).strip(), "/exit"):
            if line:
                yield line


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """While it is entered, Ctrl-C is only noted: an exception would leave a donated cache. Yields a function that says
    whether there was one.
    """
    noted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: noted.set())
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass(frozen=True, kw_only=True)
class EvalFlags(ModelFlags, EvalSettings):
    """usage: jaxlc eval SOURCE ... --lengths=TOKENS,TOKENS [--tasks=TASK,TASK]

    Evaluates runs and Hugging Face directories at chosen context lengths: needle, passkey, RULER, loss
    by position.
    """

    positional = ("sources",)
    interrupted = "interrupted; finished predictions are kept, and the same command resumes"

    sources: tuple[str, ...]  # workdir of a run, Hugging Face directory or hub id; or several
    # needle, passkey, loss, ruler, or tasks of RULER, separated by commas
    tasks: tuple[str, ...] = (NEEDLE,)
    # context lengths in tokens, such as 4096,65536,1M; new tokens of the answer count
    lengths: tuple[Tokens, ...] = ()
    # directory of the results; default: SOURCE/evals, and runs/NAME/evals for a hub id
    out: str = ""
    step: tuple[int, ...] = ()  # checkpoints to use, separated by commas; default: the latest


def run_eval(command: ParsedCommand[EvalFlags]) -> int:
    """Evaluates all checkpoints of all sources and draws the figures."""
    flags = command.flags
    if not flags.lengths:
        raise UserError(
            "no --lengths: pass context lengths in tokens, such as --lengths=4096,65536"
        )
    _start_simulated(flags)
    settings = eval_settings(settings_in(flags, EvalSettings))
    from jaxlc.evals.evaluate_run import check_before_loading, evaluate_run
    from jaxlc.evals.figures import draw_maps, draw_overlays
    from jaxlc.evals.predictions import comparison, step_directories

    for source in flags.sources:
        check_before_loading(source, settings)
    targets = _targets(flags.sources, flags.out)
    scores = dict[str, list]()
    directories = dict[str, Path]()
    report = functools.partial(print, flush=True)
    for source, name, out in targets:
        with full_disk_explained(out, _predictions_kept):
            for step in flags.step or [None]:
                result = jaxlc.load(source, step=step, mesh=mesh_sizes(flags.mesh))
                label = name if result.is_pretrained else f"{name} step-{result.step}"
                if len(flags.sources) > 1 or len(flags.step) > 1:
                    print(label)
                scores[label] = evaluate_run(
                    result, settings, out, report, chat_template=flags.chat_template
                )
                _print_figures(draw_maps(scores[label], out))
                directories[label] = out / f"step-{result.step}"
    if len(scores) > 1:
        print("\n".join(["", *comparison(scores), ""]))
    if len(flags.sources) == 1 and not result.is_pretrained:
        # earlier evaluations as well
        directories = {path.name: path for path in step_directories(targets[0][2])}
    figures = local_path(flags.out) if flags.out else targets[0][2]
    with full_disk_explained(figures, _predictions_kept):
        _print_figures(draw_overlays(directories, figures))
    return 0


def _predictions_kept() -> str:
    return "finished predictions are kept; free space, then run the same command again to continue"


def _targets(sources: Sequence[str], out: str) -> list[tuple[str, str, Path]]:
    """Each source with its name, numbered if two are equal, and the directory of its results:
    SOURCE/evals or, with `out`, a directory in it if there are several sources.

    Raises:
      UserError: a directory is not writable.
    """
    from jaxlc.evals.evaluate_run import results_directory

    names = [local_path(source).absolute().name for source in sources]
    if len(set(names)) < len(names):
        names = [f"{index}-{name}" for index, name in enumerate(names, 1)]
    if out:
        base = local_path(out)
        directories = [base] if len(sources) == 1 else [base / name for name in names]
    else:
        directories = [results_directory(source) for source in sources]
    for directory in directories:
        if out or directory.parent.is_dir():  # another source is refused later
            make_writable(directory, "use a different directory, with --out")
    return list(zip(sources, names, directories))


def _print_figures(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"figure {path}")


_KEPT = "finished records are kept, and the same command resumes"


@dataclass(frozen=True, kw_only=True)
class LogprobsFlags(ModelFlags):
    """usage: jaxlc logprobs SOURCE TRACES OUT [--field=reference_log_probs] [--temperature=1]
    [--entropy] [--experts] [--top_k=0] [--tokenizer=DIRECTORY]

    Adds the log-probabilities of the tokens in the loss to traces: under the model of a run, of a
    Hugging Face directory, or of a vLLM server. The output has one JSON line per record, in order. It is
    OUT.partial until it is complete, and a run that is interrupted resumes after its last record. What the values
    depend on, such as the model, is in OUT.header.json: the command does not add to values of something else. Logits
    exist for a chunk of tokens at a time.
    """

    positional = ("source", "traces", "out")
    interrupted = f"interrupted; {_KEPT}"

    source: str  # workdir of a run, Hugging Face directory, hub id, or a server, such as http://host:8000
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
    tokenizer: str = ""  # of a server: "bytes", a directory or a hub id
    # a server: the command ends if a request has no answer in this time
    server_seconds: Above0[float] = 600.0

    @property
    def is_server(self) -> bool:
        return self.source.startswith(("http://", "https://"))


def run_logprobs(command: ParsedCommand[LogprobsFlags]) -> int:
    flags = command.flags
    _check_server(flags)
    _start_simulated(flags)
    import_jax()
    import jax

    from jaxlc.checkpoints.files import model_fingerprint
    from jaxlc.data.tokens.encoder import Encoder, template_if_any
    from jaxlc.posttrain.records import TraceReader
    from jaxlc.posttrain.traces import records_of
    from jaxlc.runtime.watchdog import on_process_0

    out = local_path(flags.out)
    source = local_path(flags.traces)
    if out.resolve() == source.resolve():
        raise UserError(f"OUT is the file of the traces, {out}: use another OUT")
    make_writable(out.parent, "use another OUT")
    if out.suffix != ".jsonl":
        raise UserError(f"the output is {out}; expected a name that ends with .jsonl")
    if flags.is_server:
        run = _served(flags)
        model = run.model.name
    else:
        run = jaxlc.load(flags.source, step=flags.step, mesh=mesh_sizes(flags.mesh))
        model = model_fingerprint(run.config, run.params)
    chat_template = flags.chat_template or run.config.data.chat_template
    encoder = Encoder(run.tokenizer, chat_template)
    reader = TraceReader(encoder, run.config.model.vocab_size)
    template = template_if_any(chat_template, run.tokenizer)
    header = dict(
        model=model, tokenizer=run.tokenizer.fingerprint,
        chat_template=template and fingerprint_of(template.source), traces=file_fingerprint(source), field=flags.field,
        temperature=flags.temperature, entropy=flags.entropy, **(dict(experts=True) if flags.experts else {}),
        **(dict(top_k=flags.top_k) if flags.top_k else {}),
    )  # fmt: skip
    _check_model(flags, run.config.model)
    num_records = 0
    with (
        full_disk_explained(out, lambda: f"{_KEPT} after you free space"),
        contextlib.ExitStack() as files,
        progress_lines("scoring records", is_shown=jax.process_index() == 0) as update,
    ):
        # Processes must agree, also on file systems that show them different states of the file.
        num_done = on_process_0(lambda: _num_records(out, header, files))
        # Other processes than 0 compute the same records and write none.
        path = os.devnull if jax.process_index() else _unfinished(out)
        file = files.enter_context(open(path, "a", encoding="utf-8"))
        for num_records, record in enumerate(records_of(source), start=1):
            if num_records <= num_done:
                continue
            traces = reader.read(record, is_sampled=True)
            values = dict(record.values) | _fields(traces, run, flags)
            file.write(json.dumps(values, ensure_ascii=False, default=_json_value) + "\n")
            file.flush()
            update(num_records - num_done, 0)
        on_process_0(lambda: _unfinished(out).replace(out))
    for warning in encoder.notes.lines(str(source)):
        print_to_stderr(f"warning: {warning}")
    print(
        f"wrote {out}: {num_records:,} records, {min(num_done, num_records):,} of them in earlier runs"
    )
    return 0


def _check_server(flags: LogprobsFlags) -> None:
    """Raises UserError if a flag has no effect on this source."""
    if flags.is_server and not flags.tokenizer:
        raise UserError(f"{flags.source} does not give its tokenizer: set --tokenizer")
    unused = ("temperature", "entropy", "experts", "step", "mesh")
    for name in unused if flags.is_server else ("tokenizer", "server_seconds"):
        if getattr(flags, name) != getattr(LogprobsFlags, name):
            raise UserError(f"--{name} has no effect with the source {flags.source}; remove it")


def _check_model(flags: LogprobsFlags, model: ModelConfig) -> None:
    """Raises UserError if the model lacks what a flag asks for."""
    if flags.experts and not model.layers_with_experts:
        raise UserError(
            f"--experts needs a model with experts, and {flags.source} has none; remove it"
        )
    if flags.top_k > model.vocab_size:
        raise UserError(
            f"--top_k={flags.top_k} is more than the {model.vocab_size} tokens of the model; use a smaller"
            " number"
        )


def _served(flags: LogprobsFlags) -> SimpleNamespace:
    """The model of a server, with what the command uses of a run."""
    from jaxlc.config import defaults, load, unchecked
    from jaxlc.data.tokens.tokenizers import load_tokenizer
    from jaxlc.posttrain.server import Server

    tokenizer = load_tokenizer(flags.tokenizer)
    settings = {
        "model.vocab_size": tokenizer.vocab_size,
        "data.tokenizer": flags.tokenizer,
        "data.seq_len": 1,
        "posttrain.teacher_top_k": flags.top_k,
        "rollouts.server_seconds": flags.server_seconds,
    }
    config = unchecked(load(defaults()), settings)
    server = Server(url=flags.source, config=config, tokenizer=tokenizer)
    name = asyncio.run(server.check())

    def scores(tokens: np.ndarray, positions: np.ndarray, *_: Any) -> SimpleNamespace:
        in_loss = np.isin(np.arange(tokens.size), positions + 1)
        arrays = asyncio.run(server.scores(tokens[0], in_loss))
        names = "log_probs", "top_tokens", "top_log_probs"
        return SimpleNamespace(**{name: x[None] for name, x in zip(names, arrays)})

    model = SimpleNamespace(name=name, scores=scores)
    return SimpleNamespace(config=config, tokenizer=tokenizer, model=model)


def _fields(traces: Sequence[Any], run: Any, flags: LogprobsFlags) -> dict[str, Any]:
    """What the command adds to a record of one trace, or of the two of a pair, by their names."""
    from jaxlc.data.sequences.loader import experts_dtype
    from jaxlc.posttrain.records import TEACHER, encoded_array

    values: dict[str, Any] = {}
    for answer, trace in zip(("chosen", "rejected"), traces):
        targets = np.flatnonzero(trace.in_loss)[None]
        settings = flags.temperature, flags.experts, flags.top_k
        tokens = trace.tokens[None]
        scores = run.model.scores(tokens, targets - 1, trace.tokens[targets], *settings)
        own: dict[str, Any] = {flags.field: scores.log_probs[0].tolist()}
        if flags.entropy:
            own["entropies"] = scores.entropies[0].tolist()
        if flags.experts:
            dtype = experts_dtype(run.config.model).base
            own["routed_experts"] = encoded_array(scores.experts[0, :-1].astype(dtype))
        if flags.top_k:
            own |= zip(TEACHER, map(encoded_array, (scores.top_tokens[0], scores.top_log_probs[0])))
        if len(traces) == 1:
            values = own
        else:
            for name, x in own.items():
                values.setdefault(name, {})[answer] = x
    return values | (dict(teacher_tokenizer=run.tokenizer.fingerprint) if flags.top_k else {})


def _json_value(value: Any) -> Any:
    """Values of Parquet columns that JSON does not have: arrays, bytes in base64, and as text dates
    and others.
    """
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _unfinished(out: Path) -> Path:
    """The file that records are added to: OUT.partial, which training does not read. It becomes `out` at the end."""
    return out if out.is_file() and out.stat().st_size else out.with_name(f"{out.name}.partial")


def _num_records(out: Path, header: dict[str, Any], lock: contextlib.ExitStack) -> int:
    """Records that an earlier run wrote; removes a line that it did not finish. Writes the header
    of a new file.

    Args:
      lock: holds the lock of the file when this returns.
    Raises:
      UserError: another command writes to the file, or it has another header or none. It is not changed.
    """
    problem = f" writes to {out}: wait for its end, or use another OUT"
    lock.enter_context(locked_at_once(out.with_suffix(".lock"), problem))
    path = out.with_suffix(".header.json")
    unfinished = _unfinished(out)
    if not unfinished.is_file() or not unfinished.stat().st_size:
        with replacing(path) as file:
            file.write(json.dumps(header, indent=2).encode())
        return 0
    if changed := difference(read_json_file(path) if path.is_file() else {}, header):
        raise UserError(
            f"{unfinished} was made with something else, according to {path.name} ({changed}): use another OUT, or"
            " remove the file"
        )
    with unfinished.open("rb+") as file:
        lengths = [len(line) for line in file if line.endswith(b"\n")]
        file.truncate(sum(lengths))
    return len(lengths)
