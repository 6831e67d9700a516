"""What XLA is told when it compiles a step for GPUs, each with its reason.

An option that also stands in the variable XLA_FLAGS is left to it, so that any of them can be
tried without a change here.
"""

import os
from collections.abc import Iterable

Options = dict[str, bool | str]

MANY_TOKENS: Options = {
    # XLA's Triton matrix products win at a few rows and lose from 64 on (an H200 decodes
    # Llama-3.1-8B at 256 in 13.9 ms without them, 14.5 ms with them); trying them out is also most
    # of the compile time.
    "xla_gpu_enable_triton_gemm": False,
}
"""For steps of 64 tokens and more."""

SEVERAL_DEVICES: Options = {
    # A layer's two sums are small in decode (16 KiB for a request of 8192 bfloat16, 4 MiB for 256)
    # and each waits for the one before, so their latency counts: 19 to 25 us with NCCL on eight
    # H100, as others report, and 6 to 17 us with a kernel that reads the peers' memory. jaxlib
    # 0.11.2 takes its own such kernel by default, for small sums over a power of two of devices of
    # one host; said here so that no later version stops.
    "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE",
    # It moves work between the start and the end of a sum, but here every operation needs the sum
    # before it: there is nothing to move, and a sum that starts and ends at once needs no second
    # stream and no events. It also keeps more arrays alive.
    "xla_gpu_enable_latency_hiding_scheduler": False,
    # Registered buffers serve NCCL's multicast (NVLS), which stays off (engine/startup.py).
    "xla_gpu_enable_nccl_user_buffers": False,
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": False,
}
"""For steps that several devices share.

xla_gpu_enable_command_buffer stays as XLA has it, without COLLECTIVES: a graph that holds sums was
reported slower, and to hang."""


NCCL_SUMS: Options = {"xla_gpu_experimental_use_collective_kernels": ""}
"""For devices without room for the kernels' scratch: no operation takes a kernel."""

MIB = 1 << 20


def gpu_options(num_tokens: int, num_devices: int, *, sum_kernels: bool = True) -> Options | None:
    """The options for a step of `num_tokens` over `num_devices` GPUs; None if there are none.

    Args:
        sum_kernels: whether the sums may take XLA's own kernels; see `sum_scratch`.
    """
    options: Options = {}
    if num_tokens >= 64:
        options |= MANY_TOKENS
    if num_devices > 1:
        options |= SEVERAL_DEVICES if sum_kernels else SEVERAL_DEVICES | NCCL_SUMS
    given = {flag.split("=")[0].lstrip("-") for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if name not in given} or None


def sum_scratch(steps: Iterable[int], sums: int, token_bytes: int) -> int:
    """Bytes a GPU that XLA's kernels for sums over devices keep, beside what JAX manages.

    Each sum of each program has its own signals and two copies of what is summed, in allocations
    of 2 MiB; sums of more than 4 MiB go to NCCL.

    Args:
        steps: tokens in each program's step.
        sums: of a step.
        token_bytes: of what is summed of a token.
    """
    sizes = (tokens * token_bytes for tokens in steps)
    each = (2 * MIB + -(-2 * size // (2 * MIB)) * 2 * MIB for size in sizes if size <= 4 * MIB)
    return sums * sum(each)


def has_room_for_sums(scratch: int, unmanaged: float) -> bool:
    """Whether `scratch` fits into the GPU's memory that is left to others than JAX.

    CUDA, NCCL and the programs' code lie there too. Seen on two H200s with 11.2 GiB of it: with
    5.8 GiB an engine started, with 7.0 GiB it failed.
    """
    return scratch <= 0.55 * unmanaged
