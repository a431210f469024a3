"""usage: python scripts/retrieval_tokenizer.py configs/retrieval_tokenizer.json

Writes the tokenizer of configs/retrieval.py: one token for each word of the source `phone-book`.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from jaxlc.data.texts.sources import FILLERS, NAMES

_UNKNOWN, _END = "<|unknown|>", "<|endoftext|>"


def main(path: str) -> None:
    words = [_UNKNOWN, _END, ".", *NAMES, *(f"{pair:02}" for pair in range(100)), *FILLERS]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=_UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([_UNKNOWN, _END])
    Path(path).write_text(
        json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
