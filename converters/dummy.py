"""Random weights for a model without a checkpoint, made on the device."""

import math
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Uniform with transformers' default initializer_range of 0.02 as standard deviation.
SCALE = 0.02 * math.sqrt(3)


def dummy_params(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Uniform weights in ±SCALE that depend on a parameter's name and shape alone.

    They are equal on any mesh and backend (within the dtype's rounding) on which the shapes are,
    take no host memory, and cost one short compile a distinct shape.
    """
    programs: dict[object, Callable[..., jax.Array]] = {}
    params = {}
    for name, target in abstract.items():
        key = (target.shape, target.dtype, target.sharding)
        if key not in programs:
            programs[key] = jax.jit(_uniform, static_argnums=(1, 2), out_shardings=target.sharding)
        seed = np.uint32(zlib.crc32(name.encode()))
        params[name] = programs[key](seed, target.shape, target.dtype)
    return params


def _uniform(seed: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """A hash of seed and position: unlike jax.random's it fuses into a single short kernel."""
    bits = jnp.full(shape, seed, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        bits += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    bits ^= bits >> 16
    unit = (bits >> 8).astype(jnp.float32) * (2.0**-23) - 1.0
    return (unit * SCALE).astype(dtype)
