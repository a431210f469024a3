"""The data source of rollouts: one file of traces for each step, which may appear while training
waits for it.

Another program writes the files, for which checkpoints are exported, or the policy itself makes the
rollouts, on the mesh or on a server (`generation.rollouts`).
"""

import functools
import importlib.util
import itertools
import shlex
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.config import Config
from jaxlc.core import Log, UserError, processes
from jaxlc.core.errors import require
from jaxlc.core.files import (
    Arrays,
    displayed,
    file_fingerprint,
    fingerprint_of,
    local_path,
    replacing,
    sha256_of,
    write_errors_explained,
    write_json_lines,
)
from jaxlc.data.sequences.loader import (
    DataSource,
    Inputs,
    ShownTokens,
    SourceView,
    array_dtypes,
    padding,
)
from jaxlc.data.sequences.user_batches import EndOfBatches
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.posttrain.traces import Prompt, Traces, open_prompts, open_traces

DECODED = "decoded_rollouts"  # directories in the workdir
DIRECTORY = "rollouts"
EXPORTED = "exported"
_POLL_SECONDS = 0.1
_LINE_SECONDS = 60
_MAX_DECODED = 8  # prompts may have 100,000s of tokens


@dataclass(frozen=True, kw_only=True)
class Rollouts(DataSource):
    """Answers of the policy or of another program to prompts."""

    train: "RolloutSequences"
    workdir: Path
    prompts: tuple[Prompt, ...]  # none: another program makes the rollouts
    eval_prompts: tuple[Prompt, ...] = ()

    @classmethod
    def open(cls, config: Config, inputs: Inputs) -> "Rollouts":
        setting = config.rollouts.directory
        directory = local_path(setting) if setting else inputs.workdir / DIRECTORY
        prompts, warnings = open_prompts(config, inputs.tokenizer)
        eval_prompts, more = open_prompts(config, inputs.tokenizer, "eval_prompts")
        # rewards depend on the other fields, such as a solution
        digests = [
            [(sha256_of(prompt.ids.tobytes()), prompt.record) for prompt in part]
            for part in (prompts, eval_prompts)
        ]
        code = [code_fingerprint(x) for x in (config.rollouts.reward, config.rollouts.agent)]
        return cls(
            tokenizer=inputs.tokenizer,
            train=RolloutSequences(directory, config, inputs.tokenizer, inputs.log),
            # the files are in the order of the steps
            fingerprint=f"rollouts {fingerprint_of((digests, code))}",
            description=f"rollouts in {displayed(directory)}; held out: {len(eval_prompts):,} prompts",
            warnings=(*warnings, *more),
            workdir=inputs.workdir,
            prompts=tuple(prompts),
            eval_prompts=tuple(eval_prompts),
        )

    def views(self) -> list[SourceView]:
        if not self.prompts:
            raise UserError(
                "the rollouts of another program do not exist before the run: set config.data.traces to a file"
            )
        return [
            SourceView(
                name="rollouts.prompts",
                unit="prompt",
                lengths=np.array([len(prompt.ids) for prompt in self.prompts]),
                num_loss_tokens=0,
                examples=(
                    [ShownTokens(x.where, x.ids, np.zeros(len(x.ids), bool))] for x in self.prompts
                ),
            )
        ]

    def stop_waiting(self) -> None:
        self.train.close()


class RolloutSequences:
    """The sequences of a run on rollouts, as `loader.Sequences`; it is thread-safe.

    Step s, from 1, has the sequences of the file s.jsonl, or s.parquet with posttrain.replay_routing or a server,
    and is filled up with sequences of padding. So a sequence is a pure function of the files, and a
    run that resumes reads the same ones.
    """

    def __init__(self, directory: Path, config: Config, tokenizer: Tokenizer, log: Log):
        self.directory = directory
        self._config = config
        self._tokenizer = tokenizer
        self._log = log
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # of the steps that are trained, placed and prefetched
        self._traces = functools.lru_cache(config.data.prefetch_steps + 3)(self._opened)
        self._needed, self._since, self._next_line = 0, 0.0, 0.0  # see `need`
        self._digests: dict[int, str] = {}  # by step
        self.failure: Exception | None = None  # why files that do not exist will not appear

    def __getitem__(self, i: int) -> Arrays:
        """Returns sequence i in natural order; waits for its file.

        Raises:
          EndOfBatches: `close` was called, and the file does not exist.
          UserError: the file does not appear in rollouts.wait_seconds, or its traces cannot be used.
        """
        number, index = divmod(i, self._config.train.global_batch_size)
        packed = self.at_step(number + 1).train
        if index < packed.num_sequences:
            return packed[index]
        return padding(self._config.data.seq_len, array_dtypes(self._config))

    def at_step(self, step: int) -> Traces:
        """The traces of a step; waits for its file."""
        self._wait(step)  # without the lock: other threads may need an earlier step
        with self._lock:
            return self._traces(step)

    def path(self, step: int) -> Path:
        rollouts = self._config.rollouts
        has_server = rollouts.source == "server" or rollouts.teacher_server
        is_parquet = self._config.posttrain.replay_routing or has_server
        suffix = "parquet" if is_parquet else "jsonl"
        return self.directory / f"{step}.{suffix}"

    def decoded(self, step: int) -> list[dict[str, Any]]:
        """Records of some traces of a step, from the first one to the last, with their reward and
        the texts of prompt and answer. Rollouts of the policy have both.
        """
        traces = self.at_step(step).train.traces
        every = -(-len(traces) // _MAX_DECODED) or 1
        records = []
        for trace in traces[::every]:
            prompt, answer = np.split(trace.tokens, [trace.num_prompt_tokens])
            # for people; training reads the tokens
            text = dict(
                prompt=self._tokenizer.decode(prompt, special_tokens=True),
                answer=self._tokenizer.decode(answer),
            )
            known = dict(group=trace.group, policy_step=trace.policy_step, reward=trace.reward)
            known = {name: value for name, value in known.items() if value is not None}
            records.append(
                dict(record=trace.where, **known, truncated=trace.is_truncated, text=text)
            )
        return records

    def digests(self, steps: Iterable[int]) -> dict[str, str]:
        """The SHA-256 digests of the files of these steps that were read, by step, for a
        checkpoint.
        """
        with self._lock:
            return {str(step): self._digests[step] for step in steps if step in self._digests}

    def check_digests(self, digests: Mapping[str, str]) -> None:
        """Raises UserError if files have other digests than those of a checkpoint; files may have
        been removed.
        """
        for step, digest in digests.items():
            path = self.path(int(step))
            if path.is_file() and sha256_of(path.read_bytes()) != digest:
                raise UserError(
                    f"the checkpoint was trained on other rollouts of step {step} than those in {displayed(path)}: put"
                    " the file back, or set config.rollouts.directory as before"
                )

    def is_late(self, step: int) -> bool:
        """Whether training has waited longer than rollouts.wait_seconds for the file, so that
        reading it fails.
        """
        limit = self._config.rollouts.wait_seconds
        return bool(limit) and step == self._needed and time.monotonic() - self._since > limit

    def need(self, step: int) -> None:
        """Training waits for the file of `step` from now on; files of later steps are only
        prefetched.
        """
        with self._lock:
            self._since = time.monotonic()
            self._needed = step
            self._next_line = self._since + _LINE_SECONDS

    def close(self) -> None:
        """Ends the waiting of all threads."""
        self._closed.set()

    def _opened(self, step: int) -> Traces:
        path = self.path(step)
        batch_size = self._config.train.global_batch_size
        self._digests[step] = sha256_of(path.read_bytes())
        traces = open_traces(self._config, self._tokenizer, (str(path),), step=step)
        if traces.train.num_sequences > batch_size:
            raise UserError(
                f"the rollouts in {displayed(path)} fill {traces.train.num_sequences} sequences, more than"
                f" config.train.global_batch_size={batch_size}; increase it, or config.data.seq_len"
            )
        for warning in traces.warnings:
            self._log(f"warning: step {step}: {warning}")
        return traces

    def _wait(self, step: int) -> None:
        """Waits for the file of a step; for the one that training needs, prints a line per minute, and
        raises UserError after rollouts.wait_seconds.
        """
        path = self.path(step)
        while not path.is_file():
            if self._closed.is_set():
                raise EndOfBatches
            if self.failure is not None:
                raise self.failure
            with self._lock:
                now = time.monotonic()
                waited = now - self._since
                if self.is_late(step):
                    raise UserError(
                        f"no rollouts of step {step} after {waited:.0f} s: {displayed(path)} does not exist, and"
                        f" config.rollouts.wait_seconds={self._config.rollouts.wait_seconds:g}"
                    )
                if step == self._needed and now > self._next_line:
                    self._next_line = now + _LINE_SECONDS
                    self._log(
                        f"waiting for the rollouts of step {step} for {waited:.0f} s: {displayed(path)}"
                    )
            time.sleep(_POLL_SECONDS)


def code_fingerprint(name: str) -> str:
    """The fingerprint of the file of FILE.py:FUNCTION or MODULE:FUNCTION; "" if there is none."""
    place, _, _ = name.rpartition(":")
    if place and not place.endswith(".py"):
        spec = None
        with suppress(Exception):  # of a package that contains the module; its import reports them
            spec = importlib.util.find_spec(place)
        place = (spec and spec.origin) or ""
    path = local_path(place)
    return file_fingerprint(path) if path.is_file() else ""


def write_rollouts(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes JSON lines, or Parquet with a row group for each record, in a directory that may not
    exist; readers see a whole file or none.

    Raises:
      UserError: the file cannot be written.
    """
    with write_errors_explained(path.parent, "free space, or use a different directory"):
        if path.suffix == ".jsonl":
            write_json_lines(path, records)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as out:
            require("pyarrow", f"the Parquet file {str(path)!r}")
            import pyarrow
            import pyarrow.parquet

            names = dict.fromkeys(itertools.chain(*records))  # one that failed has other fields
            columns = {name: [record.get(name) for record in records] for name in names}
            pyarrow.parquet.write_table(pyarrow.table(columns), out, row_group_size=1)


def export_for_rollouts(workdir: Path, step: int, config: Config) -> None:
    """Exports the checkpoint of `step` in another process, on CPU, and calls
    rollouts.export_command.

    A directory that exists, as after a resume, is not written again.

    Raises:
      UserError: the export or the command fails.
    """
    target = workdir / EXPORTED / str(step)
    if not target.is_dir():
        adapters = ["--adapters"] if config.lora.rank else []
        program = [*processes.PYTHON, "-m", "jaxlc.exporting"]
        arguments = [str(workdir), str(target), f"--step={step}", *adapters]
        _call([*program, *arguments], processes.child_environment())
    if config.rollouts.export_command:
        _call([*shlex.split(config.rollouts.export_command), str(target)])


def _call(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            # Ctrl-C stops the run, after this step; the command ends first
            process_group=0,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(
            f"the export of rollouts failed: {shlex.join(command)}: {lines[-1] if lines else error}"
        ) from error
