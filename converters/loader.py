"""Fills a model's parameters from a checkpoint, tensor by tensor and slice by slice."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from tqdm import tqdm

from jaxllm.converters.checkpoint import Checkpoint
from jaxllm.converters.dummy import dummy_params
from jaxllm.converters.errors import LoadError
from jaxllm.converters.finite import FiniteScan
from jaxllm.converters.host_fill import fill_on_host, slab_part
from jaxllm.converters.host_memory import freed_at_once
from jaxllm.converters.load_plan import Fill, plan_load
from jaxllm.converters.name_map import NameMap
from jaxllm.converters.orbax_checkpoint import OrbaxCheckpoint, restore_params
from jaxllm.converters.upload import upload

__all__ = ["LoadError", "load_params"]

# A thread copies about 5 GB/s to a GPU and eight 27 GB/s (H200), whatever the tensors' sizes.
THREADS = max(2, min(8, os.cpu_count() or 1))
IN_FLIGHT_BYTES = 2**29

Program = Callable[..., jax.Array]
Programs = dict[object, Future[Program]]

logger = logging.getLogger(__name__)


def load_params(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: Checkpoint,
    name_map: NameMap,
    config: Mapping[str, Any],
    *,
    progress: bool = True,
    finite: bool = False,
) -> dict[str, jax.Array]:
    """The parameters of `abstract`, in its dtypes and on its shardings.

    At any time at most IN_FLIGHT_BYTES or one parameter are on their way: so much host memory is
    needed (none for mapped files), and so much device memory beside the parameters. On the CPU
    nothing is beside them but some rows of what is dequantized.

    Args:
        abstract: dotted name to shape, dtype and sharding.
        config: the model's, as `tied_head.effective_config` gives it.
        progress: whether to show a bar.
        finite: whether to look for NaN and infinity in all that is read.

    Raises:
        LoadError: the checkpoint does not fit; lists all that is missing, unexpected, mismatched,
            or not finite.
    """
    if checkpoint.source == "dummy":
        return dummy_params(abstract)
    if isinstance(checkpoint, OrbaxCheckpoint):
        return restore_params(abstract, checkpoint, name_map, progress=progress, finite=finite)
    start = time.perf_counter()
    fills = plan_load(abstract, checkpoint, name_map, config)
    scan = FiniteScan(checkpoint) if finite else None
    total = sum(fill.nbytes for fill in fills)
    params: dict[str, jax.Array] = {}
    with (
        freed_at_once(),
        ThreadPoolExecutor(THREADS) as pool,
        tqdm(
            total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
        ) as bar,
    ):
        programs = _compile_all(pool, fills)
        for fill, param in _place_all(pool, fills, scan or checkpoint, programs):
            params[fill.param] = param
            bar.update(fill.nbytes)
    if scan is not None:
        scan.check()
    seconds = time.perf_counter() - start
    logger.info("loaded %.2f GB in %.1f s (%.2f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)
    return {name: params[name] for name in abstract}


def _place_all(
    pool: ThreadPoolExecutor, fills: list[Fill], checkpoint: Checkpoint, programs: Programs
) -> Iterator[tuple[Fill, jax.Array]]:
    """Each fill with its parameter, once it is on its devices."""
    running: deque[tuple[Fill, Future[jax.Array]]] = deque()
    held = 0
    try:
        for fill in fills:
            while running and held + fill.host_bytes > IN_FLIGHT_BYTES:
                done, future = running.popleft()
                yield done, future.result()
                held -= done.host_bytes
            running.append((fill, pool.submit(_place, fill, checkpoint, programs)))
            held += fill.host_bytes
        while running:
            done, future = running.popleft()
            yield done, future.result()
    finally:
        for _, future in running:
            future.cancel()


def _place(fill: Fill, checkpoint: Checkpoint, programs: Programs) -> jax.Array:
    """Reads (and dequantizes) the tensors and puts them on the devices in file layout, where they
    are transposed, joined and cast."""
    if _is_on_host(fill):
        return fill_on_host(fill, checkpoint).block_until_ready()
    program = programs.get(_program_key(fill))
    slabs = [
        _put(checkpoint.read(name), slab, fill, number)
        for number, (name, slab) in enumerate(zip(fill.tensors, _slabs(fill), strict=True))
    ]
    param = slabs[0] if program is None else program.result()(*slabs)
    return param.block_until_ready()


def _is_on_host(fill: Fill) -> bool:
    """Whether the devices use the host's memory.

    There nothing may be put as it is: JAX would share the mapped file's memory, which dies if the
    file is cut.
    """
    return next(iter(_sharding(fill).device_set)).platform == "cpu"


def _put(tensor: np.ndarray, slab: jax.ShapeDtypeStruct, fill: Fill, number: int) -> jax.Array:
    tensor = tensor.reshape(fill.op.stored_slabs(fill.target.shape)[number])
    repeats, padding = fill.op.repeats(number), fill.op.padding

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * tensor.ndim
        values = np.asarray(slab_part(tensor, index, repeats), slab.dtype)
        if padding:
            missing = len(range(slab.shape[0])[index[0]]) - len(values)
            values = np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))
        return values

    assert slab.sharding is not None
    return upload(slab.shape, slab.sharding, part)


def _slabs(fill: Fill) -> list[jax.ShapeDtypeStruct]:
    """What goes to the devices: the tensors in file layout, each device's part of the parameter."""
    sharding = _sharding(fill)
    if isinstance(sharding, NamedSharding):
        op, ndim = fill.op, len(fill.target.shape)
        spec: list[Any] = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
        axes = [spec[axis] for axis in op.order or range(ndim)]
        if len(op.widths) > 1:
            axes[op.axis] = None
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*axes))
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in zip(fill.op.slabs(fill.target.shape), fill.dtypes, strict=True)
    ]


def _sharding(fill: Fill) -> Sharding:
    return fill.target.sharding or SingleDeviceSharding(jax.devices()[0])


def _program_key(fill: Fill) -> object:
    """Equal for parameters made alike; None for those that are the tensor as it is."""
    target = fill.target
    if fill.op.order is None and fill.dtypes == (target.dtype,):
        return None
    return fill.op, fill.dtypes, target.shape, target.dtype, target.sharding


def _compile_all(pool: ThreadPoolExecutor, fills: list[Fill]) -> Programs:
    """Starts compiling what arranges the slabs on the device, once for all equal parameters."""
    programs: Programs = {}
    for fill in fills:
        key = None if _is_on_host(fill) else _program_key(fill)
        if key is not None and key not in programs:
            programs[key] = pool.submit(_compile, fill)
    return programs


def _compile(fill: Fill) -> Program:
    op, dtype = fill.op, fill.target.dtype

    def arrange(*slabs: jax.Array) -> jax.Array:
        whole = slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, op.axis)
        if op.order is not None:
            whole = whole.transpose(np.argsort(op.order))
        return whole.astype(dtype)

    return jax.jit(arrange, out_shardings=_sharding(fill)).lower(*_slabs(fill)).compile()
