"""From logits to token ids, per request, inside the jitted step (`choice` has the arithmetic)."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxllm.outputs import NON_FINITE
from jaxllm.runner.choice import draw, token_logprobs, truncate
from jaxllm.runner.mesh import TP_AXIS, replicated, upload
from jaxllm.runner.sharded_logits import share_rows, top_tokens


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


def row_shapes(num_slots: int, vocab_size: int, mesh: Mesh | None = None) -> SamplerRows:
    """Shapes of the rows; zeros are neutral: no bias, nothing seen.

    The axis tp shares out and pads their vocabulary as it does the logits'.
    """
    width, sharding = vocab_size, None if mesh is None else replicated(mesh)
    if mesh is not None and mesh.shape[TP_AXIS] > 1:
        width = -(-vocab_size // mesh.shape[TP_AXIS]) * mesh.shape[TP_AXIS]
        sharding = NamedSharding(mesh, PartitionSpec(None, TP_AXIS))

    def struct(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((num_slots, width), dtype, sharding=sharding)

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


def row_setter(shapes: SamplerRows) -> Callable[..., SamplerRows]:
    """`set_row` for rows of `shapes`, donated, and a slot and a row that come from the host."""
    sharding = shapes.logit_bias.sharding
    assert isinstance(sharding, NamedSharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    vocab = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    jitted = jax.jit(
        set_row,
        donate_argnums=(0,),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes),
    )

    def set_on_device(rows: SamplerRows, slot: int, *row: np.ndarray) -> SamplerRows:
        placed = upload((np.int32(slot), *row), (whole, *[vocab] * len(row)))
        return jitted(rows, *placed)

    return set_on_device


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
    vocab_size: int = 0,
) -> tuple[Int[Array, "B C"], SamplerRows]:
    """Samples a token a request.

    Args:
        logits: raw logits in float32.
        mode: a SamplingMode, compiled in; or an array, chosen at run time (one program for all
            modes where compile time dominates).
        mesh: over whose axis tp the vocabulary of logits and rows is shared out, and maybe
            padded. No device ever has all logits, and the same logits give the same tokens on
            every mesh.
        vocab_size: without the padding; only with a mesh.

    Returns:
        i32[B, 3 + 2 * max_logprobs]: token id (or NON_FINITE), its rank and logprob, then the
        top ids and their logprobs; floats as bits. Logprobs are of the raw logits, as in vLLM,
        and zero outside FULL.
    """

    def branch(fixed: SamplingMode):
        def run(logits: jax.Array, rows: SamplerRows):
            if mesh is None:
                return _sample(logits, rows, batch, fixed, max_logprobs)
            return _sample_shared(
                logits, rows, batch, fixed, max_logprobs, mesh=mesh, vocab_size=vocab_size
            )

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
        tokens = _choose(logits, batch, mode)
        if mode is not SamplingMode.FULL:
            return _result(tokens, highest, max_logprobs), rows
        result = _checked(tokens, highest)
        counts = rows.output_counts.at[batch.write_slots, tokens].add(1, mode="drop")
        details = token_logprobs(raw, tokens, max_logprobs)
        packed = jnp.concatenate([result[:, None], details], axis=1)
        return packed, replace(rows, output_counts=counts)


def _choose(
    logits: Float[Array, "B V"], batch: SamplingBatch, mode: SamplingMode
) -> Int[Array, "B"]:
    """A token of each row of adjusted logits."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode is SamplingMode.GREEDY:
        return tokens
    random = batch.temperature > 0
    scaled = logits / jnp.where(random, batch.temperature, 1.0)[:, None]
    if mode is SamplingMode.FULL:
        scaled = truncate(scaled, batch.top_k, batch.top_p, batch.min_p)
    return jnp.where(random, draw(scaled, batch.seed, batch.output_index), tokens)


def _sample_shared(
    logits: Float[Array, "B padded"],
    rows: SamplerRows,
    batch: SamplingBatch,
    mode: SamplingMode,
    max_logprobs: int,
    *,
    mesh: Mesh,
    vocab_size: int,
) -> tuple[Int[Array, "B C"], SamplerRows]:
    """`_sample` over a mesh: what is elementwise where the logits are, and then each device does
    whole rows (see `sharded_logits.share_rows`), as one device would."""
    if mode is SamplingMode.GREEDY:
        with jax.named_scope("sample"):
            return _result(*top_tokens(logits, mesh), max_logprobs), rows

    def choose(share: Float[Array, "n R V"], batch: SamplingBatch) -> Int[Array, "R C"]:
        raw, adjusted = share[0], share[-1]
        highest, tokens = jnp.max(raw, axis=-1), _choose(adjusted, batch, mode)
        if mode is not SamplingMode.FULL:
            return _result(tokens, highest, max_logprobs)
        details = token_logprobs(raw, tokens, max_logprobs)
        return jnp.concatenate([_checked(tokens, highest)[:, None], details], axis=1)

    def run(logits: jax.Array, rows: SamplerRows, batch: SamplingBatch):
        if mode is not SamplingMode.FULL:
            return share_rows(choose, logits[None], batch, vocab_size), rows
        both = jnp.stack([logits, _adjust(logits, rows, batch)])
        result = share_rows(choose, both, batch, vocab_size)
        # The tokens that this device has the counts of; NON_FINITE is nobody's.
        width = logits.shape[1]
        mine = result[:, 0] - lax.axis_index(TP_AXIS) * width
        mine = jnp.where((mine >= 0) & (mine < width), mine, width)
        counts = rows.output_counts.at[batch.write_slots, mine].add(1, mode="drop")
        return result, replace(rows, output_counts=counts)

    vocab, whole = PartitionSpec(None, TP_AXIS), PartitionSpec()
    with jax.named_scope("sample"):
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(vocab, vocab, whole),
            out_specs=(whole, vocab),
            check_vma=False,
        )(logits, rows, batch)


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
