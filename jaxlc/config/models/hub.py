"""Models of the Hugging Face hub, downloaded with the optional package `huggingface_hub`. Imports
no jax.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxlc.core import errors
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import nearest_path

# config, tokenizer and chat template: some megabytes
DESCRIPTION_FILES = ("*.json", "*.model", "*.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHT_FILES = ("*.safetensors",)
_MODEL_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_model_id(name: str) -> bool:
    """Whether `name` has the form ORGANIZATION/NAME, and no directory with such a name, or a
    similar one, is here.
    """
    path = Path(name)
    is_path = path.parent.is_dir() or name.startswith("runs/") or nearest_path(path) is not None
    return _MODEL_ID.fullmatch(name) is not None and not is_path


def download(repo_id: str, what: str, *, with_weights: bool) -> Path:
    """The directory of the model in the cache of the hub; downloads the files that the cache lacks.

    Args:
      repo_id: ORGANIZATION/NAME.
      what: the setting or argument that names it, for errors.
      with_weights: False: the description of the model only.
    Raises:
      UserError: the package is missing, the hub cannot be reached, or it has no such model.
    """
    patterns = [*DESCRIPTION_FILES, *(WEIGHT_FILES if with_weights else ())]
    return _download(repo_id, patterns, what, "model")


def download_tokenizer(repo_id: str) -> Path:
    """The directory with the tokenizer files of the model `repo_id`, as `download`."""
    return _download(repo_id, TOKENIZER_FILES, "data.tokenizer", "tokenizer")


def _download(repo_id: str, patterns: Sequence[str], setting: str, what: str) -> Path:
    errors.require("huggingface_hub", f"{setting} {repo_id!r}, which is not a path that exists,")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))
    except (
        Exception
    ) as error:  # the package raises errors of its own, of its HTTP client and OSError
        reason = "the hub cannot be reached, and its cache has no copy: try again with a connection"
        # or its terms are not accepted
        if "RepositoryNotFoundError" in [cls.__name__ for cls in type(error).__mro__]:
            reason = "the hub has no such model for you: check the name, its terms of use, and `hf auth login`"
        elif isinstance(error, OSError) and error.errno:
            reason = reason_of(error)
        raise UserError(
            f"cannot download {setting} {repo_id!r}: {reason}; or download the {what} elsewhere and pass its directory"
        ) from error
