"""Sampling over a mesh: to the bit what one device makes of the same logits, and no gathering."""

import re
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.outputs import NON_FINITE
from jaxllm.runner.choice import token_logprobs
from jaxllm.runner.mesh import make_mesh, replicated
from jaxllm.runner.sampler import (
    SamplerRows,
    SamplingMode,
    result_width,
    row_setter,
    row_shapes,
    sample,
)
from jaxllm.runner.sharded_logits import shared_logprobs, top_tokens
from tests.runner.test_sampler import NUM_LOGPROBS, SLOTS, make_batch

VOCAB = 1003  # several blocks of the draw; divides over no mesh


def random_rows(mesh: Mesh) -> SamplerRows:
    """Rows set through the host, as the runner does it; the same on every mesh."""
    shapes = row_shapes(SLOTS, VOCAB, mesh)
    width = shapes.logit_bias.shape[1]
    setter = row_setter(shapes)
    rows = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    for slot in range(SLOTS):
        rng = np.random.default_rng(slot)
        values = (
            rng.random(VOCAB) < 0.3,
            rng.integers(0, 3, VOCAB, dtype=np.int32),
            rng.normal(size=VOCAB).astype(np.float32),
            rng.random(VOCAB) < 0.1,
        )
        rows = setter(rows, slot, *(np.pad(value, (0, width - VOCAB)) for value in values))
    return rows


def spread(logits: np.ndarray, mesh: Mesh) -> jax.Array:
    """As the model leaves them: padded with -inf and shared out."""
    missing = -VOCAB % mesh.size
    padded = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    return jax.device_put(padded, NamedSharding(mesh, PartitionSpec(None, "tp")))


def make_case(size: int, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits and parameters of each kind, `size` requests of them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(size, VOCAB)).astype(np.float32) * rng.choice([0.1, 1, 4], (size, 1))
    logits[0, ::7] = logits[0].max()  # ties over all devices
    fields = {
        "seed": rng.integers(0, 2**31, size),
        "output_index": rng.integers(0, 9, size),
        "temperature": rng.choice([0, 0.3, 1, 1.5], size, p=[0.1, 0.3, 0.3, 0.3]),
        "top_k": rng.choice([0, 1, 5, 40, 2000], size),
        "top_p": rng.choice([1, 0.9, 0.3], size),
        "min_p": rng.choice([0, 0.05], size),
        "repetition": rng.choice([1, 1.3], size),
        "presence": rng.choice([0, 0.5], size),
        "frequency": rng.choice([0, 0.5], size),
        "min_tokens": rng.choice([0, 20], size),
        "write_slots": np.where(np.arange(size) % 3 == 1, SLOTS, np.arange(size)),
    }
    return logits.astype(np.float32), fields


@lru_cache
def make_run(mode: SamplingMode | None, tp: int) -> Any:
    """(logits, fields) -> results and counts; with mode None it is chosen at run time."""
    mesh = make_mesh(tensor_parallel_size=tp)
    options: dict[str, Any] = {"mesh": mesh, "vocab_size": VOCAB} if mesh.size > 1 else {}
    if mode is not None:
        options["mode"] = mode
    function = jax.jit(partial(sample, max_logprobs=NUM_LOGPROBS, **options))
    rows = random_rows(mesh)

    def run(logits: np.ndarray, fields: dict[str, Any], **chosen: Any) -> tuple[Any, Any]:
        batch = jax.device_put(make_batch(len(logits), **fields), replicated(mesh))
        result, after = function(spread(logits, mesh), rows, batch, **chosen)
        return np.asarray(result), np.asarray(after.output_counts)[:, :VOCAB]

    return run


def check_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Tokens, ranks and top ids are equal; logprobs too but for the order of a sum."""
    floats = [2, *range(3 + NUM_LOGPROBS, 3 + 2 * NUM_LOGPROBS)]
    exact = np.setdiff1d(np.arange(found.shape[1]), floats)
    np.testing.assert_array_equal(found[:, exact], expected[:, exact])
    logprobs = [
        np.ascontiguousarray(rows[:, floats]).view(np.float32) for rows in (found, expected)
    ]
    np.testing.assert_allclose(*logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "size", "tp"),
    [
        (SamplingMode.FULL, 5, 2),
        (SamplingMode.FULL, 1, 4),
        (SamplingMode.FULL, 8, 8),
        (SamplingMode.RANDOM, 5, 2),
        (SamplingMode.RANDOM, 8, 4),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_device(mode: SamplingMode, size: int, tp: int) -> None:
    """The same seed, index and logits give the same token on every mesh.

    Sums of the draw are those of one device's program. Only where XLA adds a row up in another
    order for another number of rows, as it may on one device too, could a number that lies
    within rounding of the boundary of two tokens fall on its other side; none of these does.
    """
    one, shared = make_run(mode, 1), make_run(mode, tp)
    for seed in range(25):
        logits, fields = make_case(size, seed)
        (found, counts), (expected, wanted) = shared(logits, fields), one(logits, fields)
        check_same(found, expected)
        np.testing.assert_array_equal(counts, wanted)


def test_logits_that_are_not_finite_are_marked_wherever_they_lie() -> None:
    run = make_run(SamplingMode.FULL, 8)
    logits, fields = make_case(8, 0)
    clean = run(logits, fields)[0]
    bad = {1: (3, np.nan), 4: (VOCAB - 1, np.nan), 6: (VOCAB // 2, np.inf)}
    for row, (token, value) in bad.items():
        logits[row, token] = value
    logits[7, : VOCAB // 2] = -np.inf  # devices with nothing at all are no error
    found = run(logits, fields)[0]
    assert [row for row in range(8) if found[row, 0] == NON_FINITE] == list(bad)
    untouched = [0, 2, 3, 5]
    np.testing.assert_array_equal(found[untouched], clean[untouched])


def test_a_mode_chosen_at_run_time_gives_the_same() -> None:
    dynamic = make_run(None, 2)
    logits, fields = make_case(5, 1)
    for mode in SamplingMode:
        if mode is SamplingMode.GREEDY:
            expected = np.argmax(logits, axis=1)
        else:
            expected = make_run(mode, 2)(logits, fields)[0][:, 0]
        found = dynamic(logits, fields, mode=jnp.int32(mode))[0][:, 0]
        np.testing.assert_array_equal(found, expected)


def test_prompt_logprobs_are_those_of_one_device() -> None:
    logits = make_case(8, 2)[0]
    targets = np.random.default_rng(0).integers(0, VOCAB, 8).astype(np.int32)
    expected = np.asarray(token_logprobs(jnp.asarray(logits), jnp.asarray(targets), NUM_LOGPROBS))
    mesh = make_mesh(tensor_parallel_size=8)
    function = jax.jit(shared_logprobs, static_argnums=(2, 3, 4))
    found = function(spread(logits, mesh), targets, NUM_LOGPROBS, mesh, VOCAB)
    column = np.zeros((8, 1), np.int32)
    check_same(np.hstack([column, np.asarray(found)]), np.hstack([column, expected]))


@pytest.mark.parametrize("mode", list(SamplingMode), ids=str)
def test_no_device_gathers_the_vocabulary(mode: SamplingMode) -> None:
    """One exchange of what each device holds, then a gather of a few numbers a row."""
    tp, size = 4, 8
    mesh = make_mesh(tensor_parallel_size=tp)
    rows = row_shapes(SLOTS, VOCAB, mesh)
    width = rows.logit_bias.shape[1]
    assert rows.logit_bias.sharding.shard_shape(rows.logit_bias.shape) == (SLOTS, width // tp)
    logits = jax.ShapeDtypeStruct(
        (size, width), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "tp"))
    )
    batch = jax.device_put(make_batch(size), replicated(mesh))
    function = partial(sample, mode=mode, max_logprobs=NUM_LOGPROBS, mesh=mesh, vocab_size=VOCAB)
    text = jax.jit(function).lower(logits, rows, batch).compile().as_text() or ""
    found = re.findall(
        r"= (.+?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
        r"(?:-start)?\(",
        text,
    )
    kinds = [kind for _, kind in found]
    if mode is SamplingMode.GREEDY:
        assert kinds == ["all-gather"]
    else:
        assert sorted(kinds) == ["all-gather", "all-to-all"]
    for shape, kind in found:
        largest = max(
            int(np.prod([int(n) for n in dims.split(",")]))
            for dims in re.findall(r"\w\[([\d,]+)\]", shape)
        )
        # All that is gathered are results; all that is exchanged, a share of the logits.
        share = size * width // tp * (2 if mode is SamplingMode.FULL else 1)
        assert largest <= (size * result_width(NUM_LOGPROBS) if kind == "all-gather" else share)


def test_the_greedy_choice_over_devices_is_that_of_one_argmax() -> None:
    mesh = make_mesh(tensor_parallel_size=4)
    logits = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    logits[1, [30, 60, 90]] = 9  # the first of equals wins
    logits[2, 77] = np.nan
    logits[3, 99] = np.inf
    logits[4, 40:] = -np.inf  # devices with nothing at all
    sharding = NamedSharding(mesh, PartitionSpec(None, "tp"))
    tokens, values = jax.jit(top_tokens, static_argnums=1)(jax.device_put(logits, sharding), mesh)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_array_equal(values, np.max(logits, axis=1))
