"""Everything wrong with a folder is named, and the index decides what is in it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.safetensors_folder import INDEX_FILE
from tests.converters.tiny_models import NORM, error_of


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def shard_of(folder: Path, tensor: str) -> str:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"][tensor]


def test_a_folder_with_one_file(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.source, checkpoint.path) == ("safetensors", folder)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert "eos_token_id" in checkpoint.generation_config
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_shards_equal_one_file(folder: Path, shards: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) > 3
    one, many = (open_checkpoint(str(path)) for path in (folder, shards))
    assert set(one.tensors) == set(many.tensors)
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), many.read(name))


def test_the_index_decides_which_tensor_is_real(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clean = open_checkpoint(str(shards)).read(NORM).copy()
    other = next(
        name for name in sorted(shards.glob("model-*")) if name.name != shard_of(shards, NORM)
    )
    tensors = safetensors.numpy.load_file(other)
    safetensors.numpy.save_file(tensors | {NORM: np.zeros(32, np.float32)}, other)
    for stray in ("model.safetensors", "consolidated.safetensors"):
        safetensors.numpy.save_file({NORM: np.zeros(32, np.float32)}, shards / stray)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(str(shards))
    np.testing.assert_array_equal(checkpoint.read(NORM), clean)
    assert [record.getMessage() for record in caplog.records] == [
        f"{shards}: tensors that the index does not place there: {NORM} ({other.name})",
        f"{shards}: files that are not part of the model: "
        "consolidated.safetensors, model.safetensors",
    ]


def test_all_absent_shards_are_named(shards: Path) -> None:
    files = sorted(shards.glob("model-*"))
    for file in files[1:3]:
        file.unlink()
    message = error_of(shards)
    assert f"names 2 of {len(files)} shards that are not there" in message
    assert f"{files[1].name}, {files[2].name}." in message


def test_a_stale_index_beside_a_whole_file(folder: Path) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    assert error_of(folder).endswith("To load model.safetensors instead, delete the index.")


def test_tensors_absent_from_their_shard_are_named(shards: Path) -> None:
    wrong = next(
        file.name for file in shards.glob("model-*") if file.name != shard_of(shards, NORM)
    )
    change_index(shards, lambda index: index["weight_map"].update({NORM: wrong, "ghost": wrong}))
    message = error_of(shards)
    assert "names 2 tensors that their shards do not hold" in message
    assert f"{NORM} ({wrong})" in message
    assert f"ghost ({wrong})" in message


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", 7, None])
def test_an_index_may_not_point_outside(shards: Path, shard: object) -> None:
    change_index(shards, lambda index: index["weight_map"].update({NORM: shard}))
    assert f"puts '{NORM}' in {shard!r}, no file of this folder" in error_of(shards)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff"]
)
def test_a_broken_index(shards: Path, text: str) -> None:
    (shards / INDEX_FILE).write_text(text, encoding="latin-1")
    message = error_of(shards)
    assert str(shards / INDEX_FILE) in message
    assert "no valid JSON" in message or "no JSON object" in message or "weight_map" in message


def test_a_tensor_that_the_index_places_twice_is_named(shards: Path) -> None:
    index = shards / INDEX_FILE
    twice = f'"weight_map": {{"{NORM}": "model-00001-of-00002.safetensors", '
    index.write_text(index.read_text().replace('"weight_map": {', twice, 1))
    assert error_of(shards) == f"{index} is no valid JSON: '{NORM}' is there twice."


def test_a_truncated_shard_is_named(shards: Path) -> None:
    file = sorted(shards.glob("model-*"))[1]
    file.write_bytes(file.read_bytes()[:-4])
    assert error_of(shards).startswith(f"{file} is truncated: 4 of ")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ['{"a": ', "[1]", "", "\xff\xfe", '"text"'])
def test_broken_json_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="latin-1")
    assert str(folder / name) in error_of(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE, "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is an empty file, not a JSON file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n",
         "is a Git LFS pointer to 123 bytes (run `git lfs pull`), not a JSON file"),
        (b"<!DOCTYPE html>", "is a web page (a failed download?), not a JSON file"),
        (b"Access denied", "is a text that begins with 'Access denied', not a JSON file"),
        (b'{"a": ', "is no valid JSON"),
    ],
)  # fmt: skip
def test_what_a_text_file_really_is(shards: Path, name: str, content: bytes, message: str) -> None:
    (shards / name).write_bytes(content)
    assert f"{shards / name} {message}" in error_of(shards)


def test_a_byte_order_mark_is_read_over(folder: Path) -> None:
    config = folder / "config.json"
    expected = open_checkpoint(str(folder)).config
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert open_checkpoint(str(folder)).config == expected


@pytest.mark.parametrize("value", [7, "LlamaForCausalLM", [1], {"a": 1}])
def test_architectures_are_a_list_of_names(folder: Path, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": value}))
    message = error_of(folder)
    assert message.startswith(f"{folder / 'config.json'}: architectures must be a list of names")


def test_a_link_to_nowhere_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.unlink()
    file.symlink_to("../blobs/0123")
    assert error_of(folder) == f"{file} is a link to ../blobs/0123, which is not there."


def test_generation_config_is_optional(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(str(folder)).generation_config == {}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.pt", "only model.pt. Of PyTorch files, pytorch_model.bin and shards with"),
        ("model-00001-of-00002.safetensors", "Shards need their index"),
        (None, "neither model.safetensors nor model.safetensors.index.json is there."),
    ],
)
def test_no_weights(folder: Path, name: str | None, hint: str) -> None:
    file = folder / "model.safetensors"
    if name is None:
        file.unlink()
    else:
        file.rename(folder / name)
    message = error_of(folder)
    assert message.startswith(f"no weights in {folder}")
    assert hint in message
