"""What XLA is told when it compiles a step for GPUs, each with its reason.

An option that also stands in the variable XLA_FLAGS is left to it, so that any of them can be
tried without a change here.
"""

import os

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


def gpu_options(num_tokens: int, num_devices: int) -> Options | None:
    """The options for a step of `num_tokens` over `num_devices` GPUs; None if there are none."""
    options: Options = {}
    if num_tokens >= 64:
        options |= MANY_TOKENS
    if num_devices > 1:
        options |= SEVERAL_DEVICES
    given = {flag.split("=")[0].lstrip("-") for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if name not in given} or None
