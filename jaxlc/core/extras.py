"""Optional dependencies: which extra of jaxlc installs a package, and what happens where it is missing."""

import importlib.util

from jaxlc.core.errors import UserError

# Package -> the extra in pyproject.toml that installs it.
EXTRAS = {
    "huggingface_hub": "hf",
    "jinja2": "hf",
    "lm_eval": "lm-eval",
    "matplotlib": "plot",
    "pyarrow": "data",
    "tensorboardX": "tensorboard",
    "tokamax": "mosaic",
    "tokenizers": "hf",
    "wandb": "wandb",
    "wonderwords": "evals",
}


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. Does not import it."""
    return importlib.util.find_spec(package) is not None


def install_hint(package: str) -> str:
    """The command that installs an optional package."""
    return f"pip install -e '.[{EXTRAS[package]}]' in a checkout of jaxlc"


def require(package: str, feature: str) -> None:
    """Checks that an optional package is installed.

    Args:
      feature: what needs it, as the subject of the error: "data.tokenizer".
    Raises:
      UserError: it is not.
    """
    if not is_installed(package):
        raise UserError(f"{feature} needs the package {package}, which is not installed: {install_hint(package)}")
