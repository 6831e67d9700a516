"""A checkpoint as a folder in Hugging Face form: config.json and one or more files of weights."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.file_kinds import HEAD_BYTES, what_it_is
from jaxllm.converters.safetensors_file import SafetensorsFile, TensorInfo, unique_keys

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

logger = logging.getLogger(__name__)


Check = Callable[[list[Path]], None]
"""Called with the weight files before the first is opened."""


class WeightsFile(Protocol):
    """One open file of weights."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class Layout:
    """How a format's files are called: the only one, the index of several, and any."""

    single: str
    index: str
    pattern: str
    open: Callable[[Path], WeightsFile]

    def in_folder(self, path: Path) -> bool:
        """Whether `path` holds weights of this format under their names."""
        return any((path / name).is_file() for name in (self.single, self.index))

    def names(self, path: Path) -> list[str]:
        """The tensors that the index in `path` names, [] if there is none.

        Raises:
            CheckpointError: the index is broken.
        """
        index = path / self.index
        return list(_weight_map(index)) if index.is_file() else []

    def is_whole(self, path: Path) -> bool:
        """Whether all files of weights are there.

        Raises:
            CheckpointError: the index is broken.
        """
        index = path / self.index
        files = set(_weight_map(index).values()) if index.is_file() else {self.single}
        return all((path / file).is_file() for file in files)


SAFETENSORS = Layout(SINGLE_FILE, INDEX_FILE, "*.safetensors", SafetensorsFile)


class WeightsFolder:
    """A Checkpoint over a folder. With an index, only what its weight_map lists is read.

    Args:
        check: sees the weight files before they are opened.

    Raises:
        CheckpointError: a file is missing or broken.
    """

    def __init__(self, path: Path, layout: Layout, check: Check | None = None) -> None:
        self.path = path
        self.config = read_config(path)
        self.generation_config = read_generation_config(path)
        indexed = (path / layout.index).is_file()
        opening = _open_indexed if indexed else _open_single
        self._file_of = opening(path, layout, check or (lambda files: None))
        self.tensors: Mapping[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._file_of.items()
        }

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or its part `index`, as a read-only view of the mapped file."""
        return self._file_of[name].read(name, index)


class SafetensorsFolder(WeightsFolder):
    """A folder of model.safetensors, or of several with their index."""

    source: Literal["safetensors"] = "safetensors"

    def __init__(self, path: Path, check: Check | None = None) -> None:
        super().__init__(path, SAFETENSORS, check)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of the folder `path`; raises CheckpointError if `architectures` is no list."""
    config = read_json(path / "config.json")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{path / 'config.json'}: architectures must be a list of names, is {names!r:.80}."
        )
    return config


def read_generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of the folder `path`, {} if it has none."""
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        unique: whether no key may stand twice in an object.

    Raises:
        CheckpointError: unreadable, no JSON, or no object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except (ValueError, RecursionError) as error:
        kind = what_it_is(content[:HEAD_BYTES])
        if kind and not content.lstrip().startswith((b"{", b"[")):
            raise CheckpointError(f"{path} is {kind}, not a JSON file.") from None
        raise CheckpointError(f"{path} is no valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object but a {type(value).__name__}.")
    return value


def shorten(names: Iterable[str], limit: int = 8) -> str:
    """The first `limit` names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _open_single(path: Path, layout: Layout, check: Check) -> dict[str, WeightsFile]:
    file = path / layout.single
    if file.is_symlink() and not file.exists():
        raise CheckpointError(f"{file} is a link to {file.readlink()}, which is not there.")
    if not file.is_file():
        raise CheckpointError(_no_weights(path, layout))
    _report_leftovers(path, layout, {layout.single}, [])
    check([file])
    opened = layout.open(file)
    return dict.fromkeys(opened.tensors, opened)


def _open_indexed(path: Path, layout: Layout, check: Check) -> dict[str, WeightsFile]:
    index = path / layout.index
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        message = f"{index} names {len(missing)} of {len(shards)} shards that are not there: "
        message += f"{shorten(missing)}."
        if (path / layout.single).is_file():
            message += f" To load {layout.single} instead, delete the index."
        raise CheckpointError(message)
    check([path / shard for shard in shards])
    opened = {shard: layout.open(path / shard) for shard in shards}
    absent = [
        f"{name} ({shard})"
        for name, shard in weight_map.items()
        if name not in opened[shard].tensors
    ]
    if absent:
        raise CheckpointError(
            f"{index} names {len(absent)} tensors that their shards do not hold: {shorten(absent)}."
        )
    stale = [
        f"{name} ({shard})"
        for shard, file in opened.items()
        for name in file.tensors
        if weight_map.get(name) != shard
    ]
    _report_leftovers(path, layout, set(shards), stale)
    return {name: opened[shard] for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files.")
    for name, shard in weight_map.items():
        parts = PurePosixPath(shard).parts if isinstance(shard, str) else ()
        if not parts or ".." in parts or PurePosixPath(shard).is_absolute() or "\0" in shard:
            raise CheckpointError(f"{index} puts {name!r} in {shard!r}, no file of this folder.")
    return weight_map


def _report_leftovers(path: Path, layout: Layout, used: set[str], stale: list[str]) -> None:
    files = [file.name for file in sorted(path.glob(layout.pattern)) if file.name not in used]
    if stale:
        logger.warning("%s: tensors that the index does not place there: %s", path, shorten(stale))
    if files:
        logger.warning("%s: files that are not part of the model: %s", path, shorten(files))


def _no_weights(path: Path, layout: Layout) -> str:
    found = sorted(entry.name for entry in path.iterdir())
    weights = [name for name in found if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    message = f"no weights in {path}: neither {layout.single} nor {layout.index} is there"
    if any(fnmatch(name, layout.pattern) for name in weights):
        return f"{message}, only {shorten(weights)}. Shards need their index."
    if weights:
        return (
            f"{message}, only {shorten(weights)}. Of PyTorch files, pytorch_model.bin and shards "
            f"with pytorch_model.bin.index.json can be read (--load-format pt or auto)."
        )
    return f"{message}."
