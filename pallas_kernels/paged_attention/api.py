"""The attention that models call: picks an implementation for the backend and the platform.

Every implementation has the reference's signature. What one cannot serve it refuses with
NotImplementedError(reason), while tracing, and "auto" goes on to the next.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Required, TypedDict, Unpack

import jax
from jaxtyping import Array, Float, Int

BACKENDS = ("auto", "reference", "triton", "mosaic_gpu")

# What "auto" tries, in order, by platform; the reference is always last.
_DECODE_ORDER = {"gpu": ("triton", "mosaic_gpu", "reference")}
_RAGGED_ORDER = {"gpu": ("mosaic_gpu", "triton", "reference")}


class AttentionOptions(TypedDict, total=False):
    """What all implementations take by keyword; `reference.decode_attention` explains each."""

    block_size: Required[int]
    scale: Required[float]
    sliding_window: int | None
    logit_soft_cap: float | None
    sinks: Array | None  # f32[N]


def decode_attention(
    q: Float[Array, "B N H"],
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Float[Array, "B N H"]:
    """Attention of one new token a request; see `reference.decode_attention` for the arguments.

    Raises:
        ValueError: an unknown backend.
        NotImplementedError: the named backend cannot serve this case; the message says why.
    """
    return _first_able(
        "decode_attention",
        _candidates(backend, _DECODE_ORDER),
        lambda attention: attention(q, kv, block_tables, seq_lens, **options),
    )


def ragged_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    query_start: Int[Array, " B+1"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Float[Array, "T N H"]:
    """Causal attention of packed tokens; see `reference.ragged_attention` for the arguments.

    Raises:
        ValueError: an unknown backend.
        NotImplementedError: the named backend cannot serve this case; the message says why.
    """
    return _first_able(
        "ragged_attention",
        _candidates(backend, _RAGGED_ORDER),
        lambda attention: attention(q, kv, block_tables, seq_lens, query_start, **options),
    )


def _candidates(backend: str, order: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend != "auto":
        return (backend,)
    return order.get(jax.default_backend(), ("reference",))


def _first_able(
    operation: str, backends: Iterable[str], call: Callable[[Callable[..., Array]], Array]
) -> Array:
    """The result of the first backend that serves this call, with every refusal in the error."""
    refusals = []
    for backend in backends:
        try:
            return call(_implementation(backend, operation))
        except NotImplementedError as refusal:
            refusals.append(f"{backend}: {refusal}")
    raise NotImplementedError(f"no backend serves this {operation}: " + "; ".join(refusals))


def _implementation(backend: str, operation: str) -> Callable[..., Array]:
    """A backend's function; imported on first use, for a kernel language may be absent."""
    name = f"jaxllm.pallas_kernels.paged_attention.{backend}"
    if importlib.util.find_spec(name) is None:
        raise NotImplementedError("not in this build")
    function = getattr(importlib.import_module(name), operation, None)
    if function is None:
        raise NotImplementedError(f"it has no {operation}")
    return function
