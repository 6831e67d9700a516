import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.kv_write.api import write_kv
from jaxllm.pallas_kernels.paged_attention.api import decode_attention


def _new_rows(tokens: int, kv_heads: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    k = jnp.arange(1, tokens * kv_heads * head_dim + 1, dtype=jnp.float32)
    k = k.reshape(tokens, kv_heads, head_dim)
    return k, -k


def test_rows_land_in_their_slots_and_nowhere_else() -> None:
    kv = jnp.full((32, 2, 2, 4), 7.0)
    k, v = _new_rows(3, 2, 4)
    out = np.asarray(write_kv(kv, k, v, jnp.asarray([30, 0, 17])))
    for token, slot in enumerate((30, 0, 17)):
        np.testing.assert_array_equal(out[slot, 0], k[token])
        np.testing.assert_array_equal(out[slot, 1], v[token])
    others = np.delete(out, [30, 0, 17], axis=0)
    np.testing.assert_array_equal(others, 7.0)


def test_padded_tokens_are_dropped() -> None:
    kv = jnp.zeros((32, 2, 2, 4))
    k, v = _new_rows(4, 2, 4)
    out = np.asarray(write_kv(kv, k, v, jnp.asarray([5, 32, 33, 2**31 - 1])))
    np.testing.assert_array_equal(out[5, 0], k[0])
    np.testing.assert_array_equal(np.delete(out, 5, axis=0), 0.0)


def test_the_cache_keeps_its_dtype() -> None:
    k, v = _new_rows(1, 2, 4)
    out = write_kv(jnp.zeros((8, 2, 2, 4), jnp.bfloat16), k, v, jnp.asarray([0]))
    assert out.dtype == jnp.bfloat16


def test_a_donated_cache_is_written_in_place() -> None:
    kv = jnp.zeros((4096, 2, 2, 64))
    k, v = _new_rows(8, 2, 64)
    compiled = (
        jax.jit(write_kv, donate_argnums=0)
        .lower(kv, k, v, jnp.arange(8, dtype=jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes // 100
    text = compiled.as_text()
    assert text is not None
    assert "copy(f32[4096" not in text


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_writing_then_attending_copies_no_cache(tokens: int) -> None:
    def step(kv, q, k, slots, tables, seq_lens):
        kv = write_kv(kv, k, k, slots)
        return kv, decode_attention(q, kv, tables, seq_lens, block_size=16, scale=0.1)

    kv = jax.ShapeDtypeStruct((2**16, 2, 2, 64), jnp.float32)
    nbytes = kv.size * 4
    args = (
        jnp.zeros((tokens, 4, 64)),
        jnp.zeros((tokens, 2, 64)),
        jnp.arange(tokens, dtype=jnp.int32),
        jnp.zeros((tokens, 16), jnp.int32),
        jnp.full(tokens, 60, jnp.int32),
    )
    memory = jax.jit(step, donate_argnums=0).lower(kv, *args).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < nbytes // 2
