"""Checks of the sources in data.mixture. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.ranges import range_problems
from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.text import nearest_name


def mixture_problems(data: DataConfig) -> Iterator[str]:
    """Values of sources that are out of range or contradict each other, as messages."""
    names = [source.name for source in data.mixture]
    if names and all(source.share == 0 for source in data.mixture):
        yield "all shares of config.data.mixture are 0: give a source a share greater than 0"
    for source in data.mixture:
        yield from range_problems(f"data.mixture.{source.name}", source)
        for problem in _source_problems(source, data.seq_len, names):
            yield f"config.data.mixture.{source.name}.{problem}"


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
    limits, weights = source.length_limits, source.length_weights
    if list(limits) != sorted(set(limits)) or any(limit < 1 for limit in limits):
        yield f"length_limits={limits}: expected increasing numbers of tokens, at least 1"
    if (weights or limits) and len(weights) != len(limits) + 1:
        yield (
            f"length_weights has {len(weights)} values and length_limits {len(limits)}: expected one weight more than"
            " limits"
        )
    if weights and (min(weights) < 0 or max(weights) == 0):
        yield f"length_weights={weights}: expected weights of at least 0, one of them greater"
