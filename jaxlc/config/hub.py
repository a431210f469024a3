"""Models of the Hugging Face hub, downloaded with the optional package `huggingface_hub`. Imports no jax."""

from pathlib import Path

from jaxlc.core import extras
from jaxlc.core.errors import UserError, reason_of

DESCRIPTION_FILES = ("*.json", "*.model", "*.jinja")  # config, tokenizer and chat template: some megabytes
WEIGHT_FILES = ("*.safetensors",)


def download(repo_id: str, *, with_weights: bool) -> Path:
    """The directory of the model in the cache of the hub, which is downloaded before if it is not there.

    Args:
      repo_id: ORGANIZATION/NAME.
      with_weights: False: the description of the model only.
    Raises:
      UserError: the package is missing, the hub cannot be reached, or it has no such model.
    """
    extras.require("huggingface_hub", f"model.init_from {repo_id!r}, which is not a directory,")
    import huggingface_hub

    patterns = [*DESCRIPTION_FILES, *(WEIGHT_FILES if with_weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as error:  # the package raises errors of its own, of its HTTP client and OSError
        reason = reason_of(error)
        raise UserError(
            f"cannot download model.init_from {repo_id!r} ({type(error).__name__}: {reason[:200]}); check the name, or"
            " download the model elsewhere and pass its directory"
        ) from error
