"""The time of one sum over the devices, compiled as the engine compiles a step."""

import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.runner.compiler_options import gpu_options
from jaxllm.runner.mesh import TP_AXIS, make_mesh

LINKS = 64
"""Sums in the chain whose time is measured."""


def chain_seconds(devices: int, shape: tuple[int, int], sums: bool, repeats: int) -> float:
    """Seconds of one link in a chain of products, each summed over the devices if `sums`.

    Args:
        shape: of what every device holds, in bfloat16: [tokens, hidden size].
        repeats: of which the fastest counts.
    """
    mesh = make_mesh(tensor_parallel_size=devices)
    whole = PartitionSpec()
    split = PartitionSpec(TP_AXIS) if sums else whole

    def chain(x: jax.Array, factor: jax.Array) -> jax.Array:
        for _ in range(LINKS):  # each needs the one before, and its terms differ by device
            y = x * factor
            x = jax.lax.psum(y, TP_AXIS) if sums else jax.lax.optimization_barrier(y)
        return x

    spread = jax.shard_map(chain, mesh=mesh, in_specs=(whole, split), out_specs=whole)
    x = jax.device_put(jnp.ones(shape, jnp.bfloat16), NamedSharding(mesh, whole))
    factors = jnp.full(devices if sums else 1, 1 / devices, jnp.bfloat16)
    factors = jax.device_put(factors, NamedSharding(mesh, split))
    gpu = mesh.devices.flat[0].platform == "gpu"
    options = gpu_options(shape[0], devices) if gpu else None
    program = jax.jit(spread).lower(x, factors).compile(compiler_options=options)
    y = program(x, factors)
    y.block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(10):
            y = program(y, factors)
        y.block_until_ready()
        times.append((time.perf_counter() - start) / (10 * LINKS))
    return min(times)
