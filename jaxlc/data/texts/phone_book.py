"""The built-in source `phone-book`: names with numbers that later lines of the same document
repeat.

    Alma 48 29 17 . of the one more Boris 10 33 44 . what Alma 48 29 17 .

Numbers are random, so a model predicts one only if the document has contained the entry before, up
to a whole sequence earlier, and if its attention reaches that far (multi-query associative recall,
Arora et al. 2023, arXiv:2312.04927). Short documents have from one name to a few, because a model
learns to repeat a number before it learns to match names; long documents have all names, so that
many repetitions are thousands of tokens apart.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxlc.config.schema import DataConfig
from jaxlc.core.files import local_path, replacing, write_errors_explained

PHONE_BOOK = "phone-book"
_NAMES = """
Alma Boris Clara Daniel Edith Felix Greta Henry Ines Jonas Karla Leo Mona Nils Olga Paul Quentin Rosa Simon Tilda Ugo
Vera Walter Xenia Yves Zoe Anton Berta Cesar Dora Emil Frida Gustav Hanna Igor Julia Kurt Laura Marco Nadia Otto Petra
Rainer Sofia Theo Ulla Victor Wanda Yara Zeno Adam Bella Carl Diana Erik Flora Georg Helga Ivan Judith Klaus Lena Max
Nora Agnes Albert Anita Arthur Astrid August Bruno Carmen Celia Conrad Dagmar David Doris Edgar Elena Elias Emma Ernst
Esther Eva Fiona Franz Gerda Gloria Hector Hilda Hugo Ingrid Iris Isaac Jakob Jana Joel Josef Judy Kira Lars Linda
Lotte Lucas Luisa Magda Martin Mira Naomi Nikita Noah Oscar Pablo Paula Pia Rita Robin Ruben Ruth Samuel Sara Silas
Tessa Tomas Vito
"""
NAMES = tuple(_NAMES.split())
_FILLERS = """
the of and to in a is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should hotel big give air line set own under read last never us
left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going wish
"""
FILLERS = tuple(_FILLERS.split())
_FORMAT = 1  # increment it when documents change
_NUM_TOKENS = 4 << 20  # tokens of all documents together
_MIN_DOCUMENTS = 64
_TOKENS_PER_NAME = 16  # at least, of a document
_ALL_NAMES_TOKENS = 4096  # length of a document with as many names as fit
_MAX_FILLER = 0.3  # largest probability of a run of filler words before an entry


def phone_book_documents(num_tokens: int, seed: int = 0) -> Iterator[list[str]]:
    """Documents of `num_tokens` words, without end; they depend on the arguments only."""
    rng = random.Random(f"{seed} {num_tokens}")
    while True:
        yield _document(rng, num_tokens)


def entry(name: str, number: int) -> list[str]:
    """The words of an entry: a name and three pairs of digits."""
    return [name, f"{number // 10_000:02}", f"{number // 100 % 100:02}", f"{number % 100:02}"]


def _document(rng: random.Random, num_tokens: int) -> list[str]:
    max_names = max(1, min(len(NAMES), num_tokens // _TOKENS_PER_NAME))
    num_names = round(max_names ** rng.uniform(min(1.0, num_tokens / _ALL_NAMES_TOKENS), 1.0))
    return list(
        itertools.chain.from_iterable(_parts(rng, num_tokens, rng.sample(NAMES, num_names)))
    )[:num_tokens]


def _parts(rng: random.Random, num_tokens: int, names: Sequence[str]) -> Iterator[list[str]]:
    """Entries of `names` in random order, and runs of filler words between them, of at least
    `num_tokens` words.
    """
    numbers = {name: rng.randrange(10**6) for name in names}
    filler = rng.uniform(0.0, _MAX_FILLER)
    num_words = 0
    while num_words < num_tokens:
        is_filler = rng.random() < filler
        part = _filler(rng) if is_filler else entry(name := rng.choice(names), numbers[name])
        num_words += len(part)
        yield part


def _filler(rng: random.Random) -> list[str]:
    """A run of words, of which those at the start of FILLERS are the most frequent, and a full
    stop.
    """
    return [FILLERS[int(len(FILLERS) * rng.random() ** 2)] for _ in range(rng.randrange(5, 15))] + [
        "."
    ]


def retrieval_prompt(rng: random.Random, num_tokens: int, distance: int) -> tuple[str, str]:
    """A document that ends with a name, and the number of that name.

    Args:
      num_tokens: of the document.
      distance: tokens from the only entry of the name to the end, plus at most the length of one part.
    """
    asked, *others = rng.sample(NAMES, len(NAMES))
    name, *number = entry(asked, rng.randrange(10**6))
    parts = list(_parts(rng, num_tokens, others))
    lengths = itertools.accumulate(len(part) for part in reversed(parts))
    num_after = next(index for index, length in enumerate(lengths, 1) if length >= distance)
    parts.insert(len(parts) - num_after, [name, *number])
    words = [*itertools.chain.from_iterable(parts), name][-num_tokens:]
    return " ".join(words), " ".join(number)


def phone_book_file(config: DataConfig) -> Path:
    """The file of the source in data.cache_dir, with documents that fill a sequence; written if it
    does not exist.

    Raises:
      UserError: it cannot be written.
    """
    num_tokens = config.seq_len
    num_documents = max(_MIN_DOCUMENTS, _NUM_TOKENS // num_tokens)
    path = local_path(config.cache_dir) / f"{PHONE_BOOK}-{_FORMAT}-{num_tokens}.jsonl"
    if not path.exists():
        with write_errors_explained(
            f"data.cache_dir {config.cache_dir!r}", "use a writable directory"
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            documents = itertools.islice(phone_book_documents(num_tokens), num_documents)
            # several processes may write the same content at the same time
            with replacing(path) as out:
                out.writelines(
                    json.dumps({"text": " ".join(words)}).encode() + b"\n" for words in documents
                )
    return path
