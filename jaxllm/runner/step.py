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
        mesh: whose axis tp shares out heads and vocabulary; None for one device.
    """

    merge: Callable[[Params], Any]
    block_size: int
    backend: str
    max_logprobs: int
    mode: SamplingMode | None
    mesh: Mesh | None = None


def run_step(
    params: Params,
    state: DeviceState,
    packed: Int[Array, "packed"],
    *,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[DeviceState, Int[Array, "B C"], Float[Array, "T D"] | None]:
    """One step: embeds, attends, writes the cache, samples.

    Returns:
        The new state, the sampler's result (see `sample`), and for mixed buckets the hidden
        states of all tokens, from which prompt logprobs are made when a request asks for them.
    """
    return _run(params, state, layout.unpack(packed), layout, options)


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
        state, result, _ = _run(params, state, later, layout, options)
        return state, results.at[i].set(result)

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


def _run(
    params: Params,
    state: DeviceState,
    fields: dict[str, jax.Array],
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[DeviceState, Int[Array, "B C"], Float[Array, "T D"] | None]:
    batch = forward_batch(fields, state.last_tokens, layout, options)
    model = options.merge(params)
    hidden, kv_cache = model(batch, state.kv_cache)
    last_tokens, rows, result = sample_next(
        model, hidden, fields, state.last_tokens, state.rows, layout, options
    )
    state = DeviceState(kv_cache, last_tokens, rows)
    return state, result, None if layout.bucket.decode_only else hidden


def sample_next(
    model: Any,
    hidden: Float[Array, "T D"],
    fields: dict[str, jax.Array],
    last_tokens: Int[Array, "slots"],
    rows: SamplerRows,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[Int[Array, "slots"], SamplerRows, Int[Array, "B C"]]:
    """Samples after each request's last hidden state: the new last tokens and rows, and the
    result (see `sample`)."""
    last = hidden if layout.bucket.decode_only else hidden[fields["last_token"]]
    logits = model.compute_logits(last)
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
        vocab_size=model.config.vocab_size,
    )
    # A request whose logits are not finite ends; its slot must still hold a valid id until then.
    tokens = jnp.maximum(result[:, 0], 0)
    last_tokens = last_tokens.at[fields["write_slots"]].set(tokens, mode="drop")
    return last_tokens, rows, result


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
    merge: Callable[[Params], Any],
    max_logprobs: int,
    mesh: Mesh | None = None,
) -> Int[Array, "C cols"]:
    """Logprobs of `targets`, each predicted by one of the C rows of `hidden` from `start` on.

    C rows at a time bound the memory: 8192 rows of a 152k vocabulary would take 5 GB.
    """
    rows = lax.dynamic_slice_in_dim(hidden, start, targets.shape[0])
    model = merge(params)
    logits = model.compute_logits(rows)
    if mesh is not None:
        return shared_logprobs(logits, targets, max_logprobs, mesh, model.config.vocab_size)
    return token_logprobs(logits, targets, max_logprobs)
