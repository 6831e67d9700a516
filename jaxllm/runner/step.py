"""The jitted functions. The device state is donated here and nowhere else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.models.batch import AttentionMetadata, ForwardBatch, KVCache
from jaxllm.runner.batch_layout import FEEDBACK, BatchLayout
from jaxllm.runner.choice import token_logprobs
from jaxllm.runner.mesh import replicated
from jaxllm.runner.sampler import (
    SamplerRows,
    SamplingBatch,
    SamplingMode,
    result_width,
    row_shapes,
    sample,
)
from jaxllm.runner.sharded_logits import shared_logprobs
from jaxllm.runner.weights import Params

SamplerState = tuple[SamplerRows, jax.Array]
"""What the sampler keeps and updates in place: its rows, and i32[slots], what each slot sampled
last."""


ForSampler = tuple[jax.Array, jax.Array]
"""The sampler's part of the upload, and the logits after each request's last token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What stays on the device from step to step, updated in place."""

    kv_cache: KVCache
    last_tokens: jax.Array  # i32[slots]: what each slot sampled last
    rows: SamplerRows


def state_shapes(cache: KVCache, num_slots: int, vocab_size: int, mesh: Mesh) -> DeviceState:
    """Shapes of the state beside the cache's, which are given."""
    last: Any = jax.ShapeDtypeStruct((num_slots,), jnp.int32, sharding=replicated(mesh))
    return DeviceState(cache, last, row_shapes(num_slots, vocab_size, mesh))


def allocate[State](shapes: State) -> State:
    """The state of one program or of several stages, all zeros."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)


@dataclass(frozen=True)
class StepOptions:
    """What a step's program depends on beside its bucket.

    Attributes:
        merge: params -> model module.
        mode: None leaves the sampling mode to run time.
        vocab_size: without the padding that a mesh may need.
        mesh: whose axis tp shares out heads and vocabulary; None for one device.
    """

    merge: Callable[[Params], Any]
    block_size: int
    backend: str
    max_logprobs: int
    mode: SamplingMode | None
    vocab_size: int
    mesh: Mesh | None = None


def run_model(
    params: Params,
    cache: KVCache,
    last_tokens: Int[Array, "slots"],
    packed: Int[Array, "packed"],
    *,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[KVCache, ForSampler, Float[Array, "T D"] | None]:
    """A step up to the logits: embeds, attends, writes the cache.

    Returns:
        The new cache, what the sampler needs, and for mixed buckets the hidden states of all
        tokens, from which prompt logprobs are made when a request asks for them.
    """
    fields = layout.unpack(packed)
    cache, logits, hidden = _run_model(params, cache, last_tokens, fields, layout, options)
    return cache, (packed[: layout.sampler_size], logits), hidden


def run_sampler(
    state: SamplerState, given: ForSampler, *, layout: BatchLayout, options: StepOptions
) -> tuple[SamplerState, Int[Array, "B C"]]:
    """The rest of a step: the new state, and the sampler's result (see `sample`)."""
    packed, logits = given
    return _run_sampler(state, layout.unpack(packed), logits, options)


def run_steps(
    params: Params,
    state: DeviceState,
    packed: Int[Array, "packed"],
    *,
    layout: BatchLayout,
    options: StepOptions,
    count: int,
) -> tuple[DeviceState, Int[Array, "count B C"]]:
    """`count` decode steps in one program, each fed with what the one before sampled.

    `packed` is the first step's upload; its block tables must reach to the last one's tokens.
    """
    fields = layout.unpack(packed)
    size = layout.bucket.num_requests
    results = jnp.zeros((count, size, result_width(options.max_logprobs)), jnp.int32)

    def body(i: jax.Array, carry: tuple[DeviceState, jax.Array]) -> tuple[DeviceState, jax.Array]:
        state, results = carry
        later = _advance(fields, i, options.block_size)
        last, rows = state.last_tokens, state.rows
        cache, logits, _ = _run_model(params, state.kv_cache, last, later, layout, options)
        (rows, last), result = _run_sampler((rows, last), later, logits, options)
        return DeviceState(cache, last, rows), results.at[i].set(result)

    # The trip count is known, so XLA does not make the host wait for each turn.
    return lax.fori_loop(0, count, body, (state, results))


def _advance(fields: dict[str, jax.Array], i: jax.Array, block_size: int) -> dict[str, jax.Array]:
    """The upload of the i-th decode step from now, made from that of the next one."""
    real = fields["seq_lens"] > 0
    positions = fields["positions"] + jnp.where(real, i, 0)
    block = jnp.take_along_axis(
        fields["block_tables"], positions[:, None] // block_size, axis=1, mode="clip"
    )[:, 0]
    slots = block * block_size + positions % block_size
    return fields | {
        "token_ids": jnp.where(i == 0, fields["token_ids"], FEEDBACK),
        "positions": positions,
        "slot_mapping": jnp.where(real, slots, fields["slot_mapping"]),
        "seq_lens": fields["seq_lens"] + jnp.where(real, i, 0),
        "output_index": fields["output_index"] + i,
    }


def _run_model(
    params: Params,
    cache: KVCache,
    last_tokens: Int[Array, "slots"],
    fields: dict[str, jax.Array],
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[KVCache, Float[Array, "B V"], Float[Array, "T D"] | None]:
    model = options.merge(params)
    hidden, cache = model(forward_batch(fields, last_tokens, layout, options), cache)
    return cache, *next_logits(model, hidden, fields, layout)


def next_logits(
    model: Any, hidden: Float[Array, "T D"], fields: dict[str, jax.Array], layout: BatchLayout
) -> tuple[Float[Array, "B V"], Float[Array, "T D"] | None]:
    """Logits after each request's last token, and `hidden` where others may want it."""
    if layout.bucket.decode_only:
        return model.compute_logits(hidden), None
    return model.compute_logits(hidden[fields["last_token"]]), hidden


def _run_sampler(
    state: SamplerState,
    fields: dict[str, jax.Array],
    logits: Float[Array, "B V"],
    options: StepOptions,
) -> tuple[SamplerState, Int[Array, "B C"]]:
    rows, last_tokens = state
    sampling = SamplingBatch(
        slots=fields["slots"],
        write_slots=fields["write_slots"],
        output_index=fields["output_index"],
        seed=lax.bitcast_convert_type(fields["seed"], jnp.uint32),
        temperature=fields["temperature"],
        top_k=fields["top_k"],
        top_p=fields["top_p"],
        min_p=fields["min_p"],
        repetition=fields["repetition"],
        presence=fields["presence"],
        frequency=fields["frequency"],
        min_tokens=fields["min_tokens"],
    )
    mode = fields["mode"][0] if options.mode is None else options.mode
    result, rows = sample(
        logits,
        rows,
        sampling,
        mode,
        options.max_logprobs,
        mesh=options.mesh,
        vocab_size=options.vocab_size,
    )
    # A request whose logits are not finite ends; its slot must still hold a valid id until then.
    tokens = jnp.maximum(result[:, 0], 0)
    last_tokens = last_tokens.at[fields["write_slots"]].set(tokens, mode="drop")
    return (rows, last_tokens), result


def forward_batch(
    fields: dict[str, jax.Array],
    last_tokens: Int[Array, "slots"] | None,
    layout: BatchLayout,
    options: StepOptions,
) -> ForwardBatch:
    """Requests with one new token stand first, so token i of those is request i's.

    Without `last_tokens` there are none to embed: a later pipeline stage needs no token ids.
    """
    num = layout.bucket.num_requests
    token_ids = fields["token_ids"]
    if last_tokens is not None:
        head = token_ids[:num]
        head = jnp.where(head < 0, last_tokens[fields["slots"]], head)
        token_ids = head if len(token_ids) == num else token_ids.at[:num].set(head)
    attention = AttentionMetadata(
        query_start=fields["query_start"],
        seq_lens=fields["seq_lens"],
        block_tables=fields["block_tables"],
        slot_mapping=fields["slot_mapping"],
        block_size=options.block_size,
        decode_only=layout.bucket.decode_only,
        backend=options.backend,
        mesh=options.mesh,
    )
    return ForwardBatch(token_ids, fields["positions"], attention)


def prompt_logprobs(
    params: Params,
    hidden: Float[Array, "T D"],
    start: Int[Array, ""],
    targets: Int[Array, "C"],
    *,
    options: StepOptions,
) -> Int[Array, "C cols"]:
    """Logprobs of `targets`, each predicted by one of the C rows of `hidden` from `start` on.

    C rows at a time bound the memory: 8192 rows of a 152k vocabulary would take 5 GB.
    """
    rows = lax.dynamic_slice_in_dim(hidden, start, targets.shape[0])
    logits = options.merge(params).compute_logits(rows)
    count, mesh = options.max_logprobs, options.mesh
    if mesh is not None:
        return shared_logprobs(logits, targets, count, mesh, options.vocab_size)
    return token_logprobs(logits, targets, count)
