"""The fused decode kernel against its two halves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.paged_attention.arg_specs import CASES, AttentionCase, make_arguments
from jaxllm.pallas_kernels.paged_attention.configs import DecodeConfig
from jaxllm.pallas_kernels.rope_decode import api, reference, triton
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation
from tests.pallas_kernels.cross_lowering import lower_for_cuda

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2}


def fused_arguments(
    case: AttentionCase, norm: bool, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A decode case whose last token of each request is not in the cache yet."""
    arrays, options = make_arguments(case, seed)
    rng = np.random.default_rng(seed + 1)
    dtype, size, head_dim = jnp.dtype(case.dtype), case.block_size, case.head_dim
    rows = case.num_heads // case.num_kv_heads + 2
    seq_lens, tables = np.asarray(arrays["seq_lens"]), np.asarray(arrays["block_tables"])
    requests = len(seq_lens)
    last = np.maximum(seq_lens - 1, 0)
    slots = tables[np.arange(requests), last // size] * size + last % size
    nowhere = arrays["kv"].shape[0] + np.arange(requests)
    slots = np.where(seq_lens > 0, slots, nowhere).astype(np.int32)
    kv = np.array(arrays["kv"].astype(jnp.float32))
    kv[slots[seq_lens > 0]] = np.nan
    angles = rng.uniform(0, 100, (requests, head_dim // 2))
    qkv = rng.standard_normal((requests, case.num_kv_heads, rows, head_dim))
    weights: list[Any] = [None, None]
    if norm:
        weights = [jnp.asarray(rng.standard_normal(head_dim), dtype) for _ in range(2)]
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    del arrays["q"]
    return {
        "qkv": jnp.asarray(qkv, dtype),
        "rotation": HeadRotation(cos, sin, *weights, eps=1e-6),
        **arrays,
        "kv": jnp.asarray(kv, dtype),
        "slot_mapping": jnp.asarray(slots),
    }, options


def assert_equal(case: AttentionCase, found: Any, wanted: Any) -> None:
    real = len(case.seq_lens)
    for a, b in ((found[0][:real], wanted[0][:real]), (found[1], wanted[1])):
        a, b = np.asarray(a.astype(jnp.float32)), np.asarray(b.astype(jnp.float32))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        assert np.linalg.norm(a - b) <= TOLERANCE[case.dtype] * max(np.linalg.norm(b), 1e-30)


INTERPRETED = (
    (1, False, AttentionCase("one", (1,), (33,), num_heads=4, num_kv_heads=1)),
    (4, False, AttentionCase("lengths", (1,) * 4, (1, 2, 33, 150), padded_requests=2)),
    (1, True, AttentionCase("norm", (1, 1), (1, 40), num_heads=4, dtype="bfloat16")),
    (2, True, AttentionCase("head_96", (1,), (70,), head_dim=96, num_heads=2)),
    (4, False, AttentionCase("window", (1,) * 3, (5, 20, 150), sliding_window=20)),
    (1, False, AttentionCase("window_one", (1, 1), (5, 64), sliding_window=1)),
    (4, False, AttentionCase("caps", (1, 1), (5, 90), 2, 1, logit_soft_cap=5.0, sinks=True)),
    (1, False, AttentionCase("sinks", (1,), (9,), block_size=256, sinks=True)),
)


@pytest.mark.parametrize(
    ("splits", "norm", "case"), INTERPRETED, ids=[case.name for *_, case in INTERPRETED]
)
def test_one_kernel_equals_its_two_halves(splits: int, norm: bool, case: AttentionCase) -> None:
    arrays, options = fused_arguments(case, norm)
    wanted = reference.rotate_write_attend(**arrays, **options, backend="reference")
    del arrays["slot_mapping"]
    config = DecodeConfig(block_kv=32, num_splits=splits, num_warps=4, num_stages=2)
    found = triton.rotate_write_attend(**arrays, **options, config=config, interpret=True)
    assert_equal(case, found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if c.decode_only], ids=lambda case: case.name)
def test_the_gpu_equals_the_reference(case: AttentionCase, norm: bool) -> None:
    arrays, options = fused_arguments(case, norm)
    wanted = reference.rotate_write_attend(**arrays, **options, backend="reference")
    call = jax.jit(functools.partial(api.rotate_write_attend, **options), donate_argnames="kv")
    found = call(**arrays)
    tolerance = {"float32": 1e-4, "bfloat16": 1e-2}
    real = len(case.seq_lens)
    for a, b in ((found[0][:real], wanted[0][:real]), (found[1], wanted[1])):
        a, b = (np.nan_to_num(np.asarray(x.astype(jnp.float32))) for x in (a, b))
        assert np.linalg.norm(a - b) <= tolerance[case.dtype] * max(np.linalg.norm(b), 1e-30)


def _lowered(head_dim: int, half: int, requests: int = 256, **options: Any) -> str:
    def call(qkv, cos, sin, kv, tables, lens, weight):
        rotation = HeadRotation(cos, sin, weight, weight, eps=1e-6)
        fixed = {"block_size": 16, "scale": 0.1}
        return triton.rotate_write_attend(qkv, rotation, kv, tables, lens, **fixed, **options)

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    shapes = (((requests, 8, 6, head_dim), bf16), ((requests, half), f32), ((requests, half), f32))
    shapes += (((2**14, 2, 8, head_dim), bf16), ((requests, 128), i32), ((requests,), i32))
    shapes += (((head_dim,), bf16),)
    return lower_for_cuda(call, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


@pytest.mark.parametrize(("requests", "kernels"), [(256, 1), (2, 2)])
def test_it_lowers_for_cuda_and_writes_its_own_input(requests: int, kernels: int) -> None:
    text = _lowered(128, 64, requests, sliding_window=100, logit_soft_cap=30.0)
    assert text.count("__gpu$xla.gpu.triton") == kernels
    assert "output_operand_aliases" in text


def test_a_partial_rotation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="head_dim 128 with 32 angles"):
        _lowered(128, 32)
