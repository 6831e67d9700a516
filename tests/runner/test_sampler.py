"""The sampler against plain numpy, each parameter alone, together, and in mixed batches."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.outputs import NON_FINITE
from jaxllm.runner.sampler import (
    SamplerRows,
    SamplingBatch,
    SamplingMode,
    row_shapes,
    sample,
    set_row,
)

VOCAB = 300
SLOTS = 8
NUM_LOGPROBS = 5

run = jax.jit(sample, static_argnums=(3, 4))
run_dynamic = jax.jit(sample, static_argnums=(4,))


def make_rows() -> SamplerRows:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), row_shapes(SLOTS, VOCAB))


def make_batch(size: int, **fields) -> SamplingBatch:
    def full(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (size,)))

    defaults = {
        "slots": np.arange(size),
        "write_slots": np.arange(size),
        "output_index": 0,
        "seed": np.arange(size),
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
        "min_tokens": 0,
    } | fields
    ints = ("slots", "write_slots", "output_index", "top_k", "min_tokens")
    dtypes: dict[str, str] = dict.fromkeys(ints, "i4") | {"seed": "u4"}
    return SamplingBatch(**{k: full(v, dtypes.get(k, "f4")) for k, v in defaults.items()})


def make_logits(size: int, seed: int = 0, scale: float = 3.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(size, VOCAB)) * scale, jnp.float32)


def tokens_of(logits, batch, mode=SamplingMode.FULL, rows=None) -> np.ndarray:
    return np.asarray(run(logits, rows or make_rows(), batch, mode, NUM_LOGPROBS)[0])[:, 0]


def drawn_set(logits_row: np.ndarray, draws: int = 400, **fields) -> set[int]:
    """The ids drawn from one row of logits with many seeds."""
    seen: set[int] = set()
    rows = make_rows()
    for start in range(0, draws, SLOTS):
        batch = make_batch(SLOTS, seed=np.arange(start, start + SLOTS), **fields)
        seen |= set(tokens_of(jnp.tile(logits_row, (SLOTS, 1)), batch, rows=rows).tolist())
    return seen


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_temperature_zero_is_argmax(mode):
    logits = make_logits(4)
    tokens = tokens_of(logits, make_batch(4, temperature=0.0), mode)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))


def test_draws_follow_the_distribution():
    logits = jnp.asarray(np.log([0.5, 0.3, 0.15, 0.05]), jnp.float32)
    padded = jnp.full(VOCAB, -jnp.inf).at[jnp.array([7, 60, 255, 299])].set(logits)
    draw = jax.jit(jax.vmap(partial(_draw_one, padded)))
    counts = np.bincount(np.asarray(draw(jnp.arange(20_000, dtype=jnp.uint32))), minlength=VOCAB)
    share = counts[[7, 60, 255, 299]] / 20_000
    assert counts.sum() == counts[[7, 60, 255, 299]].sum()
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.012)


def _draw_one(logits, seed):
    batch = make_batch(1)
    batch = dataclasses.replace(batch, seed=seed[None])
    return sample(logits[None], make_rows(), batch, SamplingMode.RANDOM, 1)[0][0, 0]


def test_the_draw_depends_only_on_seed_index_and_logits():
    logits = make_logits(6)
    alone = [
        tokens_of(logits[i : i + 1], make_batch(1, seed=[40 + i], output_index=i))[0]
        for i in range(6)
    ]
    together = tokens_of(logits, make_batch(6, seed=np.arange(40, 46), output_index=np.arange(6)))
    mixed = tokens_of(
        logits,
        make_batch(
            6,
            seed=np.arange(40, 46),
            output_index=np.arange(6),
            temperature=[1, 0, 1, 0, 1, 0],
            top_k=[0, 3, 0, 1, 0, 0],
        ),
    )
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(mixed[::2], np.asarray(alone)[::2])


def test_another_index_or_seed_draws_anew():
    logits = jnp.zeros((8, VOCAB))
    by_index = tokens_of(logits, make_batch(8, seed=1, output_index=np.arange(8)))
    by_seed = tokens_of(logits, make_batch(8, seed=np.arange(8)))
    assert len(set(by_index.tolist())) > 4
    assert len(set(by_seed.tolist())) > 4


@pytest.mark.parametrize("k", [1, 2, 7, VOCAB, 10**9])
def test_top_k_keeps_exactly_k(k):
    row = np.asarray(make_logits(1, scale=0.3)[0])
    allowed = set(np.argsort(-row)[:k].tolist())
    seen = drawn_set(row, top_k=min(k, 2**31 - 1))
    assert seen <= allowed
    assert len(seen) > min(k, 8) // 2


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9])
def test_top_p_keeps_the_smallest_nucleus(p):
    row = np.asarray(make_logits(1)[0])
    order = np.argsort(-row)
    probs = np.exp(row[order] - row.max())
    probs /= probs.sum()
    size = int(np.searchsorted(np.cumsum(probs), p) + 1)
    seen = drawn_set(row, top_p=p)
    assert seen <= set(order[:size].tolist())
    assert int(order[0]) in seen


def test_top_p_counts_within_top_k():
    # After top-k 2 the two hold 0.6 and 0.4: a nucleus of 0.5 is the first alone.
    row = np.full(VOCAB, -5.0, np.float32)
    row[[3, 9, 11]] = np.log([0.36, 0.24, 0.23])
    assert drawn_set(row, top_k=2, top_p=0.5) == {3}


@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
def test_min_p_is_relative_to_the_most_likely(min_p):
    row = np.asarray(make_logits(1, scale=1.0)[0])
    probs = np.exp(row - row.max())
    assert drawn_set(row, min_p=min_p) <= set(np.flatnonzero(probs >= min_p * 0.999).tolist())


def test_penalties_match_their_definitions():
    rng = np.random.default_rng(1)
    prompt = rng.random((4, VOCAB)) < 0.2
    counts = rng.integers(0, 3, (4, VOCAB)).astype(np.int32)
    rows = make_rows()
    for slot in range(4):
        rows = set_row(
            rows,
            jnp.int32(slot),
            jnp.asarray(prompt[slot]),
            jnp.asarray(counts[slot]),
            jnp.zeros(VOCAB),
            jnp.zeros(VOCAB, bool),
        )
    logits = np.asarray(make_logits(4))
    factors = {"repetition": [1.0, 1.7, 0.5, 1.3], "presence": [0, 1.0, -1.0, 2.0]}
    factors["frequency"] = [0.5, 0, 1.0, 0.3]
    expected = logits.copy()
    for i in range(4):
        seen = prompt[i] | (counts[i] > 0)
        r = factors["repetition"][i]
        scaled = np.where(expected[i] > 0, expected[i] / r, expected[i] * r)
        expected[i] = np.where(seen, scaled, expected[i])
        expected[i] -= factors["frequency"][i] * counts[i]
        expected[i] -= factors["presence"][i] * (counts[i] > 0)
    batch = make_batch(4, temperature=0.0, **factors)
    np.testing.assert_array_equal(
        tokens_of(jnp.asarray(logits), batch, rows=rows), expected.argmax(-1)
    )


def test_sampled_tokens_are_counted_once_and_only_where_sampled():
    batch = make_batch(3, temperature=0.0, write_slots=[0, SLOTS, 2])
    result, rows = run(make_logits(3), make_rows(), batch, SamplingMode.FULL, NUM_LOGPROBS)
    counts = np.asarray(rows.output_counts)
    tokens = np.asarray(result)[:, 0]
    assert counts.sum() == 2
    assert counts[0, tokens[0]] == counts[2, tokens[2]] == 1


def test_logit_bias_and_min_tokens():
    stop = np.zeros(VOCAB, bool)
    stop[5] = True
    bias = np.zeros(VOCAB, np.float32)
    bias[5] = 100.0
    bias[6] = 99.0
    rows = set_row(
        make_rows(),
        jnp.int32(0),
        jnp.zeros(VOCAB, bool),
        jnp.zeros(VOCAB, jnp.int32),
        jnp.asarray(bias),
        jnp.asarray(stop),
    )
    logits = jnp.zeros((2, VOCAB))
    batch = make_batch(2, temperature=0.0, slots=0, min_tokens=3, output_index=[2, 3])
    np.testing.assert_array_equal(tokens_of(logits, batch, rows=rows), [6, 5])


def test_logprobs_are_of_the_raw_logits():
    logits = make_logits(3)
    batch = make_batch(3, temperature=0.7, top_k=4)
    packed = np.asarray(run(logits, make_rows(), batch, SamplingMode.FULL, NUM_LOGPROBS)[0])
    reference = np.asarray(jax.nn.log_softmax(logits))
    for row, expected in zip(packed, reference, strict=True):
        floats = row.view(np.float32)
        order = np.argsort(-expected)
        assert row[1] == 1 + int(np.flatnonzero(order == row[0])[0])
        np.testing.assert_allclose(floats[2], expected[row[0]], rtol=1e-5)
        np.testing.assert_array_equal(row[3 : 3 + NUM_LOGPROBS], order[:NUM_LOGPROBS])
        np.testing.assert_allclose(floats[3 + NUM_LOGPROBS :], expected[order[:NUM_LOGPROBS]], 1e-5)


@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_are_marked_and_harm_no_neighbour(mode, bad):
    logits = make_logits(3).at[1, 17].set(bad)
    tokens = tokens_of(logits, make_batch(3, temperature=0.0), mode)
    assert tokens[1] == NON_FINITE
    np.testing.assert_array_equal(tokens[[0, 2]], np.argmax(logits[jnp.array([0, 2])], axis=-1))


def test_tiny_temperatures_stay_finite():
    tokens = tokens_of(make_logits(2), make_batch(2, temperature=1e-4))
    np.testing.assert_array_equal(tokens, np.argmax(make_logits(2), axis=-1))


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_a_mode_chosen_at_run_time_gives_the_same(mode):
    logits, batch = make_logits(4), make_batch(4, temperature=[0, 1, 0.5, 2])
    fixed = run(logits, make_rows(), batch, mode, NUM_LOGPROBS)[0]
    chosen = run_dynamic(logits, make_rows(), batch, jnp.int32(mode), NUM_LOGPROBS)[0]
    np.testing.assert_array_equal(fixed, chosen)
