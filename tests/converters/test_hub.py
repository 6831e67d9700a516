"""Models of the hub: ids, cache and refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.hub import is_hub_id
from tests.converters.tiny_models import NORM, error_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", True),
        ("meta-llama/Llama-3.1-8B", True),
        ("owner/model_v1.5", True),
        ("a/b/c", False),
        ("-x/y", False),
        ("x..y", False),
        ("/model", False),
        ("model/", False),
        ("a b", False),
        ("", False),
        ("https://huggingface.co/a/b", False),
    ],
)
def test_hub_ids_are_told_from_paths(name: str, expected: bool) -> None:
    assert is_hub_id(name) == expected


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_model_in_the_hub_cache_opens_offline(hub_cache: Path, llama_folder: Path) -> None:
    commit = "0123456789012345678901234567890123456789"
    repository = hub_cache / "models--owner--tiny"
    shutil.copytree(llama_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for revision in (None, "main", commit):
        checkpoint = open_checkpoint("owner/tiny", revision=revision)
        assert checkpoint.path == repository / "snapshots" / commit
        assert NORM in checkpoint.tensors
    message = error_of("owner/tiny", revision="v2")
    assert "'owner/tiny' (revision 'v2')" in message


def test_offline_and_not_in_the_cache(hub_cache: Path) -> None:
    message = error_of("owner/absent")
    assert "no model 'owner/absent': there is no such local folder" in message
    assert str(hub_cache) in message
    assert "HF_HUB_OFFLINE" in message


def test_only_the_files_that_the_index_names_are_downloaded(
    tmp_path: Path, saved_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def snapshot_download(model: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(saved_shards)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    open_checkpoint("owner/tiny")
    assert "*.json" in asked[0]
    assert not any("safetensors" in pattern for pattern in asked[0])
    assert asked[1] == sorted(file.name for file in saved_shards.glob("*.safetensors"))
    open_checkpoint("owner/tiny", load_format="dummy")
    assert len(asked) == 3


def test_a_repository_without_config(hub_cache: Path) -> None:
    commit = "0123456789012345678901234567890123456789"
    repository = hub_cache / "models--owner--gguf"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert "`hf download owner/gguf FILE.gguf`" in error_of("owner/gguf")


@pytest.mark.parametrize(
    ("error_name", "expected"),
    [
        ("GatedRepoError", "is gated: accept its terms on its page, then set HF_TOKEN"),
        ("RepositoryNotFoundError", "none on the hub that the current HF_TOKEN may read"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        (
            "HfHubHTTPError",
            "cannot download 'owner/tiny' (revision 'v9') from the hub: server said",
        ),
    ],
)
def test_refusals_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, error_name: str, expected: str
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: Any, **__: Any) -> str:
        response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
        raise getattr(errors, error_name)("server said no", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert expected in error_of("owner/tiny", revision="v9")


@pytest.mark.parametrize("revision", [None, "main", "0123456789012345678901234567890123456789"])
def test_an_unreachable_hub(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    import httpx
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", refuse)
    message = error_of("owner/absent", revision=revision)
    assert "the hub cannot be reached (connection refused)" in message
