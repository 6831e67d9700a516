"""GGUF files: parsed within bounds, checked before anything is read, then mapped.

The format is a header (magic, version, counts), typed key-value pairs, a table of tensors, then
their aligned data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The gguf package's
own reader believes every length in the file, so a damaged one sends it out of bounds or into loops
of 2**60 steps; only its tables of types and its dequantization are used here.
"""

import contextlib
import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.file_kinds import HEAD_BYTES, what_it_is
from jaxllm.converters.gguf_types import can_dequantize, supported_types

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_SIZE_LIMIT = 2**48

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"),
    4: np.dtype("<u4"), 5: np.dtype("<i4"), 6: np.dtype("<f4"), _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        shape: slowest dimension first, as numpy has it (the file has it reversed).
        start, nbytes: where its data lie in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int

    @property
    def block_values(self) -> int:
        """How many values a block holds; 1 for plain floats."""
        return GGML_QUANT_SIZES[self.type][0]


class GgufFile:
    """A checked GGUF file.

    Attributes:
        metadata: key to number, bool, string or list of these.
        tensors: name to GgufTensor, in file order.

    Raises:
        CheckpointError: not a GGUF file, damaged, truncated, or with tensors of a type that
            cannot be dequantized.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                check_magic(path, file.read(HEAD_BYTES))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
        header = _Header(path, self._map)
        self.metadata: Mapping[str, Any] = header.read_metadata()
        self.tensors: Mapping[str, GgufTensor] = header.read_tensors(self._alignment())

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path} is damaged: general.alignment is {alignment!r}, no power of two."
            )
        return alignment

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes, u8[rows, bytes of a row], as a view of the mapped file."""
        page = tensor.start - tensor.start % mmap.PAGESIZE
        # Reads ahead; page faults alone read a slow disk in small pieces.
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_WILLNEED, page, tensor.start + tensor.nbytes - page)
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.start)
        return flat.reshape(math.prod(tensor.shape[:-1]), -1)


def check_magic(path: Path, head: bytes) -> None:
    """Raises CheckpointError, saying what the file is, unless `head` begins a GGUF file."""
    if head.startswith(MAGIC):
        return
    what = what_it_is(head) or "no GGUF file"
    if what == "no GGUF file":
        what += f": it begins with {head[:4]!r}, not {MAGIC!r}"
    else:
        what += ", not a GGUF file"
    raise CheckpointError(f"{path} is {what}.")


class _Header:
    """Reads a file's header from front to back; no length is believed before it is checked."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = len(MAGIC)
        version = self._u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if swapped else f"of version {version}"
            raise CheckpointError(
                f"{path} is {what}; GGUF versions {VERSIONS[0]} and {VERSIONS[1]}, little-endian, "
                f"can be read."
            )
        self.tensor_count = self._u64()
        self.pair_count = self._u64()

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self._count(self.pair_count, 13, "key-value pairs")):
            key = self._string("a key")
            if key in metadata:
                raise self._damaged(f"key {key!r} is there twice")
            metadata[key] = self._value(self._u32(), key)
        return metadata

    def read_tensors(self, alignment: int) -> dict[str, GgufTensor]:
        """The table of tensors, checked against each other and against the file's size."""
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self._count(self.tensor_count, 32, "tensors")):
            name = self._string("a tensor's name")
            dims = self._u32()
            if name in entries:
                raise self._damaged(f"tensor {name!r} is there twice")
            if not 1 <= dims <= MAX_DIMS:
                raise self._damaged(f"tensor {name!r} has {dims} dimensions")
            shape = tuple(self._u64() for _ in range(dims))[::-1]
            if math.prod(shape) >= _SIZE_LIMIT or 0 in shape:
                raise self._damaged(f"tensor {name!r} has the impossible shape {list(shape)}")
            entries[name] = (shape, self._u32(), self._u64())
        self._check_types({name: number for name, (_, number, _) in entries.items()})
        data_start = -(-self.position // alignment) * alignment
        tensors = {
            name: self._tensor(name, shape, GGMLQuantizationType(number), data_start, offset)
            for name, (shape, number, offset) in entries.items()
        }
        self._check_layout(tensors.values(), data_start, alignment)
        return tensors

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        ggml_type: GGMLQuantizationType,
        data_start: int,
        offset: int,
    ) -> GgufTensor:
        values, nbytes = GGML_QUANT_SIZES[ggml_type]
        if shape[-1] % values:
            raise self._damaged(
                f"tensor {name!r} has rows of {shape[-1]}, which {ggml_type.name} blocks of "
                f"{values} do not fill"
            )
        return GgufTensor(
            name, shape, ggml_type, data_start + offset, math.prod(shape) // values * nbytes
        )

    def _check_types(self, numbers: Mapping[str, int]) -> None:
        """Raises if a tensor has a type that cannot be read: now, not after minutes of loading."""
        known = {int(t): t for t in GGMLQuantizationType if t in GGML_QUANT_SIZES}
        bad = {
            name: known[number].name if number in known else f"type {number}"
            for name, number in numbers.items()
            if number not in known or not can_dequantize(known[number])
        }
        if bad:
            counts = ", ".join(f"{n} of {kind}" for kind, n in Counter(bad.values()).items())
            names = ", ".join(list(bad)[:8]) + (", …" if len(bad) > 8 else "")
            raise CheckpointError(
                f"{self.path} holds tensors of types that cannot be read: {counts} ({names}). "
                f"Supported: {', '.join(supported_types())}."
            )

    def _check_layout(self, tensors: Iterable[GgufTensor], start: int, alignment: int) -> None:
        position, before = start, ""
        for tensor in sorted(tensors, key=lambda t: t.start):
            if (tensor.start - start) % alignment:
                raise self._damaged(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
            if tensor.start < position:
                raise self._damaged(f"tensors {before!r} and {tensor.name!r} overlap")
            position, before = tensor.start + tensor.nbytes, tensor.name
        if position > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: {position - self.size:,} of {position:,} bytes are "
                f"missing (tensor {before!r} ends beyond the file). Download or copy it again."
            )

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._numbers(kind, 1, key)[0]
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            return [self._string(key) for _ in range(self._count(count, 8, f"strings in {key}"))]
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self._damaged(f"key {key!r} has the unknown value type {kind}")
        self._count(count, dtype.itemsize, f"values in {key}")
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += count * dtype.itemsize
        if kind != _BOOL:
            return values.tolist()
        if count and values.max() > 1:
            raise self._damaged(f"key {key!r} holds a bool that is neither 0 nor 1")
        return values.astype(bool).tolist()

    def _string(self, what: str) -> str:
        length = self._u64()
        end = self.position + length
        if end > self.size:
            raise self._truncated(f"{what} is {length} bytes long")
        raw = self.data[self.position : end]
        self.position = end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is no UTF-8 text at byte {end - length}") from None

    def _count(self, count: int, least_bytes: int, what: str) -> int:
        """`count`, if that many things of at least so many bytes can still come."""
        if count * least_bytes > self.size - self.position:
            raise self._truncated(f"it claims {count} {what}")
        return count

    def _u32(self) -> int:
        return self._unpack(_U32)

    def _u64(self) -> int:
        return self._unpack(_U64)

    def _unpack(self, form: struct.Struct) -> int:
        if self.position + form.size > self.size:
            raise self._truncated("the header ends early")
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated or damaged: {what}, but the file ends at byte "
            f"{self.size:,} (read up to {self.position:,})."
        )

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {what}.")
