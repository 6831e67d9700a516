"""Arrays from host memory onto devices, in pieces.

XLA copies what it uploads into memory that it pins, whole, and keeps that memory. Pieces bound it:
a checkpoint's largest tensors would take gigabytes, which are slow to pin.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

PIECE_BYTES = 32 << 20


def upload(
    shape: tuple[int, ...],
    sharding: Sharding,
    part: Callable[[tuple[slice, ...] | None], np.ndarray],
) -> jax.Array:
    """The array of `shape` whose part at an index is `part(index)`, as
    `jax.make_array_from_callback` makes it: only this process's devices are asked for."""
    shards = [
        _in_pieces(part(index), device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _in_pieces(values: np.ndarray, device: Any) -> jax.Array:
    """One device's share; a piece is on the device before the next one is begun."""
    rows = max(1, PIECE_BYTES // max(1, values[:1].nbytes)) if values.ndim else 1
    if not values.ndim or len(values) <= rows:
        return jax.device_put(values, device)
    pieces = [
        jax.device_put(values[start : start + rows], device).block_until_ready()
        for start in range(0, len(values), rows)
    ]
    return _join(*pieces)


@jax.jit
def _join(*pieces: jax.Array) -> jax.Array:
    return jnp.concatenate(pieces)
