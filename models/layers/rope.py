"""Rotary position embedding and its scalings (Su et al., arXiv:2104.09864).

The formulas and their float32 rounding follow transformers' modeling_rope_utils.py, so that long
contexts agree with it.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.models.rope_config import RopeConfig


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, float32, computed once a step."""

    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]


def rotation(
    config: RopeConfig, head_dim: int, positions: Int[Array, " T"], seq_lens: Int[Array, " T"]
) -> Rotation:
    """The rotation of each token.

    Args:
        positions: of each token in its request.
        seq_lens: length of each token's request, this step included; only "dynamic" looks at it.
    """
    frequencies = jnp.asarray(inverse_frequencies(config, head_dim))[None]
    if config.rope_type == "dynamic":
        frequencies = _dynamic_frequencies(config, head_dim, frequencies, seq_lens)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    factor = attention_factor(config)
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


@lru_cache(maxsize=64)
def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each pair of dimensions, f32[H/2].

    For "dynamic" these are the frequencies up to max_position_embeddings.
    """
    plain = _plain_frequencies(config.rope_theta, head_dim)
    match config.rope_type:
        case "linear":
            return plain / np.float32(config.factor)
        case "llama3":
            return _llama3_frequencies(config, plain)
        case "yarn":
            return _yarn_frequencies(config, head_dim)
        case _:
            return plain


def attention_factor(config: RopeConfig) -> float:
    """What cosine and sine are multiplied by: 1, but for yarn (arXiv:2309.00071, section 3.4)."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def by_scale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return by_scale(config.mscale) / by_scale(config.mscale_all_dim)
    return by_scale(1.0)


def _powers(base: float, head_dim: int) -> np.ndarray:
    # The power in float64 and one rounding is within an ulp of what a float32 library gives.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)


def _plain_frequencies(base: float, head_dim: int) -> np.ndarray:
    return np.float32(1.0) / _powers(base, head_dim)


def _llama3_frequencies(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, a ramp between."""
    length = config.original_max_position_embeddings
    wavelengths = np.float32(2 * math.pi) / plain
    scaled = plain / np.float32(config.factor)
    ramp = (np.float32(length) / wavelengths - np.float32(config.low_freq_factor)) / np.float32(
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - ramp) * scaled + ramp * plain
    kept = np.where(wavelengths < length / config.high_freq_factor, plain, between)
    return np.where(wavelengths > length / config.low_freq_factor, scaled, kept)


def _yarn_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """A ramp by dimension between kept and divided frequencies (arXiv:2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        """Where a pair turns `rotations` times over the original context."""
        turns = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    powers = _powers(config.rope_theta, head_dim)
    divided = np.float32(1.0) / (np.float32(config.factor) * powers)
    return divided * (1 - keep) + (np.float32(1.0) / powers) * keep


def _dynamic_frequencies(
    config: RopeConfig,
    head_dim: int,
    plain: Float[Array, "1 half"],
    seq_lens: Int[Array, " T"],
) -> Float[Array, "T half"]:
    """NTK-aware frequencies whose base grows with the length of the token's own request.

    transformers grows the base with the longest position of a forward pass, and keeps it grown
    for the passes after. In an engine that would let one request change another's text, so each
    request's own length decides: the same numbers as transformers for a request alone whose
    prompt was computed in one pass. Keys in the cache keep the base of their own step, there too.
    """
    limit = config.max_position_embeddings
    length = jnp.maximum(seq_lens, limit).astype(jnp.float32)[:, None]
    growth = config.factor * length / limit - (config.factor - 1)
    base = config.rope_theta * growth ** (head_dim / (head_dim - 2))
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return jnp.where(length > limit, 1.0 / base**exponents, plain)
