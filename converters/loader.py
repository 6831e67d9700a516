"""Fills a model's parameters from a checkpoint, tensor by tensor and slice by slice."""

import logging
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
from jaxllm.converters.load_plan import Fill, plan_load
from jaxllm.converters.name_map import NameMap, Op

__all__ = ["LoadError", "load_params"]

READ_AHEAD = 2  # parameters being read while one is placed
IN_FLIGHT_BYTES = 2**30  # handed to the device and not yet there

logger = logging.getLogger(__name__)


def load_params(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: Checkpoint,
    name_map: NameMap,
    config: Mapping[str, Any],
    *,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """The parameters of `abstract`, in its dtypes and on its shardings.

    Host memory holds a few tensors at a time (none for mapped files), device memory the parameters
    and at most IN_FLIGHT_BYTES or one parameter more.

    Args:
        abstract: dotted name to shape, dtype and sharding.
        config: the model's, as `tied_head.effective_config` gives it.
        progress: whether to show a bar.

    Raises:
        LoadError: the checkpoint does not fit; lists all that is missing, unexpected, mismatched.
    """
    if checkpoint.source == "dummy":
        return dummy_params(abstract)
    start = time.perf_counter()
    fills = plan_load(abstract, checkpoint, name_map, config)
    total = sum(fill.nbytes for fill in fills)
    placer = _Placer()
    params: dict[str, jax.Array] = {}
    in_flight: deque[Fill] = deque()
    waiting = 0
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for fill, tensors in _read(checkpoint, fills):
            params[fill.param] = placer.place(fill, tensors)
            in_flight.append(fill)
            waiting += fill.nbytes
            while in_flight and (waiting > IN_FLIGHT_BYTES or fill is fills[-1]):
                done = in_flight.popleft()
                params[done.param].block_until_ready()
                waiting -= done.nbytes
                bar.update(done.nbytes)
    seconds = time.perf_counter() - start
    logger.info("loaded %.2f GB in %.1f s (%.2f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)
    return {name: params[name] for name in abstract}


def _read(checkpoint: Checkpoint, fills: list[Fill]) -> Iterator[tuple[Fill, list[np.ndarray]]]:
    """Each fill with its tensors; the next ones are read (and dequantized) in threads meanwhile."""

    def read(fill: Fill) -> list[np.ndarray]:
        return [_narrow(checkpoint.read(name)) for name in fill.tensors]

    with ThreadPoolExecutor(READ_AHEAD) as pool:
        coming: deque[tuple[Fill, Future[list[np.ndarray]]]] = deque()
        try:
            for fill in fills:
                coming.append((fill, pool.submit(read, fill)))
                if len(coming) > READ_AHEAD:
                    ready, future = coming.popleft()
                    yield ready, future.result()
            while coming:
                ready, future = coming.popleft()
                yield ready, future.result()
        finally:
            for _, future in coming:
                future.cancel()


def _narrow(tensor: np.ndarray) -> np.ndarray:
    """float64 as float32, the widest that JAX takes by default."""
    return tensor.astype(np.float32) if tensor.dtype == np.float64 else tensor


class _Placer:
    """Puts tensors on devices in file layout and lets the device transpose, join and cast them."""

    def __init__(self) -> None:
        self._programs: dict[object, Callable[..., jax.Array]] = {}

    def place(self, fill: Fill, tensors: list[np.ndarray]) -> jax.Array:
        op, target = fill.op, fill.target
        sharding = target.sharding or SingleDeviceSharding(jax.devices()[0])
        as_is = op.order is None and len(tensors) == 1 and tensors[0].dtype == target.dtype
        # On the CPU JAX would share the mapped file's memory, which dies if the file is cut.
        copy = as_is and next(iter(sharding.device_set)).platform == "cpu"
        slabs = [
            _put(tensor.reshape(shape), _file_sharding(op, sharding, len(shape)), copy)
            for tensor, shape in zip(tensors, op.slabs(target.shape), strict=True)
        ]
        if as_is:
            return slabs[0]
        key = (op, target.dtype, sharding)
        if key not in self._programs:
            self._programs[key] = _program(op, target.dtype, sharding)
        return self._programs[key](*slabs)


def _put(slab: np.ndarray, sharding: Sharding, copy: bool) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        view = slab[index or ()]
        return np.array(view) if copy else view

    return jax.make_array_from_callback(slab.shape, sharding, part)


def _file_sharding(op: Op, sharding: Sharding, ndim: int) -> Sharding:
    """The parameter's sharding for the file layout: each device gets what it will keep."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec: list[Any] = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    axes = [spec[axis] for axis in op.order or range(ndim)]
    if len(op.widths) > 1:
        axes[op.axis] = None
    return NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def _program(op: Op, dtype: Any, sharding: Sharding) -> Callable[..., jax.Array]:
    def arrange(*slabs: jax.Array) -> jax.Array:
        whole = slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, op.axis)
        if op.order is not None:
            whole = whole.transpose(np.argsort(op.order))
        return whole.astype(dtype)

    return jax.jit(arrange, out_shardings=sharding)
