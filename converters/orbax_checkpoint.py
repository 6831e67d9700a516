"""Converted folders: a model's own parameter tree, written and restored through Orbax.

A folder holds config.json and the tokenizer's files as any checkpoint, the arrays under `params/`
(OCDBT, uncompressed, in chunks that follow the sharding), and a manifest that is written last: a
folder without it was not finished.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from tqdm import tqdm

from jaxllm.converters.errors import CheckpointError, LoadError
from jaxllm.converters.finite import FiniteScan
from jaxllm.converters.host_memory import freed_at_once
from jaxllm.converters.load_report import LoadReport
from jaxllm.converters.name_map import NameMap
from jaxllm.converters.orbax_manifest import MANIFEST_FILE, PARAMS_FOLDER, Manifest, read_manifest
from jaxllm.converters.orbax_shards import Spread, spread_of
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.safetensors_folder import Check, read_config, read_generation_config

CASTABLE = ("float64", "float32", "float16", "bfloat16")
# Small enough that a device's slice of a chunked matrix needs little beyond itself to be read.
CHUNK_BYTES = 2**24

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class OrbaxCheckpoint:
    """A Checkpoint whose tensors are the model's parameters, under the model's dotted names."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    manifest: Manifest
    source: Literal["orbax"] = "orbax"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.manifest.parameters

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The parameter, or its part `index`; the whole of it is read in either case."""
        import orbax.checkpoint as ocp

        if name not in self.tensors:
            raise KeyError(f"{self.path} has no parameter {name!r}")
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        return _restore(self.path, {name: 0}, as_numpy)[name][index or ()]


def open_orbax(path: Path, check: Check | None = None) -> OrbaxCheckpoint:
    """Opens a folder that `write_orbax` finished.

    Args:
        check: sees the manifest and the arrays' files before any is used.

    Raises:
        CheckpointError: the manifest is missing or broken, or a file is not as it says.
    """
    manifest = read_manifest(path)
    if check is not None:
        check([path / name for name in (MANIFEST_FILE, *manifest.files)])
    return OrbaxCheckpoint(path, read_config(path), read_generation_config(path), manifest)


def write_orbax(
    params: Mapping[str, jax.Array], folder: Path, *, architecture: str, dtype: str
) -> None:
    """Writes `params/` and then the manifest into `folder`.

    The chunks follow the arrays' shardings: slices for that many devices, or fewer, are read
    without their neighbours.

    Args:
        params: dotted name to array.
    """
    # Imported here: it takes a second, and no other format needs it.
    import orbax.checkpoint as ocp

    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in params}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            (folder / PARAMS_FOLDER).absolute(),
            args=ocp.args.PyTreeSave(dict(params), save_args=save_args),
        )
    files = sorted(file for file in (folder / PARAMS_FOLDER).rglob("*") if file.is_file())
    manifest = Manifest(
        architecture,
        dtype,
        {name: TensorInfo(x.shape, np.dtype(x.dtype), x.nbytes) for name, x in params.items()},
        {name: _partition(array) for name, array in params.items()},
        {file.relative_to(folder).as_posix(): file.stat().st_size for file in files},
    )
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def restore_params(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: OrbaxCheckpoint,
    name_map: NameMap | None = None,
    *,
    progress: bool = True,
    finite: bool = False,
) -> dict[str, jax.Array]:
    """The parameters of `abstract`, in its dtypes; each device reads its own shards only.

    What is read at one time takes no more host memory than twice the largest parameter.

    Args:
        name_map: the model's on its mesh; says which parameters are repeated or padded there.

    Raises:
        LoadError: the folder's parameters are not those of the model, or with `finite` some hold
            NaN or infinity; lists all.
        CheckpointError: the arrays cannot be read.
    """
    import orbax.checkpoint as ocp

    start = time.perf_counter()
    spreads = {name: spread_of(name, leaf.shape, name_map) for name, leaf in abstract.items()}
    _check(abstract, checkpoint, spreads)
    args = dict(ocp.checkpoint_utils.construct_restore_args(dict(abstract)))
    scan = FiniteScan(checkpoint)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    params: dict[str, jax.Array] = {}
    with (
        freed_at_once(),
        tqdm(
            total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
        ) as bar,
    ):
        for names in _groups(checkpoint.tensors):
            whole = [name for name in names if spreads[name].stored_shape == abstract[name].shape]
            wanted = {name: abstract[name] for name in whole}
            if wanted:
                params |= _restore(checkpoint.path, wanted, {name: args[name] for name in whole})
            for name in set(names).difference(whole):
                params[name] = _read_spread(checkpoint.path, name, abstract[name], spreads[name])
            jax.block_until_ready([params[name] for name in names])
            counts = {name: int(_count_not_finite(params[name])) for name in names if finite}
            scan.found |= {name: count for name, count in counts.items() if count}
            bar.update(sum(checkpoint.tensors[name].nbytes for name in names))
    scan.check()
    seconds = time.perf_counter() - start
    logger.info("loaded %.2f GB in %.1f s (%.2f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)
    return {name: params[name] for name in abstract}


@jax.jit
def _count_not_finite(array: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(array))


def _partition(array: jax.Array) -> list[Any]:
    spec = tuple(array.sharding.spec) if isinstance(array.sharding, NamedSharding) else ()
    return [*spec, *[None] * (array.ndim - len(spec))]


def _groups(tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """Names in order, in groups that together are no larger than the largest."""
    limit = max((info.nbytes for info in tensors.values()), default=0)
    names: list[str] = []
    size = 0
    for name, info in tensors.items():
        if names and size + info.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += info.nbytes
    if names:
        yield names


def _restore(path: Path, item: dict[str, Any], restore_args: dict[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
    with (
        _as_checkpoint_error(path),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        return checkpointer.restore((path / PARAMS_FOLDER).absolute(), args=args)


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax and TensorStore raise whatever their layers do
        reason = str(error.__cause__ or error).split(" [")[0].split("\n")[0]
        raise CheckpointError(
            f"{(path / PARAMS_FOLDER).absolute()} cannot be read: {reason}. Its files may be "
            f"damaged: convert the model again."
        ) from error


def _read_spread(path: Path, name: str, target: jax.ShapeDtypeStruct, spread: Spread) -> jax.Array:
    """A parameter whose shape differs from the stored one's: each device's part of it."""
    import tensorstore  # comes with Orbax, which reads whole shapes only

    base = {"driver": "file", "path": f"{(path / PARAMS_FOLDER).absolute()}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    with _as_checkpoint_error(path):
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}, read=True).result()

        def shard(index: Any) -> np.ndarray:
            return spread.read(lambda part: array[part].read().result(), index).astype(target.dtype)

        return jax.make_array_from_callback(target.shape, target.sharding, shard)


def _check(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: OrbaxCheckpoint,
    spreads: Mapping[str, Spread],
) -> None:
    report = LoadReport()
    for name, target in abstract.items():
        info = checkpoint.tensors.get(name)
        dtype = np.dtype(target.dtype)
        if info is None:
            report.missing.append((name, str(list(target.shape))))
        elif info.shape != spreads[name].stored_shape:
            detail = f"is {list(info.shape)}, the model needs {list(spreads[name].stored_shape)}"
            report.mismatched.append((name, detail))
        elif info.dtype != dtype and not {info.dtype.name, dtype.name} <= set(CASTABLE):
            report.mismatched.append((name, f"is {info.dtype}, the model needs {dtype}"))
        _check_mesh(name, target, report)
    for name, info in checkpoint.tensors.items():
        if name not in abstract:
            report.unexpected.append((name, f"{list(info.shape)} {info.dtype}"))
    if not report:
        return
    report.hints.append(
        f"The folder was converted from a {checkpoint.manifest.architecture}: its config.json "
        f"must be the one that jaxllm.convert wrote."
    )
    raise LoadError(report.text(checkpoint.path))


def _check_mesh(name: str, target: jax.ShapeDtypeStruct, report: LoadReport) -> None:
    if not isinstance(target.sharding, NamedSharding):
        return
    try:
        target.sharding.shard_shape(target.shape)
    except ValueError:
        mesh = dict(target.sharding.mesh.shape)
        detail = f"{list(target.shape)} as {target.sharding.spec} over {mesh}"
        report.indivisible.append((name, detail))
