"""usage: python scripts/quickstart_tokenizer.py configs/quickstart_tokenizer.json

Writes the tokenizer of configs/quickstart.py: byte-level BPE (Sennrich et al. 2016) of Python code,
trained on the sources of Python's standard library.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END = "<|endoftext|>"
# Names with the space before them, numbers, other characters, and white space.
PATTERN = r" ?[A-Za-z_]+| ?\d| ?[^\sA-Za-z\d_]+|\n+[ \t]*|[ \t]+"


def texts() -> Iterator[str]:
    """The sources of the standard library, without its tests."""
    directory = Path(sys.base_prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in sorted(directory.rglob("*.py")):
        if not {"site-packages", "test", "tests"} & {*path.relative_to(directory).parts}:
            yield path.read_text(errors="replace")


def main(path: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(path, pretty=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
