"""Writes tensors as safetensors files one by one; the library wants all of a file in memory."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from tqdm import tqdm

from jaxllm.converters.checkpoint import Checkpoint
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.safetensors_file import DTYPE_NAMES
from jaxllm.converters.safetensors_folder import INDEX_FILE, SINGLE_FILE, shorten

FLOAT_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
SHARD_BYTES = 5 * 10**9
_ALIGNMENT = 8


def stored_dtypes(checkpoint: Checkpoint, names: list[str], dtype: str) -> dict[str, np.dtype]:
    """The dtype to write each tensor in; "auto" keeps it, and integers are never cast.

    Raises:
        CheckpointError: `dtype` is none of FLOAT_DTYPES and not "auto", or safetensors have no
            name for a tensor's own.
    """
    if dtype != "auto" and dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is none of auto, {', '.join(FLOAT_DTYPES)}.")
    kept = {name: checkpoint.tensors[name].dtype for name in names}
    if odd := [f"{name} ({old})" for name, old in kept.items() if old not in DTYPE_NAMES]:
        raise CheckpointError(
            f"{checkpoint.path} holds tensors of dtypes that safetensors do not have: "
            f"{shorten(odd)}."
        )
    if dtype == "auto":
        return kept
    castable = {"float64", *FLOAT_DTYPES}
    return {
        name: FLOAT_DTYPES[dtype] if old.name in castable else old for name, old in kept.items()
    }


def write_safetensors(
    checkpoint: Checkpoint,
    dtypes: Mapping[str, np.dtype],
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Writes the tensors that `dtypes` names into `folder`, with an index if they are split."""
    sizes = {
        name: math.prod(checkpoint.tensors[name].shape) * dtype.itemsize
        for name, dtype in dtypes.items()
    }
    shards = _split(sizes, shard_bytes)
    files = (
        [SINGLE_FILE]
        if len(shards) == 1
        else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    )
    total = sum(sizes.values())
    with tqdm(
        total=total, desc="Writing weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for file, names in zip(files, shards, strict=True):
            with (folder / file).open("wb") as out:
                _write_header(out, checkpoint, {name: dtypes[name] for name in names})
                for name in names:
                    tensor = checkpoint.read(name).astype(dtypes[name], copy=False)
                    out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
                    bar.update(sizes[name])
    if len(shards) > 1:
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `shard_bytes` (or a single larger tensor)."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_header(out: BinaryIO, checkpoint: Checkpoint, dtypes: Mapping[str, np.dtype]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    position = 0
    for name, dtype in dtypes.items():
        shape = checkpoint.tensors[name].shape
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    out.write(len(text).to_bytes(8, "little") + text)
