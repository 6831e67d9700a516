import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.paged_attention.api import decode_attention
from jaxllm.pallas_kernels.rope_kv_write import api, reference, triton
from jaxllm.pallas_kernels.rope_kv_write.arg_specs import CASES, RopeCase, make_arguments
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation, write_kv
from tests.pallas_kernels.cross_lowering import lower_for_cuda

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3}


def _close(case: RopeCase, actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> None:
    for a, b in zip(actual, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        tolerance = TOLERANCE[case.dtype]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_agrees_with_the_reference(case: RopeCase) -> None:
    arrays = make_arguments(case)
    found = triton.rotate_and_write(**arrays, interpret=True)
    _close(case, found, reference.rotate_and_write(**arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gpu_agrees_with_the_reference(case: RopeCase) -> None:
    arrays = make_arguments(case)
    wanted = reference.rotate_and_write(**arrays)
    _close(case, jax.jit(api.rotate_and_write)(**arrays), wanted)


def test_the_kernel_lowers_for_cuda_and_writes_its_own_input() -> None:
    text = _lowered(head_dim=128, half=64)
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "output_operand_aliases" in text


def test_a_partial_rotation_is_left_to_the_reference() -> None:
    with pytest.raises(NotImplementedError, match="head_dim 128 with 32 angles"):
        _lowered(head_dim=128, half=32)


def _lowered(head_dim: int, half: int) -> str:
    def call(qkv, cos, sin, kv, slots):
        return triton.rotate_and_write(qkv, HeadRotation(cos, sin), kv, slots)

    bf16, f32 = jnp.bfloat16, jnp.float32
    shapes = (((256, 8, 6, head_dim), bf16), ((256, half), f32), ((256, half), f32))
    shapes += (((2**14, 2, 8, head_dim), bf16), ((256,), jnp.int32))
    return lower_for_cuda(call, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


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
