import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.paged_attention import configs, reference, triton
from jaxllm.pallas_kernels.paged_attention.arg_specs import CASES, AttentionCase, make_arguments
from jaxllm.pallas_kernels.paged_attention.configs import (
    DecodeConfig,
    RaggedConfig,
    decode_config,
    num_splits,
)
from tests.pallas_kernels.cross_lowering import attention_shapes, lower_for_cuda

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
KERNEL = "__gpu$xla.gpu.triton"

# The interpreter is slow: these cover each argument and each rule about shapes once.
INTERPRETED_DECODE = (
    (1, AttentionCase("one_block_of_256", (1,), (9,), block_size=256, sinks=True)),
    (1, AttentionCase("group_of_three", (1, 1), (33, 70), num_heads=3, num_kv_heads=1)),
    (1, AttentionCase("bf16_head_128", (1, 1), (33, 1), head_dim=128, dtype="bfloat16")),
    (4, AttentionCase("lengths", (1,) * 4, (1, 32, 33, 150), padded_requests=2, block_size=8)),
    (4, AttentionCase("window", (1,) * 3, (5, 20, 150), sliding_window=20, padded_requests=1)),
    (4, AttentionCase("caps", (1, 1), (5, 90), 2, 1, logit_soft_cap=5.0, sinks=True)),
    (4, AttentionCase("head_96_mha", (1,), (70,), head_dim=96, num_heads=2, num_kv_heads=2)),
)
INTERPRETED_RAGGED = (
    AttentionCase("mixed", (1, 9, 1), (40, 9, 1), num_heads=4, padded_requests=1, padded_tokens=3),
    AttentionCase("caps", (9, 1), (20, 3), 2, 1, logit_soft_cap=5.0, sinks=True),
    AttentionCase("window", (12, 1), (70, 33), sliding_window=20, num_heads=3, num_kv_heads=1),
    AttentionCase("one_request", (7,), (23,), head_dim=96, block_size=8, dtype="bfloat16"),
)


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    found, wanted = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


def assert_equals_reference(case: AttentionCase, operation: str, **kwargs: Any) -> None:
    arrays, options = make_arguments(case)
    expected = jax.jit(functools.partial(getattr(reference, operation), **options))(**arrays)
    out = getattr(triton, operation)(**arrays, **options, **kwargs)
    real = sum(case.query_lens)
    assert relative_error(out[:real], expected[:real]) <= TOLERANCE[case.dtype]
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize(
    ("splits", "case"), INTERPRETED_DECODE, ids=[case.name for _, case in INTERPRETED_DECODE]
)
def test_decode_equals_reference(splits: int, case: AttentionCase) -> None:
    config = DecodeConfig(block_kv=32, num_splits=splits, num_warps=4, num_stages=2)
    assert_equals_reference(case, "decode_attention", config=config, interpret=True)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_of_padded_requests_is_zero(splits: int) -> None:
    case = AttentionCase("padded", (1,), (9,), padded_requests=2, sinks=True)
    arrays, options = make_arguments(case)
    config = DecodeConfig(block_kv=16, num_splits=splits, num_warps=4, num_stages=2)
    out = triton.decode_attention(**arrays, **options, config=config, interpret=True)
    assert not np.asarray(out[1:]).any()


@pytest.mark.parametrize("case", INTERPRETED_RAGGED, ids=lambda case: case.name)
def test_ragged_equals_reference(case: AttentionCase) -> None:
    config = RaggedConfig(block_q=32, block_kv=32, num_warps=4, num_stages=2)
    assert_equals_reference(case, "ragged_attention", config=config, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_equal_reference_on_the_gpu(case: AttentionCase, dtype: str) -> None:
    arrays, options = make_arguments(case)
    arrays = {k: v.astype(dtype) if v.dtype == case.dtype else v for k, v in arrays.items()}
    operation = "decode_attention" if case.decode_only else "ragged_attention"
    expected = getattr(reference, operation)(**arrays, **options)
    out = jax.jit(functools.partial(getattr(triton, operation), **options))(**arrays)
    real = sum(case.query_lens)
    limit = 1e-4 if dtype == "float32" else 1e-2
    assert relative_error(out[:real], expected[:real]) <= limit
    assert np.isfinite(np.asarray(out, np.float32)).all()


ALL_OPTIONS = {"sliding_window": 100, "logit_soft_cap": 30.0, "sinks": True}


@pytest.mark.parametrize(
    ("device", "head_dim", "dtype", "options"),
    [
        ("NVIDIA H200", 128, jnp.bfloat16, {}),
        ("NVIDIA H200", 128, jnp.bfloat16, ALL_OPTIONS),
        ("NVIDIA H200", 64, jnp.float16, {}),
        ("NVIDIA H200", 96, jnp.float32, ALL_OPTIONS),
        ("NVIDIA H200", 256, jnp.bfloat16, {}),
        ("NVIDIA A100", 128, jnp.bfloat16, {}),
        ("NVIDIA L4", 128, jnp.bfloat16, ALL_OPTIONS),
    ],
)
def test_kernels_lower_for_cuda(
    device: str, head_dim: int, dtype: jax.typing.DTypeLike, options: dict[str, Any]
) -> None:
    q, kv, tables, lens, starts, sinks = attention_shapes(head_dim=head_dim, dtype=dtype)
    fixed = {"block_size": 16, "scale": 0.1} | {k: v for k, v in options.items() if k != "sinks"}

    def both(q, kv, tables, lens, starts, sinks):
        given = sinks if "sinks" in options else None
        out = triton.decode_attention(q[:16], kv, tables, lens, sinks=given, **fixed)
        more = triton.ragged_attention(q, kv, tables, lens, starts, sinks=given, **fixed)
        return out, more

    text = lower_for_cuda(both, q, kv, tables, lens, starts, sinks, device=device)
    assert text.count(KERNEL) >= 3


def test_call_sites_share_one_kernel() -> None:
    q, kv, tables, lens, *_ = attention_shapes(tokens=256, requests=256)

    def layers(q, kv, tables, lens):
        for _ in range(4):
            q = triton.decode_attention(q + 1, kv, tables, lens, block_size=16, scale=0.1)
        return q

    assert lower_for_cuda(layers, q, kv, tables, lens).count(KERNEL) == 1


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert num_splits(programs=8, tiles=128) == 64
    assert num_splits(programs=128, tiles=32) == 4
    assert num_splits(programs=512, tiles=64) == 1
    assert num_splits(programs=4096, tiles=64) == 1
    assert num_splits(programs=1, tiles=1) == 1


def test_decode_config_splits_by_batch() -> None:
    many = decode_config(256, 8, 128, 4096, jnp.bfloat16)
    one = decode_config(1, 8, 128, 4096, jnp.bfloat16)
    assert many.num_splits == 1
    assert one.num_splits > 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 320}, "head_dim 320"),
        ({"head_dim": 100}, "head_dim 100"),
        ({"dtype": jnp.int8}, "int8"),
    ],
)
def test_refuses_what_it_cannot_serve(change: dict[str, Any], reason: str) -> None:
    q, kv, tables, lens, *_ = attention_shapes(tokens=16, **change)
    attention = functools.partial(triton.decode_attention, block_size=16, scale=0.1)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(attention, q, kv, tables, lens)


def test_refuses_queries_of_another_dtype() -> None:
    q, kv, tables, lens, *_ = attention_shapes(tokens=16)
    attention = functools.partial(triton.decode_attention, block_size=16, scale=0.1)
    with pytest.raises(NotImplementedError, match="queries in float32, cache in bfloat16"):
        jax.eval_shape(attention, jax.ShapeDtypeStruct(q.shape, jnp.float32), kv, tables, lens)


def test_smaller_gpus_get_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = decode_config(64, 8, 128, 4096, jnp.bfloat16)
    monkeypatch.setattr(configs, "_shared_kib", lambda: 99)
    ada = decode_config(64, 8, 128, 4096, jnp.bfloat16)
    assert ada.num_stages < hopper.num_stages


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_triton_has_sizes_for_every_gpu(
    monkeypatch: pytest.MonkeyPatch, shared_kib: int, dtype: jax.typing.DTypeLike, head_dim: int
) -> None:
    monkeypatch.setattr(configs, "_shared_kib", lambda: shared_kib)
    assert configs.ragged_config(head_dim, dtype).block_kv >= 16
    assert decode_config(1, 8, head_dim, 4096, dtype).block_kv >= 16
