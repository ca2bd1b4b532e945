"""GGUF files by hub id: which file of a repository is meant, fetched from a cache of the hub."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

import gguf_files
from gguf_files import Kind
from octavo import LLM, SamplingParams
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ModelError
from octavo.models.hub import resolve_model

UNPRIVILEGED = 65534
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PARTS = [f"BF16/Tiny-BF16-{i + 1:05}-of-00002.gguf" for i in range(2)]
FILES = [
    *("Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "Tiny-Q4_K_S.gguf", "mmproj-Q8_0.gguf", "README.md"),
    *(*PARTS, "Tiny-F16-00001-of-00002.gguf"),
]
Repository = Callable[[list[str], list[str]], None]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Makes org/tiny of a fake hub: its files, and those of them that are in the cache."""
    folder = tmp_path / "models--org--tiny"
    snapshot = folder / "snapshots" / COMMIT
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def make(files: list[str], fetched: list[str]) -> None:
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        for name in fetched:
            path = snapshot / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

        def list_repo_files(self: huggingface_hub.HfApi, repo_id: str) -> list[str]:
            assert repo_id == "org/tiny"
            return files

        if files:
            monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_repo_files)

    return make


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_directory_without_permission(mode: int) -> None:
    """Root, who has every permission, is another user meanwhile."""
    user = os.getuid()
    with tempfile.TemporaryDirectory() as top:
        directory = Path(top) / "model"
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        Path(top).chmod(0o755)
        directory.chmod(mode)
        os.setresuid(user or UNPRIVILEGED, user or UNPRIVILEGED, user)
        try:
            with pytest.raises(ModelError, match=r"model': this user may not enter the dir"):
                Tokenizer.find(resolve_model(str(directory)))
        finally:
            os.setresuid(user, user, user)
            directory.chmod(0o755)


@pytest.mark.parametrize("is_reachable", [True, False])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/tiny:Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("org/tiny:q8_0", "Tiny-Q8_0.gguf"),
        ("org/tiny:BF16", PARTS[0]),
        ("org/tiny/Tiny-Q4_K_S.gguf", "Tiny-Q4_K_S.gguf"),
        (f"org/tiny/{PARTS[1]}", PARTS[0]),
    ],
)
def test_which_file_is_meant(
    name: str, file: str, is_reachable: bool, repository: Repository, tmp_path: Path
) -> None:
    """By its type or its name; of several parts, the first. Offline, among the cached ones."""
    repository(FILES if is_reachable else [], FILES)
    path = resolve_model(name)
    assert path == tmp_path / "models--org--tiny" / "snapshots" / COMMIT / file


def test_only_the_parts_of_one_model_are_asked_for(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository(FILES, [])
    asked: list[list[str]] = []

    def fetch(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model("org/tiny:bf16") == tmp_path / PARTS[0]
    assert asked == [PARTS]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "org/tiny:Q2_K",
            r"no model 'org/tiny:Q2_K': the repository has no such file; its \.gguf files are "
            r"BF16/Tiny-BF16-00001-of-00002\.gguf, .*Tiny-Q4_K_M\.gguf, .*Tiny-Q8_0\.gguf$",
        ),
        ("org/tiny:K_M", "the repository has no such file; its .gguf files are"),
        ("org/tiny/Tiny.gguf", "'org/tiny/Tiny.gguf': the repository has no such file; its .gguf"),
        ("org/tiny/mmproj-Q8_0.gguf", "the repository has no such file"),
        ("org/tiny:F16", "it has 2 files, of which the repository lacks Tiny-F16-00002-of-00002"),
        ("org/tiny", r"has no config.json; give one of its \.gguf files, as org/tiny:TYPE or"),
        ("org/tiny:", "not a hub id of the form organisation/name, organisation/name:TYPE or"),
        ("tiny:Q8_0", "not a hub id of the form organisation/name, organisation/name:TYPE or"),
    ],
)
def test_what_no_file_is_meant_by(name: str, message: str, repository: Repository) -> None:
    repository(FILES, ["README.md"])
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_two_models_of_one_type(repository: Repository) -> None:
    repository(["a-Q8_0.gguf", "b-Q8_0.gguf"], [])
    with pytest.raises(ModelError, match=r"has 2 models of this type; .* a-Q8_0.gguf, b-Q8_0.gguf"):
        resolve_model("org/tiny:Q8_0")


@pytest.mark.parametrize("name", ["org/tiny:Q8_0", "org/tiny"])
def test_what_the_hub_says_of_a_repository_is_shown(
    name: str, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: the first line of its errors is a status."""

    def refuse(*args: object, **options: object) -> None:
        if not options.get("local_files_only"):
            raise ConnectionError("403 Client Error.\n\nCannot access gated repo.\nAsk for access.")
        raise huggingface_hub.errors.LocalEntryNotFoundError("Nothing is in the cache.")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    reason = r"403 Client Error\. Cannot access gated repo\. Ask for access\."
    with pytest.raises(ModelError, match=rf"'{name}': .* from the hub \({reason}\)"):
        resolve_model(name)


def test_a_hub_that_cannot_be_reached_and_nothing_in_the_cache(repository: Repository) -> None:
    with pytest.raises(ModelError, match=r"'org/tiny:Q8_0': .* offline mode is enabled"):
        resolve_model("org/tiny:Q8_0")


def test_a_file_that_only_the_repository_may_have(repository: Repository) -> None:
    """Offline, it is not known what the repository has."""
    repository([], ["Tiny-Q8_0.gguf"])
    message = (
        r"the cache of the hub, which lists no files \(.*offline.*\), has no such file; .* are"
    )
    with pytest.raises(ModelError, match=message + r" Tiny-Q8_0\.gguf$"):
        resolve_model("org/tiny:Q4_K_M")


def test_which_files_of_a_directory_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are read of a local one: the template for tools, too; but no other formats."""
    read = ["chat_template.jinja", "config.json", "model.safetensors", "spiece.model"]
    read += ["additional_chat_templates/tool_use.jinja"]
    others = ["consolidated.safetensors", "onnx/config.json", "onnx/model.safetensors"]
    (tmp_path / "config.json").touch()
    fetched: list[str] = []

    def fetch(repo_id: str, **patterns: list[str]) -> str:
        everything = [*read, *others, "pytorch_model.bin", "README.md"]
        fetched.extend(huggingface_hub.utils.filter_repo_objects(everything, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model("org/tiny") == tmp_path
    assert fetched == read


def test_nothing_is_fetched_that_cannot_be_read(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(FILES, FILES)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ModelError, match=r"org/tiny:Q8_0: .* pip install 'octavo\[gguf\]'"):
        resolve_model("org/tiny:Q8_0")


def test_a_model_of_the_hub_is_served(repository: Repository, tmp_path: Path) -> None:
    """Through the cache's links, whose targets have no suffix."""
    repository(["Tiny-Q8_0.gguf"], ["Tiny-Q8_0.gguf"])
    blob = tmp_path / "blob"
    source = gguf_files.write_pair("llama", tmp_path, gguf_files.everywhere(Kind.Q8_0))
    shutil.copy(source, blob)
    path = resolve_model("org/tiny:q8_0")
    path.unlink()
    os.symlink(blob, path)
    params = SamplingParams(max_tokens=5, temperature=0)
    [expected] = LLM(source, dtype="float32").generate("Hello", params)
    [found] = LLM("org/tiny:q8_0", dtype="float32").generate("Hello", params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
