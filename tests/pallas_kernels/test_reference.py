import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.paged_attention import api, reference
from jaxllm.pallas_kernels.paged_attention.arg_specs import CASES, AttentionCase, make_arguments
from tests.pallas_kernels.dense_attention import dense_attention

SMALL = AttentionCase("small", (1, 5), (9, 12))
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_equals_dense_attention(case: AttentionCase) -> None:
    arrays, options = make_arguments(case)
    attention = reference.decode_attention if case.decode_only else reference.ragged_attention
    out = np.asarray(jax.jit(functools.partial(attention, **options))(**arrays), np.float32)
    expected = dense_attention(case, arrays, options)
    np.testing.assert_allclose(out[: len(expected)], expected, atol=TOLERANCE[case.dtype])
    assert np.isfinite(out).all()


DECODE_AS_RAGGED = ("decode_lengths", "decode_window", "decode_sinks", "decode_all_padded")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in DECODE_AS_RAGGED], ids=lambda case: case.name
)
def test_ragged_serves_decode_cases(case: AttentionCase) -> None:
    arrays, options = make_arguments(case)
    real = len(case.seq_lens)
    query_start = jnp.minimum(jnp.arange(real + case.padded_requests + 1), real)
    ragged = jax.jit(functools.partial(reference.ragged_attention, **options))
    out = ragged(**arrays, query_start=query_start)
    expected = jax.jit(functools.partial(reference.decode_attention, **options))(**arrays)
    np.testing.assert_allclose(
        np.asarray(out[:real], np.float32),
        np.asarray(expected[:real], np.float32),
        atol=TOLERANCE[case.dtype],
    )


def test_wide_block_tables_change_nothing() -> None:
    arrays, options = make_arguments(SMALL)
    wide = jnp.pad(arrays["block_tables"], ((0, 0), (0, 500)), constant_values=10**6)
    out = reference.ragged_attention(**arrays, **options)
    widened = reference.ragged_attention(**{**arrays, "block_tables": wide}, **options)
    np.testing.assert_array_equal(out, widened)


def test_result_has_the_dtype_of_the_query() -> None:
    arrays, options = make_arguments(SMALL)
    arrays["q"] = arrays["q"].astype(jnp.bfloat16)
    assert reference.ragged_attention(**arrays, **options).dtype == jnp.bfloat16


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_api_serves_on_the_cpu(backend: str) -> None:
    arrays, options = make_arguments(SMALL)
    out = api.ragged_attention(**arrays, **options, backend=backend)
    np.testing.assert_array_equal(out, reference.ragged_attention(**arrays, **options))
    del arrays["query_start"]
    arrays["q"] = arrays["q"][:2]
    out = api.decode_attention(**arrays, **options, backend=backend)
    np.testing.assert_array_equal(out, reference.decode_attention(**arrays, **options))


def test_unknown_backend_is_named() -> None:
    arrays, options = make_arguments(SMALL)
    with pytest.raises(ValueError, match="auto, reference, triton, mosaic_gpu; got 'cuda'"):
        api.ragged_attention(**arrays, **options, backend="cuda")


def _refuse(*args: object, **kwargs: object) -> jax.Array:
    raise NotImplementedError("head dim 64")


def test_auto_passes_over_a_backend_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = make_arguments(SMALL)
    chosen = []

    def implementation(backend: str, operation: str):
        chosen.append(backend)
        return getattr(reference, operation) if backend == "reference" else _refuse

    monkeypatch.setattr(api, "_implementation", implementation)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    out = api.ragged_attention(**arrays, **options)
    np.testing.assert_array_equal(out, reference.ragged_attention(**arrays, **options))
    assert chosen == ["mosaic_gpu", "triton", "reference"]


def test_a_chosen_backend_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = make_arguments(SMALL)
    monkeypatch.setattr(api, "_implementation", lambda backend, operation: _refuse)
    with pytest.raises(NotImplementedError, match="triton: head dim 64"):
        api.ragged_attention(**arrays, **options, backend="triton")
