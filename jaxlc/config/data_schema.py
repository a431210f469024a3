"""The section `data` of the settings and the sources of a mixture; see `jaxlc.config.schema`. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from jaxlc.config.ranges import Between0And1
from jaxlc.config.values import Tokens

CHAT_TEMPLATES = ("chatml", "llama3")  # names that data.chat_template knows


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of data.mixture."""

    name: str  # NAME in config.data.mixture.NAME
    # files, directories or glob patterns, as data.sources.
    paths: tuple[str, ...] = ()
    # share of the tokens of a run, padding not counted. Shares are divided by their sum.
    share: float = 1.0
    # packed: documents and remainders of long ones are packed into sequences. full_length: only documents of at least
    # data.seq_len tokens, cut into sequences of one document each; remainders are not used.
    pool: Literal["packed", "full_length"] = "packed"
    # pool packed: documents are cut into chunks of at most this number of tokens before they are packed, such as 65536
    # in sequences of 524288. 0: data.seq_len.
    chunk_tokens: int = 0
    min_tokens: int = 0  # shorter documents are not used; lengths include the end-of-document token
    max_tokens: int = 0  # longer documents are not used; 0: no limit
    # limits in tokens between length classes, increasing, for length_weights.
    length_limits: tuple[int, ...] = ()
    # weight of the documents of each length class, one more than length_limits: 1,2.5 with length_limits=8192 repeats
    # documents of at least 8192 tokens 2.5 times per epoch. 0: not used. Empty: 1.
    length_weights: tuple[float, ...] = ()
    # documents longer than a sequence. cut: into several chunks. truncate: only the first data.seq_len tokens are used.
    # drop: not used. auto: cut, and drop for chats.
    overlong: Literal["auto", "cut", "truncate", "drop"] = "auto"
    # field of records that holds the document; dots name fields of fields, such as data.text.
    text_field: str = "text"
    # field of records that holds token IDs, such as input_ids, instead of text; "tokens" in .idx files of Megatron-LM.
    token_field: str = ""
    # field of records that holds a chat, rendered with the chat template. Only the answers of the assistant are trained
    # on. Empty: that of chat_format, or no chats without chat_format.
    chat_field: str = ""
    # messages: a list of messages with role and content, in the field messages. sharegpt: a list of turns with from and
    # value, in the field conversations. alpaca: the fields instruction, input and output. completion: the fields prompt
    # and completion, texts or lists of messages. Empty: messages.
    chat_format: Literal["", "messages", "sharegpt", "alpaca", "completion"] = ""
    # chats: weight of a token of an answer. token: 1. answer: the same sum for each answer, 1 on average.
    answer_weights: Literal["token", "answer"] = "token"
    # suffixes of more files that are one document each, such as .tex; "code" adds those of programs.
    text_suffixes: tuple[str, ...] = ()

    @property
    def has_chats(self) -> bool:
        return bool(self.chat_field or self.chat_format)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text sources, tokenizer and packing into sequences."""

    # files, directories or glob patterns, separated by commas, of .txt, .py, .md, .rst, .jsonl, .jsonl.gz, .jsonl.zst,
    # .parquet and .arrow files; "python-stdlib", the sources of Python's standard library; or "phone-book", documents
    # of data.seq_len words that repeat numbers.
    sources: tuple[str, ...] = ("python-stdlib",)
    # named sources with shares of the tokens, instead of data.sources; docs/data.md. Set the fields of a source with
    # config.data.mixture.NAME.FIELD; a new NAME adds a source.
    mixture: tuple[SourceConfig, ...] = ()
    # files, directories or glob patterns of traces, instead of data.sources: prompts with their answers, for supervised
    # fine-tuning of several answers and for config.posttrain; docs/post_training.md.
    traces: tuple[str, ...] = ()
    overlong_traces: Literal["error", "drop", "truncate"] = "error"  # what happens to traces longer than a sequence
    # "bytes" (257 ids), the path of a Hugging Face tokenizer.json or of a directory that contains one, or a hub id
    # ORGANIZATION/NAME. If it is not set: the tokenizer of model.init_from, or bytes without it.
    tokenizer: str = "bytes"
    # text of the token that ends each document, such as <|im_end|>. Empty: chosen from the special tokens of the
    # tokenizer, such as <|end_of_text|>, <|endoftext|> or </s>, or its eos_token.
    end_token: str = ""
    # True: the text of a special token, such as <|im_end|>, in documents, prompts and answers is encoded as this token.
    # False: it is text; a warning has the number of such texts. In a rendered chat it is always the token.
    parse_special_tokens: bool = False
    # text of the token that each document and each prompt of plain text starts with. auto: the tokens that transformers
    # puts there, such as <|begin_of_text|> of Llama 3 and <bos> of Gemma; of a run in model.init_from, its setting.
    # "bytes" has none. Empty: none. Chats start as their template says. A run that resumes keeps its first setting.
    start_token: str = "auto"
    # sequence length in tokens, over all context ranks, such as 131072 or 128K; documents are packed into sequences.
    seq_len: Tokens = Tokens(4096)
    # field of records that holds the document; dots name fields of fields, such as data.text.
    text_field: str = "text"
    # number of records of a source, without a document that can be used, that are skipped with a warning.
    max_bad_records: int = 0
    # template of chats: "chatml", "llama3", a Jinja file, or its text. Empty: that of the run in model.init_from, or of
    # the tokenizer.
    chat_template: str = ""
    # fraction of documents held out for evaluation, selected by a hash of their names. With too few documents, this
    # fraction of the longest one, at its end.
    eval_fraction: Between0And1[float] = 0.05
    # sources for evaluation, as data.sources. Their files are not trained on, and eval_fraction has no effect. Empty:
    # eval_fraction of data.sources.
    eval_sources: tuple[str, ...] = ()
    seed: int = 0  # random seed of the order of sequences
    cache_dir: str = "~/.cache/jaxlc"  # directory where tokenized corpora are stored
    # number of processes that tokenize a corpus of more than 64 MB; 0: one per CPU core.
    tokenizing_processes: int = 0
    prefetch_steps: int = 2  # number of batches prepared in advance; 0: none
