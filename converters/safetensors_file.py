"""Safetensors files: checked before anything is read, then mapped and never copied.

The format is a little-endian u64 with the header's length, a JSON header, then the tensors' bytes
side by side (https://github.com/huggingface/safetensors#format). The safetensors package maps
files too, but answers most broken ones with "header too large"; here each says what it really is.
"""

import contextlib
import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.file_kinds import HEAD_BYTES, what_it_is

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 256 * 2**20  # a million tensors; the reference reader stops at 100 MB
_LENGTH_BYTES = 8
_SHAPE_LIMIT = 2**48


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says about a tensor. nbytes: its size in the file, in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int


class SafetensorsFile:
    """A validated safetensors file, mapped on the first read.

    Attributes:
        tensors: name to TensorInfo, in file order.
        metadata: the header's `__metadata__`.

    Raises:
        CheckpointError: the file is not whole and well formed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._data_start = read_header(path)
        metadata = header.pop("__metadata__", None)
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        data_bytes = path.stat().st_size - self._data_start
        self._begin = check_entries(path, header, data_bytes)
        self.tensors: Mapping[str, TensorInfo] = {
            name: _tensor_info(header[name]) for name in self._begin
        }
        self._map: mmap.mmap | None = None

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or its part `index`, as a read-only view of the mapped file."""
        info = self.tensors[name]
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = self._data_start + self._begin[name]
        if info.nbytes == 0:
            return np.empty(info.shape, info.dtype)[index or ()]
        self._advise(start, info.nbytes)
        flat = np.frombuffer(self._map, np.uint8, info.nbytes, start)
        return flat.view(info.dtype).reshape(info.shape)[index or ()]

    def _advise(self, start: int, nbytes: int) -> None:
        """Starts reading the bytes ahead; page faults alone read a slow disk in small pieces."""
        page = start - start % mmap.PAGESIZE
        with contextlib.suppress(OSError):
            if self._map is not None and hasattr(mmap, "MADV_WILLNEED"):
                self._map.madvise(mmap.MADV_WILLNEED, page, start + nbytes - page)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header, unchecked beyond being an object, and the offset where the data begin."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if wrong := what_it_is(head):
                raise CheckpointError(f"{path} is {wrong}, not a safetensors file.")
            if size < _LENGTH_BYTES + 2:
                raise CheckpointError(f"{path} is truncated: it has only {size} bytes.")
            length = int.from_bytes(head[:_LENGTH_BYTES], "little")
            if length > size - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: it claims a header of "
                    f"{length:,} bytes, and has {size:,} in all."
                )
            if length > MAX_HEADER_BYTES or head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
                raise CheckpointError(
                    f"{path} is corrupt or not a safetensors file: no JSON header at its start "
                    f"(claimed length {length:,} bytes)."
                )
            file.seek(_LENGTH_BYTES)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is corrupt: its header is no valid JSON ({error})."
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is corrupt: its header is no JSON object.")
    return header, _LENGTH_BYTES + length


def check_entries(path: Path, header: dict[str, Any], data_bytes: int) -> dict[str, int]:
    """Offsets of the tensors by name, in file order, if they cover the data exactly.

    Raises:
        CheckpointError: an entry is malformed, or tensors overlap, leave holes, or end before or
            beyond the end of the file.
    """
    spans = []
    for name, entry in header.items():
        if problem := _entry_problem(entry):
            raise CheckpointError(f"{path} is corrupt: tensor {name!r} has {problem}.")
        begin, end = entry["data_offsets"]
        spans.append((begin, end, name))
    spans.sort()
    position = 0
    for begin, end, name in spans:
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a hole"
            raise CheckpointError(
                f"{path} is corrupt: tensor {name!r} at byte {begin} {what} (expected {position})."
            )
        position = end
    if position > data_bytes:
        raise CheckpointError(
            f"{path} is truncated: {position - data_bytes:,} of {position:,} bytes of tensor data "
            f"are missing. Download or copy it again."
        )
    if position < data_bytes:
        raise CheckpointError(
            f"{path} is corrupt: {data_bytes - position:,} bytes follow the last tensor."
        )
    return {name: begin for begin, _, name in spans}


def _entry_problem(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return f"no description but {entry!r}"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"the unknown dtype {dtype!r}"
    if not _are_sizes(shape):
        return f"the impossible shape {shape!r}"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f"the impossible data_offsets {offsets!r}"
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != expected:
        return f"{offsets[1] - offsets[0]} bytes, but {dtype} {shape} needs {expected}"
    return None


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _SHAPE_LIMIT for item in value
    )


def _tensor_info(entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]], end - begin)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: raises ValueError if a key stands twice in an object."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        repeated = [key for key, _ in pairs if key in seen or seen.add(key)]
        raise ValueError(f"{repeated[0]!r} is there twice")
    return keys
