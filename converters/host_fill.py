"""Parameters for devices that share the host's memory: each device's part is written in place.

The tensors are copied from the mapped file straight into the part, transposed and cast on the way,
so that nothing beside the parameters themselves is allocated.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.converters.load_plan import Fill

_ALIGNMENT = 64  # JAX shares a numpy array on the CPU if it begins at such an address
# numpy transposes some rows at a time several times faster than a whole matrix (2.7 against
# 0.3 GB/s): the lines of the cache that it writes to stay there.
_ROWS = 16


def fill_on_host(fill: Fill, tensors: Sequence[np.ndarray]) -> jax.Array:
    """The parameter of `fill`, on its sharding, made of `tensors` as the checkpoint has them."""
    slabs = [
        tensor.reshape(shape)
        for tensor, shape in zip(tensors, fill.op.stored_slabs(fill.target.shape), strict=True)
    ]

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return _part(fill, slabs, index or ())

    sharding = fill.target.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.make_array_from_callback(fill.target.shape, sharding, part)


def _part(fill: Fill, slabs: list[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    shape = fill.target.shape
    index = index + (slice(None),) * (len(shape) - len(index))
    spans = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
    part = _aligned_empty([end - begin for begin, end in spans], np.dtype(fill.target.dtype))
    order = fill.op.order or tuple(range(len(shape)))
    target, spans = part.transpose(order), [spans[axis] for axis in order]
    if fill.op.padding:
        part[...] = 0
    axis, position = fill.op.axis, 0
    for number, (slab, dtype) in enumerate(zip(slabs, fill.dtypes, strict=True)):
        width = slab.shape[axis] if slab.ndim else 1
        taken, given = [slice(*span) for span in spans], [slice(None)] * len(spans)
        if spans:
            first, last = spans[axis]
            begin, end = max(first, position), min(last, position + width)
            taken[axis], given[axis] = (
                slice(begin - position, end - position),
                slice(begin - first, end - first),
            )
            position += width
            if begin >= end:
                continue
        source = slab_part(slab, tuple(taken), fill.op.repeats(number))
        _copy(target[tuple(given)], source, dtype)
    return part


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
