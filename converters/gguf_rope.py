"""Rotary scaling out of a GGUF file: named in its metadata, or a tensor of factors (Llama 3)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.converters.errors import CheckpointError

# Llama 3.1's own values; factors that do not settle a parameter are tried against them.
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0
_TOLERANCE = 1e-4  # relative, of float32 factors computed elsewhere


def rope_scaling_from_gguf(
    get: Callable[..., Any],
    factors: np.ndarray | None,
    *,
    head_dim: int,
    theta: float,
    where: str,
) -> dict[str, Any] | None:
    """config.json's rope_scaling, None for none.

    Args:
        get: an architecture's metadata key (without its prefix) and a default.
        factors: f32[head_dim / 2], by which the frequencies are divided; None if there are none.
        where: the file, for messages.

    Raises:
        CheckpointError: a kind of scaling, or factors, that config.json cannot express.
    """
    kind = get("rope.scaling.type")
    if kind is None and get("rope.scale_linear") is not None:
        kind = "linear"  # how files of 2023 said it
    if factors is not None and not np.allclose(factors, 1.0):
        if kind not in (None, "none", "llama3"):
            raise CheckpointError(
                f"{where} has both rotary factors (rope_freqs.weight) and rope.scaling.type "
                f"{kind!r}, which is not supported."
            )
        return _llama3_scaling(
            factors, head_dim, theta, get("rope.scaling.original_context_length"), where
        )
    if kind in (None, "none", "default", "llama3"):
        return None
    factor = get("rope.scaling.factor", get("rope.scale_linear"))
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor <= 0:
        raise CheckpointError(f"{where}: rope.scaling.factor is {factor!r}, not a positive number.")
    if kind == "linear":
        return None if factor == 1 else {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        return _yarn_scaling(get, float(factor), where)
    raise CheckpointError(
        f"{where} has rope.scaling.type {kind!r}, which is not supported; there are none, linear, "
        f"yarn, and Llama 3's factors."
    )


def _yarn_scaling(get: Callable[..., Any], factor: float, where: str) -> dict[str, Any]:
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        value = get(f"rope.scaling.{key}", neutral)
        if value not in (neutral, -1.0):  # llama.cpp's -1 is "not set"
            raise CheckpointError(f"{where} has rope.scaling.{key} = {value}: not supported.")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    context = get("rope.scaling.original_context_length")
    if context is not None:
        scaling["original_max_position_embeddings"] = context
    for key in ("beta_fast", "beta_slow"):
        value = get(f"rope.scaling.yarn_{key}")
        if value is not None:
            scaling[key] = value
    attention = get("rope.scaling.yarn_attn_factor", get("rope.scaling.attn_factor", 1.0))
    if attention != 1.0:
        # llama.cpp multiplies YaRN's own factor by it, transformers replaces that.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(
    factors: np.ndarray, head_dim: int, theta: float, context: int | None, where: str
) -> dict[str, Any]:
    """The parameters from which transformers computes these factors.

    In the smooth part 1/factor is linear in 1/wavelength, and only the ratios of the three
    parameters (low, high, context) matter, so two factors there settle them for any context.
    Whatever is found is checked against all factors.
    """
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{where}: rope_freqs.weight has the shape {list(factors.shape)}, not "
            f"[{head_dim // 2}]."
        )
    factors = factors.astype(np.float64)
    factor = float(factors.max())
    for low, high, original in _llama3_candidates(factors, head_dim, theta, context):
        if not 0 < low < high:
            continue
        wanted = llama3_factors(head_dim, theta, factor, low, high, original)
        if np.allclose(wanted, factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{where}: the rotary factors in rope_freqs.weight are not those of a Llama 3 scaling "
        f"(largest {factor:g}), which is the only kind supported."
    )


def _llama3_candidates(
    factors: np.ndarray, head_dim: int, theta: float, context: int | None
) -> list[tuple[float, float, int]]:
    """Triples (low, high, original context) that may explain the factors, likeliest first."""
    low, high = _LLAMA3_LOW, _LLAMA3_HIGH
    wavelengths = llama3_wavelengths(head_dim, theta)
    candidates = [(low, high, context or _LLAMA3_CONTEXT)]
    largest = factors.max()
    unscaled = factors < 1 + _TOLERANCE
    smooth = ~unscaled & (factors < largest * (1 - _TOLERANCE))
    share = (1 / factors[smooth] - 1 / largest) / (1 - 1 / largest)
    if smooth.sum() >= 2:
        original = context or _LLAMA3_CONTEXT
        slope, offset = np.polyfit(original / wavelengths[smooth], share, 1)
        low, high = float(-offset / slope), float((1 - offset) / slope)
        candidates += [(round(low, 2), round(high, 2), original), (low, high, original)]
    elif smooth.any():
        fitting = float(wavelengths[smooth][0] * (low + share[0] * (high - low)))
        original = max(1, round(fitting))
        share_of = original / fitting
        candidates += [(low, high, original), (low * share_of, high * share_of, original)]
    elif unscaled.any():
        candidates.append((low, high, math.ceil(high * wavelengths[unscaled].max())))
    return candidates


def llama3_wavelengths(head_dim: int, theta: float) -> np.ndarray:
    """In tokens, f64[head_dim / 2]."""
    return 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)


def llama3_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> np.ndarray:
    """f64[head_dim / 2], by which Llama 3.1 divides the frequencies.

    Source: transformers/modeling_rope_utils.py, "llama3".
    """
    rotations = context / llama3_wavelengths(head_dim, theta)
    share = np.clip((rotations - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)
