"""Where a model's files are: the demo, a local directory, or the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import ModelError, few, shown
from octavo.gguf import find_gguf, is_gguf
from octavo.gguf.file import SPLIT_NAME, SUFFIX, split_names, tensor_types

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_GGUF = re.compile(
    rf"(?P<repository>{HUB_ID.pattern})(:(?P<tag>[\w.-]+)|/(?P<file>.+{re.escape(SUFFIX)}))"
)
NO_MODELS = ("mmproj", "imatrix")  # GGUF files of these names go with models
MAX_LISTED = 40  # files in an error
HUB_FILES = ["*.json", "*.jinja", "source.spm", "spiece.model"]
HUB_WEIGHTS = ["*.safetensors"]
# Other formats, in subdirectories, and a second copy of the weights some repositories keep.
# Templates may be in one.
HUB_EXCLUDED = ["*/*.json", "*/*.safetensors", "consolidated*"]


def resolve_model(name: str, weights: bool = True) -> Path:
    """The directory of a model; or the GGUF file that it is in.

    Args:
        name: "demo", a GGUF file, a local directory, or a hub id, whose files are fetched. Of a
            repository with GGUF files, "organisation/name:Q4_K_M" is the one of that type, and
            "organisation/name/FILE.gguf" one by its name.
        weights: whether the weights of a hub id are fetched, too. Those of a GGUF file are in any
            case: it has them behind its header.

    Raises:
        ModelError: there is no such model; says what was looked for.
    """
    if name == "demo":
        # The demo model is unpacked only when it is asked for.
        from octavo.demo import demo_model_path

        return Path(demo_model_path())
    try:
        path = Path(name).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, or an unknown user's home
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"no model {shown(name)}: {reason}") from error
    if is_directory:
        if not os.access(path, os.X_OK):
            raise ModelError(f"no model {shown(name)}: this user may not enter the directory")
        return find_gguf(path) or path
    if is_gguf(path):
        return path
    if exists:
        raise ModelError(
            f"{name} is a file; give the directory that holds config.json, or a {SUFFIX} file"
        )
    match = HUB_GGUF.fullmatch(name)
    if match is not None:
        return _fetch_gguf(match["repository"], match["tag"], match["file"])
    if path.suffix == SUFFIX:
        raise ModelError(f"no model {name!r}: there is no such file ({path.absolute()})")
    if HUB_ID.fullmatch(name):
        return _fetch(name, HUB_WEIGHTS + HUB_FILES if weights else HUB_FILES)
    raise ModelError(
        f"no model {name!r}: it is not a directory or file ({path.absolute()}), not 'demo', and "
        "not a hub id of the form organisation/name, organisation/name:TYPE or "
        f"organisation/name/FILE{SUFFIX}"
    )


def _fetch(repository: str, patterns: list[str]) -> Path:
    """A repository's files that match, but those of other formats."""
    with _errors_of(repository):
        from huggingface_hub import snapshot_download

        path = Path(
            snapshot_download(repository, allow_patterns=patterns, ignore_patterns=HUB_EXCLUDED)
        )
    if not (path / "config.json").is_file():
        holder, names = _gguf_files(repository, repository)
        if names:
            raise ModelError(
                f"no model {repository!r}: {holder} has no config.json; give one of its "
                f"{SUFFIX} files, as {repository}:TYPE or {repository}/FILE: {_listed(names)}"
            )
    return path


def _fetch_gguf(repository: str, tag: str | None, file: str | None) -> Path:
    """A GGUF file of a repository, by its name or by the type in it (Q4_K_M); of a model in several
    files, all of them, and the first one's path.

    Raises:
        ModelError: there is no such file, several models match, or a part of one is missing; names
            the repository's GGUF files.
    """
    asked = f"{repository}/{file}" if tag is None else f"{repository}:{tag}"
    tensor_types(asked)  # before anything is fetched
    holder, names = _gguf_files(repository, asked)
    wanted = names if file is None else [file] if file in names else []
    models = {_parts_of(name) for name in wanted if tag is None or _has_type(name, tag)}
    if len(models) != 1:
        found = "no such file" if not models else f"{len(models)} models of this type"
        raise ModelError(
            f"no model {asked!r}: {holder} has {found}; its {SUFFIX} files are {_listed(names)}"
        )
    (parts,) = models
    absent = sorted(set(parts) - set(names))
    if absent:
        raise ModelError(
            f"no model {asked!r}: it has {len(parts)} files, of which {holder} lacks {few(absent)}"
        )
    with _errors_of(asked):
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in parts]
        return Path(snapshot_download(repository, allow_patterns=patterns)) / parts[0]


def _gguf_files(repository: str, asked: str) -> tuple[str, list[str]]:
    """The GGUF files of a repository that may be models, behind what has them, for errors; where
    the hub does not list any, those that were fetched."""
    with _errors_of(asked):
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        holder = "the repository"
        try:
            names = HfApi().list_repo_files(repository)
        except Exception as error:
            try:
                folder = snapshot_download(repository, allow_patterns=[], local_files_only=True)
            except LocalEntryNotFoundError:
                raise error from None
            cached = Path(folder)
            names = [path.relative_to(cached).as_posix() for path in cached.rglob(f"*{SUFFIX}")]
            holder = f"the cache of the hub, which lists no files ({_reason(error)}),"
    return holder, sorted(
        name
        for name in names
        if name.lower().endswith(SUFFIX) and not _base_name(name).startswith(NO_MODELS)
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(names[:MAX_LISTED]) or "none") + more


def _base_name(name: str) -> str:
    return name.rpartition("/")[2]


def _parts_of(name: str) -> tuple[str, ...]:
    """All files of the model that a file is of."""
    match = SPLIT_NAME.fullmatch(name)
    return (match is not None and split_names(match)) or (name,)


def _has_type(name: str, tag: str) -> bool:
    """Whether a file's name ends in a type of tensors, however it is capitalised."""
    match = SPLIT_NAME.fullmatch(name)
    stem = name[: -len(SUFFIX)] if match is None else match["stem"]
    return re.fullmatch(rf"(.*[-.])?{re.escape(tag)}", _base_name(stem), re.IGNORECASE) is not None


@contextmanager
def _errors_of(asked: str) -> Iterator[None]:
    """The hub's errors have no common base; all mean that there is no model."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"no model {asked!r}: there is no such directory or file, and it could not be fetched "
            f"from the hub ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """What an error of the hub says, in one line; its first line may be a status alone."""
    return " ".join(str(error).split()) or type(error).__name__
