"""Examples of the training data: documents, chats, traces and prompts as a run uses them, with their loss mask."""

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxlc.config import Config
from jaxlc.config.stage_schema import Stage
from jaxlc.config.stages import load_stages
from jaxlc.core.errors import UserError, checked
from jaxlc.core.html import paragraph
from jaxlc.core.text import count_text, progress_lines
from jaxlc.data.corpus import Corpus, CorpusSource, open_corpus
from jaxlc.data.tokens.tokenizers import Tokenizer, tokenizer_of
from jaxlc.data.traces.open_traces import Prompts, TraceData, open_prompts, open_traces
from jaxlc.data.traces.trace_trees import Tree

_FIRST_TOKENS, _LAST_TOKENS = 200, 50  # shown of a longer run of tokens with or without a loss
_COLOR, _NO_COLOR = "\x1b[32m", "\x1b[0m"  # green
_BRACKETS = ("⟦", "⟧")
_LOSS_STYLE = "background:rgba(0,160,90,0.25)"
_TEXT_STYLE = "background:transparent;color:currentColor;font-size:12px;margin:4px 0;white-space:pre-wrap"
# Control characters, which would move the cursor of a terminal, as pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


class Run(NamedTuple):
    """Consecutive tokens of a document that all have a loss, or all have none."""

    text: str
    has_loss: bool


@dataclass(frozen=True, kw_only=True)
class Example:
    """A document, or the part of it that is in a sequence."""

    title: str
    num_tokens: int
    num_loss_tokens: int  # predicted with a loss
    runs: tuple[Run, ...]

    @property
    def heading(self) -> str:
        return f"{self.title}: {_loss_text(self.num_tokens, self.num_loss_tokens)}"


@dataclass(frozen=True, kw_only=True)
class SourceExamples:
    """Examples of one source."""

    name: str
    num_documents: int  # training and held-out ones, or traces, or prompts
    num_tokens: int
    num_loss_tokens: int
    examples: tuple[Example, ...]
    unit: str = "document"

    @property
    def heading(self) -> str:
        documents = count_text(self.num_documents, self.unit)
        return f"{self.name}: {documents}, {_loss_text(self.num_tokens, self.num_loss_tokens)}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Examples:
    """Examples of each source; a notebook shows them with colors, and `print` with brackets."""

    sources: tuple[SourceExamples, ...]
    warnings: tuple[str, ...] = ()

    def text(self, *, color: bool = False) -> str:
        """The examples with the tokens that have a loss in ANSI colors, or in brackets."""
        before, after = (_COLOR, _NO_COLOR) if color else _BRACKETS
        lines = [f"tokens with a loss: {before}{'green' if color else 'in such brackets'}{after}"]
        for source in self.sources:
            lines += ["", source.heading]
            for example in source.examples:
                runs = [f"{before}{run.text}{after}" if run.has_loss else run.text for run in example.runs]
                lines += ["", f"--- {example.heading}", "".join(runs)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = [paragraph(f"warning: {warning}") for warning in self.warnings]
        parts.append(paragraph("Tokens with a loss are green."))
        for source in self.sources:
            parts.append(paragraph(source.heading))
            for example in source.examples:
                runs = ((html.escape(run.text), run.has_loss) for run in example.runs)
                spans = [f"<span style='{_LOSS_STYLE}'>{text}</span>" if loss else text for text, loss in runs]
                parts += [paragraph(example.heading), f"<pre style='{_TEXT_STYLE}'>{''.join(spans)}</pre>"]
        return "\n".join(parts)


@checked
def show(config: ConfigDict | Config, *, num: int = 3) -> Examples:
    """Examples of the training data of a config, from its first sequences: what a chat template makes of chats, which
    tokens have a loss, and where documents begin and end. Sources that are not tokenized yet are tokenized.

    Args:
      config: a ConfigDict or Config. A source of several stages is shown with the first of them.
      num: the number of documents or prompts of each source, or of groups of traces.
    Raises:
      UserError: the config is invalid, or the data cannot be read.
    """
    return examples_of_stages(load_stages(config), num)


def examples_of_stages(stages: Sequence[Stage], num: int, log: Callable[[str], None] | None = None) -> Examples:
    """As `show`.

    Args:
      log: prints one line while a corpus is opened.
    """
    sources, warnings = dict[str, SourceExamples](), dict[str, None]()
    for stage in stages:
        opened = open_training_data(stage.config, log)
        warnings |= dict.fromkeys(opened.warnings)
        if isinstance(opened, Prompts):
            sources.setdefault("rollouts.prompts", _prompt_examples(opened, num))
        elif isinstance(opened, TraceData):
            sources.setdefault("data.traces", _trace_examples(opened, stage.config, num))
        else:
            for source in opened.sources:
                if source.name not in sources:
                    sources[source.name] = _source_examples(opened, source, num)
    return Examples(sources=tuple(sources.values()), warnings=tuple(warnings))


def open_training_data(config: Config, log: Callable[[str], None] | None) -> Corpus | TraceData | Prompts:
    """What a run trains on, or the prompts of its rollouts.

    Args:
      log: prints one line while a corpus is opened, and lines about its progress are printed then, too.
    Raises:
      UserError: as `open_corpus` and `open_traces`, or rollouts are of another program.
    """
    tokenizer = tokenizer_of(config.data)
    if config.rollouts.source == "model":
        return open_prompts(config, tokenizer)
    if config.rollouts.source:
        raise UserError("the rollouts of another program do not exist before the run: set config.data.traces to a file")
    if config.data.traces:
        return open_traces(config, tokenizer)
    if config.posttrain.loss:
        raise UserError(f"config.posttrain.loss={config.posttrain.loss!r} without traces: set config.data.traces")
    with progress_lines("reading the corpus", is_shown=log is not None) as update:
        return open_corpus(config.data, progress=update, log=log or (lambda line: None), tokenizer=tokenizer)


def _trace_examples(data: TraceData, config: Config, num: int) -> SourceExamples:
    """The first groups; the shared prefix of a group is in its first trace."""
    masks = bool(config.posttrain.loss) and config.posttrain.mask_truncated
    examples = [
        _trace_example(tree, number, masks, data.tokenizer)
        for tree in data.train.trees[:num]
        for number in range(len(tree.traces))
    ]
    in_loss = [trace.in_loss & (not (masks and trace.is_truncated)) for trace in data.traces]
    return SourceExamples(
        name="data.traces",
        unit="trace",
        num_documents=len(data.traces),
        num_tokens=sum(map(len, in_loss)),
        num_loss_tokens=int(sum(mask.sum() for mask in in_loss)),
        examples=tuple(examples),
    )


def _trace_example(tree: Tree, number: int, masks_truncated: bool, tokenizer: Tokenizer) -> Example:
    trace = tree.traces[number]
    first = tree.num_prefix_tokens if number else 0
    has_loss = np.append(trace.in_loss[1:], False)[first:] & (not (masks_truncated and trace.is_truncated))
    group = None if (trace.group or "").startswith("pair ") else trace.group
    known = dict(group=group, reward=trace.reward, advantage=trace.advantage)
    parts = [trace.where, f"answer {number + 1} of {len(tree.traces)}"]
    parts += [f"{name} {x if isinstance(x, str) else f'{x:.4g}'}" for name, x in known.items() if x is not None]
    parts += ["truncated"] * trace.is_truncated
    if tree.num_prefix_tokens:
        parts.append(f"{'after the' if number else 'with a'} shared prefix of {tree.num_prefix_tokens:,} tokens")
    return _example(", ".join(parts), trace.tokens[first:], has_loss, tokenizer)


def _prompt_examples(prompts: Prompts, num: int) -> SourceExamples:
    shown = [(prompt.where, prompt.ids, np.zeros(len(prompt.ids), bool)) for prompt in prompts.prompts[:num]]
    return SourceExamples(
        name="rollouts.prompts",
        unit="prompt",
        num_documents=len(prompts.prompts),
        num_tokens=sum(len(prompt.ids) for prompt in prompts.prompts),
        num_loss_tokens=0,
        examples=tuple(_example(*prompt, prompts.tokenizer) for prompt in shown),
    )


def _example(title: str, tokens: np.ndarray, has_loss: np.ndarray, tokenizer: Tokenizer) -> Example:
    """
    Args:
      has_loss: bool [tokens], of the token after each one.
    """
    runs = tuple(_runs(tokens, has_loss, tokenizer))
    return Example(title=title, num_tokens=len(tokens), num_loss_tokens=int(has_loss.sum()), runs=runs)


def _source_examples(corpus: Corpus, source: CorpusSource, num: int) -> SourceExamples:
    store = source.train.store
    num_tokens = int(store.offsets[-1])
    # The last token of a document predicts nothing.
    num_loss_tokens = num_tokens - store.num_documents
    if store.answers is not None:
        num_loss_tokens = int((store.answers[:, 1] - store.answers[:, 0]).sum())
    return SourceExamples(
        name=source.name or "data.sources",
        num_documents=store.num_documents,
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens,
        examples=tuple(islice(_examples(source, corpus.tokenizer), num)),
    )


def _examples(source: CorpusSource, tokenizer: Tokenizer) -> Iterator[Example]:
    """Yields the documents of one epoch of a source, in the order of its sequences."""
    for i in range(source.train.num_sequences):
        sequence = source.train[i]
        num_documents = int(sequence["segment_ids"].max())
        for number in range(1, num_documents + 1):
            is_document = sequence["segment_ids"] == number
            tokens, has_loss = sequence["tokens"][is_document], sequence["loss_weights"][is_document] > 0
            is_complete = tokens[-1] == tokenizer.end_of_document_id
            title = f"sequence {i}, document {number} of {num_documents}{'' if is_complete else ', without its end'}"
            yield _example(title, tokens, has_loss, tokenizer)


def _runs(tokens: np.ndarray, has_loss: np.ndarray, tokenizer: Tokenizer) -> Iterator[Run]:
    """The runs of a document.

    Args:
      has_loss: bool [tokens], of the token after each one.
    """
    is_trained = np.concatenate([[False], has_loss[:-1]])
    borders = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(tokens)]
    for begin, end in zip(borders[:-1], borders[1:]):
        num_left_out = end - begin - _FIRST_TOKENS - _LAST_TOKENS
        if num_left_out <= 0:
            text = _text(tokens, begin, end, tokenizer)
        else:
            first, last = (begin, begin + _FIRST_TOKENS), (end - _LAST_TOKENS, end)
            note = f" ... [{count_text(num_left_out, 'more token')}] ... "
            text = note.join(_text(tokens, *span, tokenizer) for span in (first, last))
        yield Run(text, bool(is_trained[begin]))


def _text(tokens: np.ndarray, begin: int, end: int, tokenizer: Tokenizer) -> str:
    """The text of some tokens, which for many tokenizers depends on the token before them."""
    before = tokens[max(begin - 1, 0) : begin]
    text = tokenizer.decode(tokens[max(begin - 1, 0) : end], special_tokens=True)
    return text[len(tokenizer.decode(before, special_tokens=True)) :].translate(_PICTURES)


def _loss_text(num_tokens: int, num_loss_tokens: int) -> str:
    return f"{count_text(num_tokens, 'token')}, {num_loss_tokens:,} with a loss ({num_loss_tokens / num_tokens:.1%})"
