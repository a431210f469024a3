"""Time of tokenizing chats with a template in a process of its own, compared with one in this process.

    python -m benchmarks.chat_templates --chats=500 --repeats=9 [--bytes]

Chats are random words, tokenized with a byte-level BPE of 8,000 tokens, or as bytes. The two cases alternate; the ratio
is the median of those of the pairs.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import tokenizers

from jaxlc.data.texts.documents import BadRecords, Fields
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.chat import ChatTemplate
from jaxlc.data.tokens.named_templates import TEMPLATES
from jaxlc.data.tokens.tokenized_pieces import Reader, tokenized_pieces
from jaxlc.data.tokens.tokenizers import load_tokenizer

_CHATML = TEMPLATES["chatml"]
# Without markers each answer is found with two further renderings.
_PLAIN = _CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _write_inputs(directory: Path, num_chats: int) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    with (directory / "chats.jsonl").open("w") as file:
        for _ in range(num_chats):
            turns = [(("user", text(10, 60)), ("assistant", text(30, 250))) for _ in range(rng.randint(1, 4))]
            messages = [dict(role=role, content=content) for turn in turns for role, content in turn]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        [text(20_000, 20_000)], tokenizers.trainers.BpeTrainer(vocab_size=8000, special_tokens=special)
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bytes", action="store_true", help="the tokenizer bytes, which needs almost no time")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        _write_inputs(directory, flags.chats)
        name = ("bytes",) if flags.bytes else (str(directory / "tokenizer.json"), "</s>")
        tokenizer = load_tokenizer(*name)
        files = list_files([str(directory / "chats.jsonl")]).files

        def seconds(template: ChatTemplate) -> float:
            reader = Reader(Fields(chat="messages"), BadRecords(), template)
            start = time.perf_counter()
            num_tokens = sum(len(piece.ids) for piece in tokenized_pieces(files, reader, tokenizer, print))
            assert num_tokens
            return time.perf_counter() - start

        for kind, source in (("with generation", _CHATML), ("without generation", _PLAIN)):
            here, there = ChatTemplate(source, {}), ChatTemplate(f"{{# #}}{source}", {})
            if here._template is None:  # only templates of jaxlc are rendered in this process
                from jaxlc.data.tokens.chat_environment import environment

                here._template = environment("\ufdd0", "\ufdd1").from_string(source)
            assert there.markers == here.markers  # starts the process
            pairs = [(seconds(here), seconds(there)) for _ in range(flags.repeats)]
            own, other = np.array(pairs).T
            print(
                f"{kind}: in this process {np.median(own):.2f} s (minimum {own.min():.2f}), in its own"
                f" {np.median(other):.2f} s ({other.min():.2f}), ratio {np.median(other / own):.3f}"
            )


if __name__ == "__main__":
    main()
