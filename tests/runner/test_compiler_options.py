"""The options for XLA: this jaxlib knows each of them, and XLA_FLAGS wins."""

import jax
import jax.numpy as jnp
import pytest

from jaxllm.runner.compiler_options import (
    MANY_TOKENS,
    SEVERAL_DEVICES,
    gpu_options,
    has_room_for_sums,
    sum_scratch,
)


def test_which_steps_get_which_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    assert gpu_options(8, 1) is None
    assert gpu_options(64, 1) == MANY_TOKENS
    assert gpu_options(8, 2) == SEVERAL_DEVICES
    assert gpu_options(64, 2) == MANY_TOKENS | SEVERAL_DEVICES


def test_what_xla_flags_say_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true --xla_dump_to=folder")
    assert gpu_options(64, 1) is None
    assert gpu_options(64, 4) == SEVERAL_DEVICES


def test_scratch_of_sums_is_counted_in_whole_allocations() -> None:
    mib = 2**20
    assert sum_scratch([1], 3, 16) == 3 * 4 * mib
    assert sum_scratch([64, 256], 1, 2**14) == (4 + 10) * mib
    assert sum_scratch([257], 1, 2**14) == 0, "more than 4 MiB is NCCL's"


def test_an_8b_has_room_for_its_sums_and_a_70b_has_not() -> None:
    unmanaged = int(11.2 * 2**30)
    decode = [2, 4, 8, 16, 32, 48, 64]
    small = sum_scratch([*decode, 96, 128, 192, 256, *[2, 4, 8] * 2, 128, 256, 512], 65, 8192)
    assert has_room_for_sums(small, unmanaged)
    assert not has_room_for_sums(sum_scratch([*decode, 128, 256, 512], 161, 16384), unmanaged)


def test_xla_knows_every_option() -> None:
    lowered = jax.jit(jnp.sin).lower(jnp.zeros(2))
    lowered.compile(compiler_options=gpu_options(64, 2, sum_kernels=False))
    # The CPU's compiler reads them as the GPU's does and then has no use for them.
    lowered.compile(compiler_options=gpu_options(64, 2))
    for wrong in ({"xla_gpu_no_such": True}, dict.fromkeys(list(SEVERAL_DEVICES)[:1], "NO_KERNEL")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"No such compile|not a valid enum"):
            lowered.compile(compiler_options=wrong)
