"""Download models, tokenizers and single files of the Hugging Face hub by their ids, with the revision that they had.

An id is `OWNER/NAME[/FILE][@REVISION]`; a path that exists is never read as one. Files lie in the cache of the package
`huggingface_hub` (HF_HOME), which downloads only what it lacks; with HF_HUB_OFFLINE=1 nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_ID = re.compile(
    rf"(?P<id>{_PART}/{_PART})(?P<rest>(?:/{_PART})*)(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")
# The files of a model that are read or that an export copies; none of a folder inside the model's.
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "SHA256SUMS")
_NOT_READ = ("*/*", "consolidated*")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "rwkv_vocab_v20230424.txt",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model or data set of the hub, as `OWNER/NAME[/REST][@REVISION]` names it.

    Attributes:
        id: OWNER/NAME.
        rest: what follows the id: the path of a file in a model, or the subset of a data set; "" if nothing does.
        revision: a branch, a tag or a commit; "" is the main branch.
    """

    id: str
    rest: str = ""
    revision: str = ""

    def __str__(self) -> str:
        rest = f"/{self.rest}" if self.rest else ""
        return f"{self.id}{rest}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(_COMMIT.fullmatch(self.revision))


def reference(text: str | os.PathLike[str]) -> Reference | None:
    """Return what a text names on the hub; None if a file or folder of that name exists here, or if it has not the form
    of an id."""
    match = _ID.fullmatch(text) if isinstance(text, str) else None
    if match is None or os.path.lexists(text):
        return None
    return Reference(match["id"], match["rest"].lstrip("/"), match["revision"] or "")


def reference_of(path: str | os.PathLike[str]) -> Reference | None:
    """Return the model, with its commit, of a folder or file that lies in the hub's cache; None for other paths."""
    parts = Path(path).expanduser().absolute().parts
    for i in range(len(parts) - 2):
        if parts[i].startswith("models--") and parts[i + 1] == "snapshots":
            name = parts[i].removeprefix("models--").replace("--", "/", 1)
            return Reference(name, "/".join(parts[i + 3 :]), parts[i + 2])
    return None


def local_path(text: str | os.PathLike[str], argument: str = "source") -> Path:
    """Return the path of a model: the given path, or, for the id of a model of the hub, the folder to which its files are
    downloaded; for OWNER/NAME/FILE the path of that file.

    Args:
        text: a path, or the id of a model.
        argument: the name of the argument that contains it, for error messages.

    Raises:
        ValueError: the hub has no such model, revision or file, does not give it to this user, or cannot be reached while
            the cache does not have it.
    """
    found = reference(text)
    return Path(text).expanduser() if found is None else _download(found, argument, _MODEL_FILES)


def config_path(text: str, argument: str = "source") -> Path:
    """Return the path of a model as `local_path` does, but download only config.json of a model that is given by its id."""
    found = reference(text)
    if found is None or found.rest:
        return local_path(text, argument)
    return _download(found, argument, ("config.json",))


def tokenizer_folder(text: str, argument: str = "tokenizer") -> Path | None:
    """Return the folder of a tokenizer's files by the id of a model or tokenizer of the hub, without its tensors; None if
    the text is no such id. Raises ValueError as `local_path` does."""
    found = reference(text)
    if found is None:
        return None
    if found.rest:
        return _download(found, argument, TOKENIZER_FILES).parent
    return _download(found, argument, TOKENIZER_FILES)


def pinned(text: str, argument: str, *, before: str = "") -> str:
    """Return the id of a model with the commit that its revision is now; other texts, such as paths, are returned unchanged.

    Args:
        text: an id, or any other text.
        argument: the name of the argument that contains it, for error messages.
        before: the id with its commit that the same run had earlier, which is returned if it is of the same model.

    Raises:
        ValueError: the hub has no such model or revision, or cannot be reached while the cache does not have it.
    """
    found = reference(text)
    if found is None or found.is_pinned:
        return text
    if is_same(found, reference(before)):
        return before
    return str(dataclasses.replace(found, revision=commit_of(found, argument)))


def is_same(found: Reference, before: Reference | None) -> bool:
    """Return whether an earlier reference with a commit is of the same model or data set as a reference without a revision."""
    if before is None or not before.is_pinned or found.revision:
        return False
    return (before.id, before.rest) == (found.id, found.rest)


def commit_of(found: Reference, argument: str, *, data: bool = False) -> str:
    """Return the commit of a model's or data set's revision; without a network, the one that the cache knows.

    Raises:
        ValueError: as `local_path`.
    """
    if found.is_pinned:
        return found.revision
    from huggingface_hub import HfApi

    kind = "dataset" if data else "model"
    try:
        info = HfApi().repo_info(found.id, revision=found.revision or None, repo_type=kind)
        assert info.sha is not None
        return info.sha
    except Exception as error:
        if is_refusal(error) or (commit := _cached_commit(found, kind)) is None:
            raise ValueError(explain(error, found, argument, kind)) from error
        return commit


def _cached_commit(found: Reference, kind: str) -> str | None:
    from huggingface_hub import constants

    folder = f"{kind}s--{found.id.replace('/', '--')}"
    path = Path(constants.HF_HUB_CACHE, folder, "refs", found.revision or "main")
    commit = path.read_text().strip() if path.is_file() else ""
    return commit if _COMMIT.fullmatch(commit) else None


def _download(found: Reference, argument: str, files: tuple[str, ...]) -> Path:
    """Return the folder of a model's files in the hub's cache, or the path of the one file that the reference names, after
    downloading what the cache lacks."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            found.id,
            revision=found.revision or None,
            allow_patterns=[found.rest] if found.rest else list(files),
            ignore_patterns=None if found.rest else list(_NOT_READ),
        )
    except Exception as error:
        raise ValueError(explain(error, found, argument, "model")) from error
    path = Path(folder, found.rest)
    if not path.exists():
        names = repr(found.rest) if found.rest else " or ".join(files)
        raise ValueError(
            f"{argument}={str(found)!r}: the model {found.id} of the hub has no file {names}"
        )
    return path


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is an answer of the hub, which a copy in the cache does not change."""
    from huggingface_hub import errors

    kinds = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.DisabledRepoError)
    return isinstance(error, (*kinds, errors.HFValidationError)) or _is_gated(error)


def _is_gated(error: BaseException) -> bool:
    from huggingface_hub.errors import GatedRepoError

    # The package datasets raises an error of its own, without the hub's as its cause.
    return isinstance(error, GatedRepoError) or "is a gated dataset" in str(error)


def explain(error: BaseException, found: Reference, argument: str, kind: str) -> str:
    """Return the message of one line for an error of the package huggingface_hub.

    Args:
        error: the error.
        found: what was requested.
        argument: the name of the argument that contains it.
        kind: "model" or "dataset".
    """
    from huggingface_hub import constants, errors

    given, what = f"{argument}={str(found)!r}", "data set" if kind == "dataset" else "model"
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{found.id}"
    if _is_gated(error):
        return (
            f"{given}: the {what} is gated; accept its licence at {page}, then give this machine your token "
            "(`hf auth login`, or HF_TOKEN)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{given}: there is no such file or folder here, and no such {what} at {constants.ENDPOINT}; if it is private, give "
            "this machine your token (`hf auth login`, or HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{given}: the {what} {found.id} has no revision {found.revision!r}; {page}/commits lists them"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{given}: there is no such file or folder here, and HF_HUB_OFFLINE=1 permits only the cache {constants.HF_HUB_CACHE}, "
            f"which does not have all files of the {what}; unset HF_HUB_OFFLINE to download them"
        )
    reason = " ".join(str(error.__cause__ or error).split())[:200]
    return (
        f"{given}: there is no such file or folder here, and it cannot be downloaded from {constants.ENDPOINT} "
        f"({type(error.__cause__ or error).__name__}: {reason}); the same command continues with the files that are missing"
    )
