"""Weight files are compared with sums that were written while they were trusted."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from jaxllm.config import EngineConfig
from jaxllm.convert import convert
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.checksums import SUMS_FILE, verify_files, write_sums
from jaxllm.converters.errors import CheckpointError
from tests.converters.tiny_models import NORM, error_of


def flip(file: Path) -> None:
    """Changes the last byte, which is a weight's."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def test_equal_sums_open(shards: Path) -> None:
    write_sums(shards)
    assert NORM in open_checkpoint(str(shards), check=verify_files).tensors
    done = subprocess.run(["sha256sum", "-c", SUMS_FILE], cwd=shards, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_all_changed_files_are_named(shards: Path) -> None:
    write_sums(shards)
    files = sorted(shards.glob("*.safetensors"))
    for file in files[:2]:
        flip(file)
    open_checkpoint(str(shards))  # nothing else would notice
    message = error_of(shards, check=verify_files)
    assert message.startswith(f"2 of {len(files)} files are not what they should be: {files[0]} ")
    assert hashlib.sha256(files[1].read_bytes()).hexdigest() in message
    assert str(shards / SUMS_FILE) in message


def test_a_changed_pickle_is_not_even_parsed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({"x": torch.ones(3)}, file)
    write_sums(folder)
    file.write_bytes(b"PK\x03\x04")
    assert "are not what they should be" in error_of(folder, check=verify_files)


def test_without_sums_the_way_out_is_named(folder: Path) -> None:
    message = error_of(folder, check=verify_files)
    assert f"cannot verify {folder / 'model.safetensors'}" in message
    assert f"sha256sum * > {SUMS_FILE}" in message
    (folder / SUMS_FILE).write_text(f"{'0' * 64}  other.safetensors\n")
    assert "does not list 'model.safetensors'" in error_of(folder, check=verify_files)


@pytest.mark.parametrize("line", ["x", "0" * 63 + "  model.safetensors", "0" * 64 + " x"])
def test_broken_sums_are_named(folder: Path, line: str) -> None:
    (folder / SUMS_FILE).write_text(f"# sums\n\n{line}\n")
    assert f"{folder / SUMS_FILE}, line 3: " in error_of(folder, check=verify_files)


def test_sums_are_taken_as_other_tools_write_them(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest().upper()
    (folder / SUMS_FILE).write_text(f"{digest} *./model.safetensors\n")
    open_checkpoint(str(folder), check=verify_files)


def in_hub_cache(folder: Path, name: str) -> Path:
    """Moves the weights where the hub's cache has them; returns the blob."""
    blob = folder.parent / "blobs" / name
    blob.parent.mkdir()
    file = folder / "model.safetensors"
    file.rename(blob)
    file.symlink_to(Path("..") / "blobs" / name)
    return blob


def test_the_hub_cache_names_its_blobs_by_their_sums(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    blob = in_hub_cache(folder, digest)
    open_checkpoint(str(folder), check=verify_files)
    flip(blob)
    message = error_of(folder, check=verify_files)
    assert f"but the name of its blob in the hub's cache says {digest}" in message


def test_a_blob_of_another_name_proves_nothing(folder: Path) -> None:
    in_hub_cache(folder, "0" * 40)
    assert "cannot verify" in error_of(folder, check=verify_files)


def test_a_gguf_file_beside_its_sums(tmp_path: Path) -> None:
    demo = shutil.copy(open_checkpoint("demo").path, tmp_path)
    assert "cannot verify" in error_of(demo, check=verify_files)
    write_sums(tmp_path)
    assert open_checkpoint(str(demo), check=verify_files).source == "gguf"
    flip(Path(demo))
    assert "1 of 1 files are not what" in error_of(demo, check=verify_files)


def test_converted_folders_have_sums(tmp_path: Path, shards: Path) -> None:
    target = convert(str(shards), tmp_path / "target", progress=False)
    listed = {line[66:] for line in (target / SUMS_FILE).read_text().splitlines()}
    assert listed == {file.name for file in target.iterdir()} - {SUMS_FILE}
    open_checkpoint(str(target), check=verify_files)
    flip(target / "model.safetensors")
    assert "are not what" in error_of(target, check=verify_files)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, set()),
        ("sha256", {"sha256"}),
        ("finite", {"finite"}),
        ("sha256, finite", {"sha256", "finite"}),
    ],
)
def test_the_flag_takes_one_or_both(value: str | None, expected: set[str]) -> None:
    assert EngineConfig(verify_weights=value).verification == expected


@pytest.mark.parametrize("value", ["md5", "sha256,md5", "", ",", "SHA256"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="--verify-weights takes sha256 and finite, got"):
        EngineConfig(verify_weights=value)


def test_random_weights_cannot_be_verified() -> None:
    with pytest.raises(ValueError, match="nothing to verify with --load-format dummy"):
        EngineConfig(verify_weights="finite", load_format="dummy")


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / SUMS_FILE).write_text(f"{'0' * 64}  x\n")
    with pytest.raises(CheckpointError, match=r"cannot read .*x: No such file"):
        verify_files([tmp_path / "x"])
