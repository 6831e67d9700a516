import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.paged_attention import (
    mosaic_gpu,
    mosaic_ragged,
    query_tiles,
    reference,
)
from jaxllm.pallas_kernels.paged_attention.arg_specs import CASES, AttentionCase, make_arguments
from jaxllm.pallas_kernels.paged_attention.configs import MosaicConfig
from jaxllm.pallas_kernels.paged_attention.softmax import Scoring
from tests.pallas_kernels.cross_lowering import attention_shapes, lower_for_cuda

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
KERNEL = "mosaic_gpu_v2"

INTERPRETED = (
    # Three items on two programs, each with a tail; a first row that is no multiple of 8; padding.
    AttentionCase(
        "mixed", (5, 20), (70, 20), num_heads=2, num_kv_heads=1, dtype="bfloat16", padded_tokens=3
    ),
    AttentionCase(
        "all_options",
        (66,),
        (150,),
        num_heads=1,
        num_kv_heads=1,
        block_size=32,
        sliding_window=40,
        logit_soft_cap=5.0,
        sinks=True,
        dtype="bfloat16",
    ),
)


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    found, wanted = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pallas' interpreter of Mosaic kernels, with threads and barriers.

    jax 0.11.2's does not know two things that the kernel needs: the effect of an accumulator that
    spans a loop, and the product that adds to one, which a plain dot stands in for here.
    """
    from jax._src import effects
    from jax._src.pallas.mosaic_gpu import core

    effects.lowerable_effects.add_type(core._WGMMAPipelineEffect)
    effects.control_flow_allowed_effects.add_type(core._WGMMAPipelineEffect)
    monkeypatch.setattr(
        mosaic_ragged,
        "_add_product",
        lambda acc, a, b: acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32),
    )
    monkeypatch.setattr(mosaic_ragged, "attend_tiles", inspect.unwrap(mosaic_ragged.attend_tiles))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_interpreted_kernel_equals_reference(case: AttentionCase) -> None:
    arrays, options = make_arguments(case)
    expected = reference.ragged_attention(**arrays, **options)
    num_tokens = arrays["q"].shape[0]
    tiles, used = query_tiles.query_tiles(
        arrays["seq_lens"],
        arrays["query_start"],
        num_tokens=num_tokens,
        tile_tokens=mosaic_ragged.TILE_TOKENS,
        align=mosaic_ragged.ALIGN,
    )
    sinks = options.pop("sinks", None)
    out = mosaic_ragged.attend_tiles(
        jnp.pad(arrays["q"], ((0, -num_tokens % mosaic_ragged.ALIGN), (0, 0), (0, 0))),
        arrays["kv"],
        arrays["block_tables"],
        tiles,
        used,
        sinks,
        num_tokens=num_tokens,
        scoring=Scoring(**options),
        config=MosaicConfig(block_kv=64, num_stages=2, num_programs=2),
    )
    real = sum(case.query_lens)
    assert relative_error(out[:real], expected[:real]) <= 1e-2
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.decode_only], ids=lambda case: case.name
)
def test_kernel_equals_reference_on_the_gpu(case: AttentionCase, head_dim: int) -> None:
    case = dataclasses.replace(case, dtype="bfloat16", head_dim=head_dim)
    arrays, options = make_arguments(case)
    expected = reference.ragged_attention(**arrays, **options)
    out = jax.jit(functools.partial(mosaic_gpu.ragged_attention, **options))(**arrays)
    real = sum(case.query_lens)
    assert relative_error(out[:real], expected[:real]) <= 1e-2
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"head_dim": 64, "block_size": 8}, {"sliding_window": 100}),
        ({"head_dim": 256, "block_size": 256}, {"logit_soft_cap": 30.0}),
        ({"tokens": 300, "requests": 1, "block_size": 64}, {"sinks": True}),
        ({"dtype": jnp.float16, "heads": 40, "kv_heads": 8}, {}),
    ],
    ids=["plain", "window", "soft_cap", "sinks", "float16"],
)
def test_kernel_lowers_for_cuda(shape: dict[str, Any], options: dict[str, Any]) -> None:
    shapes = attention_shapes(**shape)
    fixed = {"block_size": shape.get("block_size", 16), "scale": 0.1, **options}
    with_sinks = fixed.pop("sinks", False)

    def attend(q, kv, tables, lens, starts, sinks):
        given = sinks if with_sinks else None
        return mosaic_gpu.ragged_attention(q, kv, tables, lens, starts, sinks=given, **fixed)

    assert lower_for_cuda(attend, *shapes).count(KERNEL) == 1


def test_call_sites_share_one_kernel() -> None:
    q, kv, tables, lens, starts, _ = attention_shapes()

    def layers(q, kv, tables, lens, starts):
        for _ in range(4):
            q = mosaic_gpu.ragged_attention(
                q + 1, kv, tables, lens, starts, block_size=16, scale=0.1
            )
        return q

    assert lower_for_cuda(layers, q, kv, tables, lens, starts).count(KERNEL) == 1


@pytest.mark.parametrize(
    ("shape", "block_size", "reason"),
    [
        ({"head_dim": 96}, 16, "head_dim 96"),
        ({"dtype": jnp.float32}, 16, "float32: wgmma takes 16-bit"),
        ({}, 24, "block_size 24"),
        ({}, 4, "block_size 4"),
    ],
)
def test_refuses_what_it_cannot_serve(shape: dict[str, Any], block_size: int, reason: str) -> None:
    q, kv, tables, lens, starts, _ = attention_shapes(**shape)
    attention = functools.partial(mosaic_gpu.ragged_attention, block_size=block_size, scale=0.1)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(attention, q, kv, tables, lens, starts)
