"""One token id a row of whole logits: plain functions of arrays.

No sort over the vocabulary anywhere: top-k and top-p thresholds are found by bisection on the
bits of the logits, and the draw inverts the cumulative distribution with one uniform number a
request, block by block. The draw depends only on (seed, output index, logits), so a request
gives the same text whatever else is in its batch.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

DRAW_BLOCK = 256
"""Tokens in a block of the two-level draw: about the square root of a vocabulary."""


def _ordered_bits(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Maps floats to integers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _bisect(enough, batch_size: int) -> UInt[Array, "B"]:
    """The largest threshold t a row for which `enough(t)` holds, found bit by bit."""

    def step(i, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, step, jnp.zeros(batch_size, jnp.uint32))


def truncate(
    logits: Float[Array, "B V"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    min_p: Float[Array, "B"],
) -> Float[Array, "B V"]:
    """min-p, top-k and top-p: tokens outside get -inf. Ties with the last one kept stay in."""
    size = logits.shape[0]
    top = jnp.max(logits, axis=-1, keepdims=True)
    # p >= min_p * p_max, without the softmax.
    floor = top + jnp.log(jnp.maximum(min_p, 1e-30))[:, None]
    use_min_p = (min_p > 0)[:, None]
    logits = jnp.where(use_min_p & (logits < floor), -jnp.inf, logits)

    keys = _ordered_bits(logits)
    wanted = jnp.where(top_k > 0, top_k, logits.shape[1])

    def holds_k(threshold):
        return jnp.sum(keys >= threshold[:, None], axis=-1) >= wanted

    kept = keys >= _bisect(holds_k, size)[:, None]
    weights = jnp.where(kept, jnp.exp(logits - top), 0.0)
    mass = top_p * jnp.sum(weights, axis=-1)

    def holds_p(threshold):
        return jnp.sum(jnp.where(keys >= threshold[:, None], weights, 0.0), axis=-1) >= mass

    nucleus = keys >= _bisect(holds_p, size)[:, None]
    kept &= nucleus | (top_p >= 1)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def draw(
    logits: Float[Array, "B V"], seeds: UInt[Array, "B"], indices: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Draws from softmax(logits) by inverting its cumulative sum with one uniform number."""

    def uniform(seed, index):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), index))

    points = jax.vmap(uniform)(seeds, indices)
    size, vocab = logits.shape
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    blocks = -(-vocab // DRAW_BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * DRAW_BLOCK - vocab)))
    weights = weights.reshape(size, blocks, DRAW_BLOCK)

    outer = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    target = points * outer[:, -1]
    block = _first_above(outer, target)
    before = jnp.take_along_axis(outer, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0]
    rest = target - jnp.where(block > 0, before, 0.0)
    inner = jnp.cumsum(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], axis=-1)
    # Rounding may put the rest at or past the block's own sum; keep it strictly inside.
    rest = jnp.clip(rest, 0.0, inner[:, -1] * (1 - 1e-6))
    return block * DRAW_BLOCK + _first_above(inner, rest)


def _first_above(cumulative: Float[Array, "B n"], target: Float[Array, "B"]) -> Int[Array, "B"]:
    """Index of the first entry above target: never one of weight zero."""
    return jnp.argmax(cumulative > target[:, None], axis=-1).astype(jnp.int32)


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"], max_logprobs: int
) -> Int[Array, "B C"]:
    """i32[B, 2 + 2 * max_logprobs]: rank and logprob of `tokens`, then top ids and logprobs."""
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    # An unstable top-k stays off XLA's full sort; only the order of exact ties differs.
    values, ids = lax.top_k(logits, min(max_logprobs, logits.shape[1]))
    missing = max_logprobs - ids.shape[1]
    values = jnp.pad(values - normaliser, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    ids = jnp.pad(ids, ((0, 0), (0, missing)))
    floats = lax.bitcast_convert_type(
        jnp.concatenate([chosen - normaliser, values], axis=1), jnp.int32
    )
    return jnp.concatenate([rank[:, None], floats[:, :1], ids, floats[:, 1:]], axis=1)
