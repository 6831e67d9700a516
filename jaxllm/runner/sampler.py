"""From logits to token ids, per request, inside the jitted step.

No sort over the vocabulary anywhere: top-k and top-p thresholds are found by bisection on the
bits of the logits, and the draw inverts the cumulative distribution with one uniform number a
request, block by block. The draw depends only on (seed, output index, logits), so a request
gives the same text whatever else is in its batch.
"""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxllm.outputs import NON_FINITE
from jaxllm.runner.sharded_logits import gather_logits, top_tokens

DRAW_BLOCK = 256
"""Tokens in a block of the two-level draw: about the square root of a vocabulary."""


class SamplingMode(enum.IntEnum):
    """How much of the sampler a step needs; each does what the one before does, and more."""

    GREEDY = 0  # an argmax
    RANDOM = 1  # temperature
    FULL = 2  # bias, penalties, min_tokens, top-k, top-p, min-p, logprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerRows:
    """Per-slot state of requests that need SamplingMode.FULL; S slots."""

    prompt_mask: jax.Array  # bool[S, V]: tokens of the prompt
    output_counts: jax.Array  # i32[S, V]: how often each token was made
    logit_bias: jax.Array  # f32[S, V]
    stop_mask: jax.Array  # bool[S, V]: held back while under min_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """A step's sampling parameters, one row a request."""

    slots: jax.Array  # i32[B]: row of SamplerRows
    write_slots: jax.Array  # i32[B]: the same, or S where nothing is sampled
    output_index: jax.Array  # i32[B]: output tokens before this one
    seed: jax.Array  # u32[B]
    temperature: jax.Array  # f32[B]: 0 is greedy
    top_k: jax.Array  # i32[B]: 0 is off
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]
    repetition: jax.Array  # f32[B]
    presence: jax.Array  # f32[B]
    frequency: jax.Array  # f32[B]
    min_tokens: jax.Array  # i32[B]


def row_shapes(num_slots: int, vocab_size: int, sharding: Any) -> SamplerRows:
    """Shapes of the rows; zeros are neutral: no bias, nothing seen."""

    def struct(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((num_slots, vocab_size), dtype, sharding=sharding)

    return SamplerRows(struct(jnp.bool_), struct(jnp.int32), struct(jnp.float32), struct(jnp.bool_))


def set_row(
    rows: SamplerRows,
    slot: Int[Array, ""],
    prompt_mask: Bool[Array, "V"],
    output_counts: Int[Array, "V"],
    logit_bias: Float[Array, "V"],
    stop_mask: Bool[Array, "V"],
) -> SamplerRows:
    """`rows` with the row of one slot replaced."""
    return SamplerRows(
        prompt_mask=rows.prompt_mask.at[slot].set(prompt_mask),
        output_counts=rows.output_counts.at[slot].set(output_counts),
        logit_bias=rows.logit_bias.at[slot].set(logit_bias),
        stop_mask=rows.stop_mask.at[slot].set(stop_mask),
    )


def result_width(max_logprobs: int) -> int:
    """Columns of a step's result: see `sample`."""
    return 3 + 2 * max_logprobs


def sample(
    logits: Float[Array, "B V"],
    rows: SamplerRows,
    batch: SamplingBatch,
    mode: SamplingMode | Int[Array, ""],
    max_logprobs: int,
    mesh: Mesh | None = None,
) -> tuple[Int[Array, "B C"], SamplerRows]:
    """Samples a token a request.

    Args:
        logits: raw logits in float32.
        mode: a SamplingMode, compiled in; or an array, chosen at run time (one program for all
            modes where compile time dominates).
        mesh: over whose axis tp the vocabulary is shared out, and maybe padded. A greedy choice
            is made where the logits are, all others gather them.

    Returns:
        i32[B, 3 + 2 * max_logprobs]: token id (or NON_FINITE), its rank and logprob, then the
        top ids and their logprobs; floats as bits. Logprobs are of the raw logits, as in vLLM,
        and zero outside FULL.
    """

    def branch(fixed: SamplingMode):
        def run(logits: jax.Array, rows: SamplerRows):
            if mesh is None:
                return _sample(logits, rows, batch, fixed, max_logprobs)
            if fixed is SamplingMode.GREEDY:
                return _result(*top_tokens(logits, mesh), max_logprobs), rows
            logits = gather_logits(logits, mesh, rows.logit_bias.shape[1])
            return _sample(logits, rows, batch, fixed, max_logprobs)

        return run

    if isinstance(mode, SamplingMode):
        return branch(mode)(logits, rows)
    return lax.switch(mode, [branch(m) for m in SamplingMode], logits, rows)


def _sample(
    logits: Float[Array, "B V"],
    rows: SamplerRows,
    batch: SamplingBatch,
    mode: SamplingMode,
    max_logprobs: int,
) -> tuple[Int[Array, "B C"], SamplerRows]:
    with jax.named_scope("sample"):
        raw, highest = logits, jnp.max(logits, axis=-1)
        if mode is SamplingMode.FULL:
            logits = _adjust(logits, rows, batch)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if mode is not SamplingMode.GREEDY:
            random = batch.temperature > 0
            scaled = logits / jnp.where(random, batch.temperature, 1.0)[:, None]
            if mode is SamplingMode.FULL:
                scaled = _truncate(scaled, batch)
            tokens = jnp.where(random, _draw(scaled, batch), tokens)
        if mode is not SamplingMode.FULL:
            return _result(tokens, highest, max_logprobs), rows
        result = _checked(tokens, highest)
        counts = rows.output_counts.at[batch.write_slots, tokens].add(1, mode="drop")
        details = token_logprobs(raw, tokens, max_logprobs)
        packed = jnp.concatenate([result[:, None], details], axis=1)
        return packed, SamplerRows(rows.prompt_mask, counts, rows.logit_bias, rows.stop_mask)


def _checked(tokens: Int[Array, "B"], highest: Float[Array, "B"]) -> Int[Array, "B"]:
    # A NaN anywhere makes the maximum NaN, an overflow makes it infinite.
    return jnp.where(jnp.isfinite(highest), tokens, NON_FINITE)


def _result(
    tokens: Int[Array, "B"], highest: Float[Array, "B"], max_logprobs: int
) -> Int[Array, "B C"]:
    """The result without logprobs."""
    result = _checked(tokens, highest)
    rest = jnp.zeros((len(tokens), result_width(max_logprobs) - 1), jnp.int32)
    return jnp.concatenate([result[:, None], rest], axis=1)


def _adjust(
    logits: Float[Array, "B V"], rows: SamplerRows, batch: SamplingBatch
) -> Float[Array, "B V"]:
    """Bias, min_tokens and penalties, in vLLM's order."""
    logits = logits + rows.logit_bias[batch.slots]
    early = batch.output_index < batch.min_tokens
    logits = jnp.where(early[:, None] & rows.stop_mask[batch.slots], -jnp.inf, logits)
    counts = rows.output_counts[batch.slots]
    made = counts > 0
    seen = made | rows.prompt_mask[batch.slots]
    factor = batch.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - batch.frequency[:, None] * counts
    return logits - batch.presence[:, None] * made


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


def _truncate(logits: Float[Array, "B V"], batch: SamplingBatch) -> Float[Array, "B V"]:
    """min-p, top-k and top-p: tokens outside get -inf. Ties with the last one kept stay in."""
    size = logits.shape[0]
    top = jnp.max(logits, axis=-1, keepdims=True)
    # p >= min_p * p_max, without the softmax.
    floor = top + jnp.log(jnp.maximum(batch.min_p, 1e-30))[:, None]
    use_min_p = (batch.min_p > 0)[:, None]
    logits = jnp.where(use_min_p & (logits < floor), -jnp.inf, logits)

    keys = _ordered_bits(logits)
    wanted = jnp.where(batch.top_k > 0, batch.top_k, logits.shape[1])

    def holds_k(threshold):
        return jnp.sum(keys >= threshold[:, None], axis=-1) >= wanted

    kept = keys >= _bisect(holds_k, size)[:, None]
    weights = jnp.where(kept, jnp.exp(logits - top), 0.0)
    mass = batch.top_p * jnp.sum(weights, axis=-1)

    def holds_p(threshold):
        return jnp.sum(jnp.where(keys >= threshold[:, None], weights, 0.0), axis=-1) >= mass

    nucleus = keys >= _bisect(holds_p, size)[:, None]
    kept &= nucleus | (batch.top_p >= 1)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def _draw(logits: Float[Array, "B V"], batch: SamplingBatch) -> Int[Array, "B"]:
    """Draws from softmax(logits) by inverting its cumulative sum with one uniform number."""

    def uniform(seed, index):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), index))

    points = jax.vmap(uniform)(batch.seed, batch.output_index)
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
