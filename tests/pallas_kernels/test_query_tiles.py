import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels.paged_attention.query_tiles import (
    POSITION,
    REQUEST,
    ROWS,
    SEQ_LEN,
    SKIP,
    TOKEN,
    attend_single_tokens,
    query_tiles,
)

REQUESTS = 4  # always as many, padded


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 40), min_size=0, max_size=REQUESTS),
    cached=st.lists(st.integers(0, 50), min_size=REQUESTS, max_size=REQUESTS),
    align=st.sampled_from([1, 8]),
    least=st.sampled_from([1, 2]),
)
def test_tiles_cover_each_token_once(
    lens: list[int], cached: list[int], align: int, least: int
) -> None:
    num_tokens = 200  # always as many: the padding is part of what is tested
    starts = np.full(REQUESTS + 1, sum(lens), np.int32)
    starts[: len(lens) + 1] = np.cumsum([0, *lens])
    seq_lens = np.zeros(REQUESTS, np.int32)
    seq_lens[: len(lens)] = np.add(lens, cached[: len(lens)])
    tiles, used = query_tiles(
        jnp.asarray(seq_lens),
        jnp.asarray(starts),
        num_tokens=num_tokens,
        tile_tokens=16,
        align=align,
        min_query_len=least,
    )
    tiles = np.asarray(tiles)
    covered = np.zeros(num_tokens, np.int32)
    contexts = []
    for tile in tiles[: int(used[0])]:
        assert tile[TOKEN] % align == 0
        assert 0 <= tile[SKIP] < tile[ROWS] <= 16
        for row in range(tile[SKIP], tile[ROWS]):
            token = tile[TOKEN] + row
            covered[token] += 1
            if token >= sum(lens):
                assert tile[POSITION] + tile[ROWS] == 0  # padding: nothing to attend to
                continue
            owner = int(np.searchsorted(starts[1:], token, side="right"))
            assert tile[REQUEST] == owner
            assert tile[SEQ_LEN] == seq_lens[owner]
            assert tile[POSITION] + row == cached[owner] + token - starts[owner]
        contexts.append(tile[POSITION] + tile[ROWS])
    assert contexts == sorted(contexts, reverse=True)
    assert not tiles[int(used[0]) :, ROWS].any()
    single = np.zeros(num_tokens, bool)
    single[[start for start, n in zip(starts, lens, strict=False) if n < least]] = True
    np.testing.assert_array_equal(covered, np.where(single, 0, 1))


@pytest.mark.parametrize("padded", [0, 2])
def test_single_tokens_are_merged_in(padded: int) -> None:
    starts = jnp.asarray([0, 1, 4, 5] + [5] * padded, jnp.int32)
    lens = jnp.asarray([7, 3, 9] + [0] * padded, jnp.int32)
    q = jnp.arange(5 + padded, dtype=jnp.float32).reshape(-1, 1, 1)
    out = attend_single_tokens(
        jnp.full_like(q, -1.0), q, lens, starts, lambda q, lens: q * 100 + lens[:, None, None]
    )
    assert out[:, 0, 0].tolist() == [7.0, -1.0, -1.0, -1.0, 409.0] + [-1.0] * padded


def test_layers_share_the_tiles_of_a_step() -> None:
    def layers(seq_lens, query_start):
        total = jnp.zeros((), jnp.int32)
        for layer in range(3):
            tiles, _ = query_tiles(seq_lens, query_start, num_tokens=64, tile_tokens=16)
            total = total * layer + tiles.sum()
        return total

    lens, starts = jnp.asarray([9, 30]), jnp.asarray([0, 9, 39])
    compiled = jax.jit(layers).lower(lens, starts).compile().as_text()
    assert compiled is not None
    assert compiled.count(" sort(") == 1
