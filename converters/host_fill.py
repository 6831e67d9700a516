"""Parameters for devices that share the host's memory: each device's part is written in place.

The tensors are copied from the mapped file straight into the part, transposed and cast on the way,
so that nothing beside the parameters themselves is allocated; of a packed tensor (quantized, GGUF)
only some rows at a time are unpacked.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jaxllm.converters.checkpoint import Checkpoint
from jaxllm.converters.load_plan import Fill

Spans = tuple[tuple[int, int], ...]
"""Where a part begins and ends on each axis of its parameter."""

_ALIGNMENT = 64  # JAX shares a numpy array on the CPU if it begins at such an address
# numpy transposes some rows at a time several times faster than a whole matrix (2.7 against
# 0.3 GB/s): the lines of the cache that it writes to stay there.
_ROWS = 16
_PIECE_BYTES = 2**22


def fill_on_host(fill: Fill, checkpoint: Checkpoint) -> jax.Array:
    """The parameter of `fill`, on its sharding, made of its tensors in `checkpoint`."""
    shape = fill.target.shape
    sharding = fill.target.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    parts: dict[Spans, np.ndarray] = {}
    for index in sharding.addressable_devices_indices_map(shape).values():
        spans = _spans(index, shape)
        if spans not in parts:
            sizes = [end - begin for begin, end in spans]
            parts[spans] = _aligned_empty(sizes, np.dtype(fill.target.dtype))
            if fill.op.padding:
                parts[spans][...] = 0
    for piece in _pieces(fill, checkpoint):
        for spans, part in parts.items():
            _fill_part(fill, part, spans, piece)
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[_spans(index, shape)])


@dataclass(frozen=True)
class _Piece:
    """Some rows of a tensor, in the file layout of the parameter.

    Attributes:
        values: without what is repeated or padded.
        dtype: in which they are taken, before the parameter's.
        repeats: of each row of the first axis.
        origin: of the piece in the file layout, an axis each.
    """

    values: np.ndarray
    dtype: np.dtype
    repeats: int
    origin: tuple[int, ...]


def _pieces(fill: Fill, checkpoint: Checkpoint) -> Iterator[_Piece]:
    """The tensors, whole where they are mapped, some rows at a time where they are unpacked."""
    op, position = fill.op, 0
    stored = op.stored_slabs(fill.target.shape)
    for number, (name, dtype, slab) in enumerate(
        zip(fill.tensors, fill.dtypes, stored, strict=True)
    ):
        repeats = op.repeats(number)
        origin = [0] * len(slab)
        if slab:
            origin[op.axis] = position
            position += slab[op.axis] * (repeats if op.axis == 0 else 1)
        info = checkpoint.tensors[name]
        size = math.prod(info.shape) * info.dtype.itemsize
        if not slab or size == info.nbytes or size <= _PIECE_BYTES:
            yield _Piece(checkpoint.read(name).reshape(slab), dtype, repeats, tuple(origin))
            continue
        axis = next((i for i, length in enumerate(slab) if length > 1), 0)
        rows = info.shape[0] // slab[axis]  # of the tensor, in a step along the slab's axis
        step = max(1, _PIECE_BYTES * slab[axis] // size)
        for begin in range(0, slab[axis], step):
            end = min(begin + step, slab[axis])
            values = checkpoint.read(name, (slice(begin * rows, end * rows),))
            values = values.reshape(*slab[:axis], end - begin, *slab[axis + 1 :])
            at = list(origin)
            at[axis] += begin * (repeats if axis == 0 else 1)
            yield _Piece(values, dtype, repeats, tuple(at))


def _fill_part(fill: Fill, part: np.ndarray, spans: Spans, piece: _Piece) -> None:
    """Writes what `part`, at `spans` of the parameter, has of the piece."""
    order = fill.op.order or tuple(range(part.ndim))
    taken, given = [], []
    for axis, origin in enumerate(piece.origin):
        first, last = spans[order[axis]]
        size = piece.values.shape[axis] * (piece.repeats if axis == 0 else 1)
        begin, end = max(first, origin), min(last, origin + size)
        if begin >= end:
            return
        taken.append(slice(begin - origin, end - origin))
        given.append(slice(begin - first, end - first))
    source = slab_part(piece.values, tuple(taken), piece.repeats)
    _copy(part.transpose(order)[tuple(given)], source, piece.dtype)


def _spans(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Spans:
    index = (index or ()) + (slice(None),) * (len(shape) - len(index or ()))
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def slab_part(slab: np.ndarray, index: tuple[slice, ...], repeats: int) -> np.ndarray:
    """Part `index` of `slab` with each row (of the first axis) repeated."""
    if repeats == 1:
        return slab[index]
    rows = np.arange(len(slab) * repeats)[index[0]] // repeats
    return slab[(slice(rows[0], rows[-1] + 1), *index[1:])][rows - rows[0]]


def _aligned_empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _copy(target: np.ndarray, source: np.ndarray, dtype: np.dtype) -> None:
    """Writes `source`, as `dtype` and then as the target's dtype."""
    if target.ndim > 2 and len(target) < 4 * _ROWS:
        for i in range(len(target)):
            _copy(target[i], source[i], dtype)
        return
    target, source = np.atleast_1d(target), np.atleast_1d(source)
    same = source.dtype == dtype == target.dtype
    bits = f"u{target.dtype.itemsize}"  # copied faster than ml_dtypes' own
    if same and target.dtype.itemsize <= 8:
        target, source = target.view(bits), source.view(bits)
    step = _ROWS if target.ndim > 1 else len(target) or 1
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(target), step):
            rows = source[start : start + step]
            if not same:
                rows = rows.astype(dtype, copy=False).astype(target.dtype, copy=False)
            target[start : start + step] = rows
