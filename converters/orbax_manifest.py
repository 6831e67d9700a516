"""The manifest of a converted folder: what must be there for the folder to be whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.safetensors_folder import read_json

MANIFEST_FILE = "jaxllm_orbax.json"
PARAMS_FOLDER = "params"
# Counts the layouts of the parameter tree too: names, fusing and order of axes.
FORMAT_VERSION = 1

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Manifest:
    """What a converted folder holds.

    Attributes:
        partitions: of each parameter, the mesh axis that splits each of its axes.
        files: path below the folder to size in bytes, of all files that hold the arrays.
    """

    architecture: str
    dtype: str
    parameters: dict[str, TensorInfo]
    partitions: dict[str, list[Any]]
    files: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The file's contents, which `read_manifest` takes back."""
        return {
            "format_version": FORMAT_VERSION,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "parameters": {
                name: {
                    "shape": list(info.shape),
                    "dtype": info.dtype.name,
                    "partition": self.partitions[name],
                }
                for name, info in self.parameters.items()
            },
            "files": self.files,
        }


def is_converted(path: Path) -> bool:
    """Whether the folder `path` is a converted one, finished or not."""
    if (path / MANIFEST_FILE).is_file():
        return True
    begun = (path / PARAMS_FOLDER / "_METADATA").is_file() or any(
        path.glob(f"{PARAMS_FOLDER}.orbax-*")  # Orbax's name until it has written all
    )
    return begun and not any(path.glob("*.safetensors"))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the folder `path` and compares the files with it.

    Raises:
        CheckpointError: there is none, it is broken or of another version, or a file is missing
            or of another size.
    """
    file = path / MANIFEST_FILE
    if not file.is_file():
        what = "its conversion was not finished" if is_converted(path) else "it is no converted one"
        raise CheckpointError(
            f"{path} has no {MANIFEST_FILE}: {what}. Convert the model again: "
            f"python -m jaxllm.convert SRC DST --to orbax."
        )
    value = read_json(file)
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format_version {version!r}, this version of jaxllm reads "
            f"{FORMAT_VERSION}: convert the model again."
        )
    try:
        manifest = _parse(value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{file} is not as jaxllm.convert writes it ({type(error).__name__}: {error}): "
            f"convert the model again."
        ) from error
    _check_files(path, manifest.files)
    return manifest


def _parse(value: Mapping[str, Any]) -> Manifest:
    parameters: dict[str, TensorInfo] = {}
    partitions: dict[str, list[Any]] = {}
    for name, entry in value["parameters"].items():
        shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"the shape of {name} is {entry['shape']}")
        parameters[name] = TensorInfo(shape, dtype, math.prod(shape) * dtype.itemsize)
        partitions[name] = list(entry["partition"])
    files = dict(value["files"])
    for name, size in files.items():
        parts = PurePosixPath(name).parts
        if parts[:1] != (PARAMS_FOLDER,) or ".." in parts or not isinstance(size, int):
            raise ValueError(f"no file below {PARAMS_FOLDER}/ with a size: {name!r}: {size!r}")
    return Manifest(str(value["architecture"]), str(value["dtype"]), parameters, partitions, files)


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing: {MANIFEST_FILE} lists it. Copy the folder again, or convert "
                f"the model again."
            )
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(
                f"{file} has {found} bytes, {MANIFEST_FILE} says {size}: it was cut or changed. "
                f"Copy the folder again, or convert the model again."
            )
