"""Converted folders that are not whole are refused by name, and never mistaken for whole ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.convert import convert, main
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.checksums import verify_files
from jaxllm.converters.errors import CheckpointError, LoadError
from jaxllm.converters.orbax_checkpoint import OrbaxCheckpoint, restore_params
from jaxllm.converters.orbax_manifest import MANIFEST_FILE
from tests.converters.tiny_models import abstract_of, error_of, load

KILLED_AT = {
    "Orbax's own rename": "import os as owner; name = 'rename'; "
    "wanted = lambda path: 'params.orbax' in os.fspath(path)",
    "the manifest": "import pathlib; name, owner = 'write_text', pathlib.Path; "
    "wanted = lambda path: path.name == 'jaxllm_orbax.json'",
    "the tokenizer's files": "import jaxllm.convert as owner; name = '_write_tokenizer'; "
    "wanted = lambda checkpoint: True",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_killed_conversion_is_not_mistaken_for_a_whole_one(
    tmp_path: Path, eight_heads: Path, moment: str
) -> None:
    code = f"""
import os, sys
{KILLED_AT[moment]}
old = getattr(owner, name)
def dies(first, *args, **kwargs):
    if wanted(first):
        os._exit(9)
    return old(first, *args, **kwargs)
setattr(owner, name, dies)
from jaxllm.convert import main
sys.exit(main(sys.argv[1:]))
"""
    arguments = [str(eight_heads), str(tmp_path / "target"), "--to", "orbax"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert not (tmp_path / "target").exists()
    (left,) = tmp_path.iterdir()
    assert (left / "config.json").is_file()
    for load_format in ("auto", "orbax"):
        message = error_of(left, load_format=load_format)
        assert str(left) in message
        assert f"no {MANIFEST_FILE}" in message or "no weights in" in message
    assert main(arguments) == 0
    assert open_checkpoint(str(tmp_path / "target")).source == "orbax"


def test_a_failure_leaves_nothing(tmp_path: Path, eight_heads: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxllm.converters.orbax_checkpoint.write_orbax", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*target: No space left on device"):
        convert(str(eight_heads), tmp_path / "target", to="orbax", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_manifest_is_refused(converted: Path) -> None:
    (converted / MANIFEST_FILE).unlink()
    assert error_of(converted) == (
        f"{converted} has no {MANIFEST_FILE}: its conversion was not finished. Convert the model "
        f"again: python -m jaxllm.convert SRC DST --to orbax."
    )


def test_missing_and_cut_files_are_named(converted: Path) -> None:
    files = json.loads((converted / MANIFEST_FILE).read_text())["files"]
    largest = converted / max(files, key=files.get)
    os.truncate(largest, 100)
    assert f"{largest} has 100 bytes, {MANIFEST_FILE} says" in error_of(converted)
    largest.unlink()
    assert error_of(converted).startswith(f"{largest} is missing: {MANIFEST_FILE} lists it")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
def test_damaged_files_give_an_error_that_names_the_folder(converted: Path, name: str) -> None:
    file = converted / "params" / name
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(CheckpointError) as caught:
        load(converted)
    message = str(caught.value)
    assert message.startswith(f"{converted / 'params'} cannot be read: ")
    assert message.endswith("convert the model again.")


def test_sums_and_values_are_verified_on_request(converted: Path) -> None:
    open_checkpoint(str(converted), check=verify_files)
    checkpoint = open_checkpoint(str(converted))
    rows = checkpoint.read("lm_head.weight", (slice(0, 12),)).tobytes()  # a device's part
    files = [path for path in (converted / "params").rglob("*") if path.is_file()]
    (file,) = (path for path in files if rows in path.read_bytes())
    data = bytearray(file.read_bytes())
    at = data.index(rows)
    data[at : at + 4] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    assert f"{file} has the SHA-256" in error_of(converted, check=verify_files)
    abstract = abstract_of(dict(checkpoint.config))
    checkpoint = open_checkpoint(str(converted))
    assert isinstance(checkpoint, OrbaxCheckpoint)
    restore_params(abstract, checkpoint, progress=False)
    with pytest.raises(LoadError, match=r"in 1 tensors:\n  lm_head.weight  1 of 3,072 values"):
        restore_params(abstract, checkpoint, progress=False, finite=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "has format_version 2, this version of jaxllm reads 1"),
        ({"parameters": None}, "is not as jaxllm.convert writes it"),
        ({"parameters": {"a": {"shape": [-1], "dtype": "float32"}}}, "the shape of a is [-1]"),
        ({"parameters": {"a": {"shape": [1], "dtype": ["float32"]}}}, "is not as jaxllm.convert"),
        ({"files": {"../config.json": 3}}, "no file below params/ with a size: '../config.json'"),
        ({"files": {"params/d": "big"}}, "no file below params/ with a size: 'params/d': 'big'"),
    ],
    ids=str,
)
def test_a_changed_manifest_is_refused(
    converted: Path, change: dict[str, Any], message: str
) -> None:
    file = converted / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = error_of(converted)
    assert found.startswith(str(file))
    assert message in found
    file.write_text("{")
    assert f"{file} is no valid JSON" in error_of(converted)
