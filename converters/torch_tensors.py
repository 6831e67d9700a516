"""What a PyTorch pickle may name: the few functions and types that make up a tensor, as records.

Each function of torch that rebuilds a tensor (torch/_utils.py, torch/storage.py) is one here that
makes a record of its arguments. Any other name is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

_FLOAT8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
TORCH_DTYPES: dict[str, np.dtype] = {
    **{f"float8_{kind}": np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in _FLOAT8},
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}")
       for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"complex{bits}": np.dtype(f"complex{bits}") for bits in (64, 128)},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "bool": np.dtype(np.bool_),
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_SIZE_LIMIT = 2**48


class PickleError(ValueError):
    """The pickle is damaged, or asks for more than tensors; says which."""


@dataclass(frozen=True)
class Storage:
    """Bytes that tensors share: the record's key, the dtype it is counted in, its size in bytes."""

    key: str
    dtype: np.dtype
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its storage; offset and strides in bytes."""

    storage: Storage
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    name: str
    make: Callable[..., Any]


@dataclass(frozen=True)
class _StorageType:
    dtype: np.dtype


def refuse(name: str) -> NoReturn:
    raise PickleError(
        f"is refused: its pickle calls {readable(name)}, which no tensor needs and which could run "
        f"any code. Nothing was run. Take the weights from a source you trust."
    )


def readable(name: str) -> str:
    """A dotted name for a message; old protocols have Python 2's name of builtins."""
    return name.replace("__builtin__.", "builtins.", 1)[:100]


def find_global(module: str, name: str) -> Any:
    full = f"{module}.{name}"
    return GLOBALS[full] if full in GLOBALS else refuse(full)


def checked_key(key: Any) -> Any:
    # Not tuples: hashing nested ones can take forever.
    if key is None or isinstance(key, str | int | float):
        return key
    raise TypeError("a dict's key is no text")


def rebuild_storage(identity: Any) -> Storage:
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
        raise TypeError("an unknown kind of storage")
    _, kind, key, _, count = identity
    if not isinstance(kind, _StorageType) or not isinstance(key, str):
        raise TypeError("an unknown kind of storage")
    return Storage(key, kind.dtype, _size(count) * kind.dtype.itemsize)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _SIZE_LIMIT:
        raise ValueError(f"an impossible size or stride: {shortened(value)}")
    return value


def _tensor(storage: Storage, offset: int, size: Any, stride: Any, dtype: np.dtype) -> StoredTensor:
    """Raises ValueError if the tensor reaches beyond its storage."""
    if not isinstance(storage, Storage) or not isinstance(size, tuple):
        raise TypeError
    if not isinstance(stride, tuple) or len(size) != len(stride):
        raise ValueError("a tensor's size and stride do not match")
    shape, strides = tuple(map(_size, size)), tuple(map(_size, stride))
    last = _size(offset) + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = storage.nbytes // dtype.itemsize
    if 0 not in shape and last >= count:
        raise PickleError(
            f"is damaged: a tensor of size {list(shape)} and stride {list(strides)} at {offset} "
            f"reaches beyond its storage of {count} values."
        )
    width = dtype.itemsize
    return StoredTensor(storage, dtype, shape, offset * width, tuple(s * width for s in strides))


def _rebuild_v2(storage: Storage, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredTensor:
    """rest: requires_grad, hooks and a dict of bits that change a tensor's values."""
    if not isinstance(storage, Storage):
        raise TypeError
    if any(rest[2:]):
        raise PickleError("holds a lazily conjugated or negated tensor: save a clone of it.")
    return _tensor(storage, offset, size, stride, storage.dtype)


def _rebuild_v3(
    storage: Storage, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: np.dtype,
    *rest: Any,
) -> StoredTensor:  # fmt: skip
    if not isinstance(dtype, np.dtype) or any(rest):
        raise TypeError
    return _tensor(storage, offset, size, stride, dtype)


def _rebuild_parameter(tensor: StoredTensor, *_: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise TypeError
    return tensor


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in pairs}


def _torch_size(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(map(_size, sizes))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _torch_size,
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
GLOBALS: dict[str, Any] = {
    **{name: Function(name, make) for name, make in _FUNCTIONS.items()},
    **{f"torch.{name}": dtype for name, dtype in TORCH_DTYPES.items()},
    **{f"torch.{name}": _StorageType(TORCH_DTYPES[kind]) for name, kind in STORAGES.items()},
    "torch.storage.UntypedStorage": _StorageType(np.dtype(np.uint8)),
}


def kind_of(value: Any) -> str:
    name = {StoredTensor: "a tensor", type(None): "nothing"}.get(type(value))
    return name or f"a value of type {type(value).__name__}"


def shortened(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float) else kind_of(value)
