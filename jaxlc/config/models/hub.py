"""Models and data sets of the Hugging Face hub, downloaded to its cache with the optional package
`huggingface_hub`. Imports no jax.
"""

import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from jaxlc.core import Update, UserError, errors, progress_lines, reason_of
from jaxlc.core.files import nearest_path, read_json_file, replacing

# config, tokenizer and chat template: some megabytes
DESCRIPTION_FILES = ("*.json", "*.model", "*.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODEL_FILES = (*DESCRIPTION_FILES, "*.safetensors")
_MODEL_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
DATASET_PREFIX = "hub:"
_DATASET = re.compile(rf"{DATASET_PREFIX}({_MODEL_ID.pattern})(?:@([^/@]+))?(?:/([^/]+)/([^/]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_model_id(name: str) -> bool:
    """Whether `name` has the form ORGANIZATION/NAME, and no directory with such a name, or a
    similar one, is here.
    """
    path = Path(name)
    is_path = path.parent.is_dir() or name.startswith("runs/") or nearest_path(path) is not None
    return _MODEL_ID.fullmatch(name) is not None and not is_path


def download(repo_id: str, setting: str, patterns: Sequence[str]) -> Path:
    """The directory of a model in the cache of the hub; downloads the files that the cache lacks.

    Args:
      repo_id: ORGANIZATION/NAME.
      setting: the setting or argument that names it, for errors.
      patterns: of the names of files, such as `DESCRIPTION_FILES`.
    Raises:
      UserError: the package is missing, the hub cannot be reached, or it has no such model.
    """
    errors.require("huggingface_hub", f"{setting} {repo_id!r}, which is not a path that exists,")
    import huggingface_hub

    try:
        with _downloading(repo_id):
            return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))
    except Exception as error:  # of the package, of its HTTP client, and OSError
        raise UserError(
            f"cannot download {setting} {repo_id!r}: {_reason(error, 'model')}; or download it elsewhere and pass its"
            " directory"
        ) from error


def _downloading(repo_id: str) -> AbstractContextManager[Update]:
    """Lines about the progress; in a terminal, the package has bars of its own."""
    return progress_lines(f"downloading {repo_id}", is_shown=not sys.stderr.isatty())


def _reason(error: Exception, kind: str) -> str:
    """Why the hub did not give a model or a data set, and what to do."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError"}:  # or its terms are not accepted
        return f"the hub has no such {kind} for you: check the name, its terms of use, and `hf auth login`"
    if "RevisionNotFoundError" in names:
        return "it has no such revision: name a commit, branch or tag"
    if getattr(error, "response", None) is not None:
        return f"the hub refuses it ({str(error).splitlines()[0]})"
    if isinstance(error, OSError) and error.errno:
        return reason_of(error)
    return "the hub cannot be reached, and its cache has no copy: try again with a connection"


def prepare_push(repo_id: str, *, public: bool) -> None:
    """Checks that the user may write to the repository of a model; creates it if it does not exist.

    Args:
      public: a new one is public, instead of private; one that exists stays as it is.
    Raises:
      UserError: the package is missing, the hub cannot be reached, or the user may not write.
    """
    if _MODEL_ID.fullmatch(repo_id) is None:
        raise UserError(f"invalid push_to_hub={repo_id!r}: expected ORGANIZATION/NAME")
    errors.require("huggingface_hub", "push_to_hub")
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo_id, private=not public, exist_ok=True)
        api.auth_check(repo_id, write=True)
    except Exception as error:  # as in `download`
        raise UserError(
            f"cannot write to {repo_id} of the hub: {_reason(error, 'model')}; use a token that may write to it"
        ) from error


def push(directory: Path, repo_id: str, message: str) -> None:
    """Makes the files of a directory the content of a repository, in one commit.

    Raises:
      UserError: the upload failed, and the repository is as before: a new one has no files.
    """
    import huggingface_hub

    try:
        huggingface_hub.HfApi().upload_folder(
            repo_id=repo_id, folder_path=directory, commit_message=message, delete_patterns="*"
        )
    except Exception as error:  # as in `download`
        raise UserError(
            f"{directory} is written, and its upload to {repo_id} failed, which is as before, or without files if it is"
            f" new: {_reason(error, 'model')}; upload it with `hf upload {repo_id} {directory}`"
        ) from error


class Dataset(NamedTuple):
    """Files of a data set of the hub, as hub:ORGANIZATION/NAME@REVISION/SUBSET/SPLIT."""

    repo_id: str
    revision: str  # commit, branch or tag
    subset: str = ""  # "": the only one
    split: str = ""

    @classmethod
    def parse(cls, name: str, setting: str) -> "Dataset":
        """Raises UserError if `name`, of `setting`, has another form."""
        if (match := _DATASET.fullmatch(name)) is None:
            raise UserError(
                f"{setting}: invalid {name!r}: expected hub:ORGANIZATION/NAME@REVISION/SUBSET/SPLIT; the revision, and"
                " subset and split together, may be left out"
            )
        repo_id, revision, subset, split = match.groups()
        return cls(repo_id, unquote(revision or "main"), subset or "", split or "")

    @property
    def root(self) -> str:
        """URL of fsspec."""
        return f"hf://datasets/{self.repo_id}@{self.revision}/"


@functools.cache
def _commit(repo_id: str, revision: str) -> str:
    """The commit of a revision of a data set; the same one while a process lives."""
    if _COMMIT.fullmatch(revision):
        return revision
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(repo_id, revision=revision)
    assert info.sha is not None, info
    return info.sha


def dataset_files(name: str, setting: str, *, is_streamed: bool = False) -> list[tuple[str, str]]:
    """The files of a split: their paths in the data set, and in the cache of the hub.

    What is downloaded once is not asked for again if the revision is a commit, so that such a run
    starts without a network.

    Args:
      name: as `Dataset`.
      setting: that names it, for errors.
      is_streamed: nothing is downloaded, and the files have URLs of fsspec instead of paths.
    Raises:
      UserError: a package is missing, the hub cannot be reached or refuses, or the data set has no
        such subset or split; the error names those that exist.
    """
    asked = Dataset.parse(name, setting)
    for package in ("huggingface_hub", "datasets"):
        errors.require(package, f"{setting} {name!r}")
    import huggingface_hub

    try:
        asked = asked._replace(revision=_commit(asked.repo_id, asked.revision))
        paths = _paths_of(asked)
        if is_streamed:
            return [(path, asked.root + path) for path in paths]
        files = list[tuple[str, str]]()
        with _downloading(asked.repo_id) as update:
            for path in paths:
                file = huggingface_hub.hf_hub_download(
                    asked.repo_id, path, repo_type="dataset", revision=asked.revision
                )
                files.append((path, file))
                update(len(files), len(paths))
        return files
    except UserError as error:
        raise UserError(f"{setting} {name!r}: {error}") from error
    except Exception as error:  # as in `download`
        raise UserError(
            f"cannot download {setting} {name!r}: {_reason(error, 'data set')}; or download its files elsewhere"
        ) from error


def pin_advice(names: Iterable[str], setting: str) -> Iterator[str]:
    """A warning for each data set among the sources whose files may be others in a later run."""
    for name in names:
        if name.startswith(DATASET_PREFIX):
            asked = Dataset.parse(name, setting)
            if (commit := _commit(asked.repo_id, asked.revision)) != asked.revision:
                yield (
                    f"{setting}: {name} is {DATASET_PREFIX}{asked.repo_id}@{commit} now: name this commit to have the"
                    " same files later"
                )


def _paths_of(asked: Dataset) -> list[str]:
    """The paths of the files of a split in the commit of a data set.

    Raises:
      UserError: it has no such subset or split, or files that are not plain.
    """
    import huggingface_hub

    organization, _, repo_name = asked.repo_id.partition("/")
    assets = huggingface_hub.cached_assets_path("jaxlc", organization, repo_name)
    known = assets / f"{asked.revision}.{asked.subset}.{asked.split}.json"
    if known.is_file():
        return read_json_file(known)
    import datasets

    try:
        subsets = datasets.get_dataset_config_names(asked.repo_id, revision=asked.revision)
        subset = _one_of(subsets, asked.subset, "subset")
        builder = datasets.load_dataset_builder(asked.repo_id, subset, revision=asked.revision)
    except (ValueError, RuntimeError, datasets.exceptions.DataFilesNotFoundError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"its files cannot be listed ({reason_of(error)})") from error
    assert builder.config.data_files is not None, asked
    files = {str(split): urls for split, urls in builder.config.data_files.items()}
    urls = files[_one_of(list(files), asked.split, "split")]
    if others := [url for url in urls if not url.startswith(asked.root)]:
        raise UserError(f"unsupported: {others[0]!r} is not a file of the data set")
    paths = [url.removeprefix(asked.root) for url in urls]
    with replacing(known) as out:
        out.write(json.dumps(paths).encode())
    return paths


def _one_of(names: Sequence[str], name: str, what: str) -> str:
    if name in names or (not name and len(names) == 1):
        return name or names[0]
    expected = (
        f"add /SUBSET/SPLIT: there is more than one {what}"
        if not name
        else f"it has no {what} {name!r}"
    )
    raise UserError(f"{expected}; expected one of {', '.join(names) or 'none'}")
