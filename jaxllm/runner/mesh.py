"""The device mesh. There always is one, also for a single device, so that code has one path."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PP_AXIS = "pp"
TP_AXIS = "tp"


def make_mesh(
    devices: Sequence[Any] | None = None,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> Mesh:
    """A (pp, tp) mesh over the first pp * tp devices.

    Raises:
        ValueError: fewer devices are there than the two sizes need.
    """
    devices = list(devices) if devices is not None else jax.devices()
    needed = tensor_parallel_size * pipeline_parallel_size
    if needed > len(devices):
        flags = f"--tensor-parallel-size {tensor_parallel_size}"
        if pipeline_parallel_size > 1:
            flags += f" times --pipeline-parallel-size {pipeline_parallel_size}"
        raise ValueError(f"{flags} needs {needed} devices, but JAX sees {len(devices)}.")
    return jax.make_mesh(
        (pipeline_parallel_size, tensor_parallel_size),
        (PP_AXIS, TP_AXIS),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[:needed],
    )


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """The mesh of each pipeline stage: the same axes, pp of size 1."""
    if mesh.shape[PP_AXIS] == 1:
        return [mesh]
    return [
        Mesh(mesh.devices[stage : stage + 1], mesh.axis_names, axis_types=mesh.axis_types)
        for stage in range(mesh.shape[PP_AXIS])
    ]


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def mesh_devices(sharding: NamedSharding) -> list[Any]:
    """The devices of a sharding, in the order of its mesh."""
    assert isinstance(sharding.mesh, Mesh)
    return list(sharding.mesh.devices.flat)


def upload(values: Any, shardings: Any) -> Any:
    """Host arrays on devices, as `jax.device_put` does it for the devices of one process.

    Over several processes that would compare the values among them, at 4 ms a call; here each puts
    its own, which are equal.
    """
    first = jax.tree.leaves(shardings)[0]
    if first.is_fully_addressable:
        return jax.device_put(values, shardings)
    return jax.tree.map(_upload_own, values, jax.tree.broadcast(shardings, values))


def _upload_own(value: Any, sharding: NamedSharding) -> jax.Array:
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
