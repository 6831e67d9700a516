"""What the quantized formats share: a weight's stored tensors, their checks and bit fields."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.safetensors_file import TensorInfo

Index = tuple[slice, ...] | None
FLOATS = ("float32", "bfloat16", "float16")

# A slab's first row is a multiple of this: of every packing factor and of FP8's block height.
ROW_ALIGNMENT = 128


@dataclass(frozen=True)
class Layout:
    """How a weight of shape [out, in] comes out of stored tensors.

    Attributes:
        shape: of the weight.
        used: the suffixes of the tensors that it needs.
        rows: (start, stop) to the weight's rows as float32 [stop - start, in]; start is a multiple
            of ROW_ALIGNMENT. What it returns may be a view of any order.
    """

    shape: tuple[int, int]
    used: tuple[str, ...]
    rows: Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class Parts:
    """The stored tensors of one module, by the suffix that follows the module's name."""

    module: str
    infos: Mapping[str, TensorInfo]
    reader: Callable[[str, Index], np.ndarray]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.infos

    def read(self, suffix: str, index: Index = None) -> np.ndarray:
        return self.reader(f"{self.module}.{suffix}", index)

    def floats(self, suffix: str, index: Index = None) -> np.ndarray:
        """The tensor, or its part, as float32."""
        return as_float32(self.read(suffix, index))

    def need(self, suffix: str, *dtypes: str, ndim: int | None = None) -> tuple[int, ...]:
        """The shape of the tensor.

        Raises:
            CheckpointError: it is missing, has none of `dtypes` or not `ndim` axes.
        """
        info = self.infos.get(suffix)
        if info is None:
            raise CheckpointError(f"{self.module}.{suffix} is missing")
        if dtypes and info.dtype.name not in dtypes:
            raise self.bad(suffix, f"is {info.dtype.name}, not {' or '.join(dtypes)}")
        if ndim is not None and len(info.shape) != ndim:
            raise self.bad(suffix, f"has shape {list(info.shape)}, not {ndim} axes")
        return info.shape

    def need_shape(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Checks the tensor's dtype, and its shape to be one of `shapes`.

        Raises:
            CheckpointError: it is missing or unlike.
        """
        shape = self.need(suffix, *dtypes)
        if shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.bad(suffix, f"has shape {list(shape)}, not {wanted}")

    def bad(self, suffix: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.module}.{suffix} {problem}")


class Scheme(Protocol):
    """One family of formats, as a quantization_config sets it.

    Attributes:
        suffixes: of the tensors that can be a part of a quantized weight.
        unused: suffixes of tensors that dequantized weights have no use for (scales of
            activations and of the cache).
    """

    @property
    def suffixes(self) -> tuple[str, ...]: ...
    @property
    def unused(self) -> tuple[str, ...]: ...

    def ignores(self, module: str) -> bool:
        """Whether the config excepts the module from quantization."""
        ...

    def layout(self, parts: Parts) -> Layout | None:
        """How the module's weight is stored; None: plainly.

        Raises:
            CheckpointError: tensors are missing or do not fit; they are named.
        """
        ...


def as_float32(values: np.ndarray) -> np.ndarray:
    """The values as float32; those of one byte through a table, which is several times faster."""
    if values.dtype.itemsize == 1:
        table = np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)
        return table[values.view(np.uint8)]
    return values.astype(np.float32)


def unpack(words: np.ndarray, bits: int, count: int, order: Sequence[int] = ()) -> np.ndarray:
    """The first `count` bit fields along the last axis, u8[..., count].

    The words of a row are one string of bits, lowest first, so that a field may span two words.

    Args:
        words: int32[..., words].
        order: field in the word by position, if it is not the identity.
    """
    octets = np.ascontiguousarray(words).view(np.uint8)  # little-endian, as the files are
    if 8 % bits == 0:
        fields = np.empty((*octets.shape, 8 // bits), np.uint8)
        for place in range(8 // bits):
            fields[..., place] = (octets >> (place * bits)) & (2**bits - 1)
        if order:
            fields = fields.reshape(*words.shape, 32 // bits)[..., list(order)]
        return fields.reshape(*words.shape[:-1], -1)[..., :count]
    stream = np.unpackbits(octets, axis=-1, count=count * bits, bitorder="little")
    stream = stream.reshape(*words.shape[:-1], count, bits)
    fields = stream[..., 0].copy()
    for place in range(1, bits):
        fields |= stream[..., place] << place
    return fields


def dequantize_groups(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(code - zero) * scale for u8[rows, in] and one zero and scale for each of equal groups.

    Args:
        zeros: [rows, groups].
        scales: float32[rows, groups].
    """
    values = codes.astype(np.float32)
    groups = values.reshape(*zeros.shape, -1)
    groups -= zeros.astype(np.float32)[..., None]
    groups *= scales[..., None]
    return values


def words_of(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` fields."""
    return -(-count * bits // 32)


def setting[T](config: Mapping[str, Any], key: str, kind: type[T], default: T) -> T:
    """A value of quantization_config; null counts as absent.

    Raises:
        CheckpointError: it has another type.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise bad_setting(key, value, f"must be of type {kind.__name__}")
    return value


def names_in(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The names in the lists of texts under `keys`, together."""
    names: list[str] = []
    for key in keys:
        found = setting(config, key, list, [])
        if not all(isinstance(name, str) for name in found):
            raise bad_setting(key, found, "must be a list of module names")
        names += found
    return tuple(names)


def bad_setting(key: str, value: Any, problem: str) -> CheckpointError:
    return CheckpointError(f"quantization_config: {key} = {value!r} {problem}")


def group_size_in(config: Mapping[str, Any], *keys: str) -> int:
    """Weights in a group along the input; -1 is all of them.

    Raises:
        CheckpointError: not given, or impossible.
    """
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise CheckpointError(f"quantization_config lacks {keys[0]}")
    size = setting(config, key, int, 0)
    if size < 1 and size != -1:
        raise bad_setting(key, size, "must be at least 1, or -1 for one group")
    return size


def matches(pattern: str, module: str) -> bool:
    """Whether the regular expression fits the beginning of the module's name.

    Raises:
        CheckpointError: it is no regular expression.
    """
    try:
        return re.match(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"quantization_config: {pattern!r} is no regular expression: {error}"
        ) from None


def is_listed(module: str, names: Iterable[str]) -> bool:
    """transformers' reading of modules_to_not_convert: a name, its beginning up to a dot, or its
    end (transformers: quantizers/quantizers_utils.py)."""
    return any(
        module == name or module.startswith(name + ".") or module.endswith("." + name)
        for name in names
    ) or any(_is_pattern(name) and matches(name, module) for name in names)


def _is_pattern(name: str) -> bool:
    return re.search(r"[\\*+?^$\[(|]", name) is not None
