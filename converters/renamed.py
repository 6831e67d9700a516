"""A checkpoint under other tensor names, and parameters after a registered last fix."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.converters.architectures import find_architecture, imported
from jaxllm.converters.checkpoint import Checkpoint, Source, TensorInfo
from jaxllm.converters.errors import LoadError
from jaxllm.converters.load_report import LoadReport

Abstract = Mapping[str, jax.ShapeDtypeStruct]

_LAYER = re.compile(r"\.\d+\.")


class RenamedCheckpoint:
    """A Checkpoint whose tensors' names had parts replaced.

    Raises:
        LoadError: two tensors get one name.
    """

    def __init__(self, base: Checkpoint, renames: tuple[Mapping[str, str], ...]) -> None:
        self._base = base
        self._old_names: dict[str, str] = {}
        report = LoadReport()
        for old in base.tensors:
            new = _renamed_by_all(old, renames)
            if new in self._old_names:
                both = " and ".join(_LAYER.sub(".{i}.", n) for n in (self._old_names[new], old))
                report.duplicated.append((new, f"is what {both} are renamed to"))
            self._old_names[new] = old
        if report:
            raise LoadError(report.text(base.path))
        self.tensors: Mapping[str, TensorInfo] = {
            new: base.tensors[old] for new, old in self._old_names.items()
        }

    @property
    def path(self) -> Path:
        return self._base.path

    @property
    def source(self) -> Source:
        return self._base.source

    @property
    def config(self) -> dict[str, Any]:
        return self._base.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self._base.generation_config

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """As the base's, under the new name."""
        return self._base.read(self._old_names[name], index)


def renamed(name: str, table: Mapping[str, str]) -> str:
    """`name` with whole dotted parts replaced, all at once; the longest key goes first.

    {"query_proj": "q_proj"} changes "a.query_proj.b" and leaves "a.my_query_proj.b".
    """
    keys = "|".join(re.escape(key) for key in sorted(table, key=len, reverse=True))
    return re.sub(rf"(?<![^.])(?:{keys})(?![^.])", lambda found: table[found[0]], name)


def _renamed_by_all(name: str, tables: tuple[Mapping[str, str], ...]) -> str:
    for table in tables:
        name = renamed(name, table)
    return name


def registered_names(names: Iterable[str], architectures: list[str]) -> set[str]:
    """`names` of tensors as the architecture's registration has them."""
    found = find_architecture(architectures)
    return {_renamed_by_all(name, found.renames if found else ()) for name in names}


def with_registered_names(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` under the names that its architecture's registration gives its tensors.

    A converted folder has the model's own names already.
    """
    found = find_architecture(checkpoint.config.get("architectures") or [])
    if found is None or not found.renames or checkpoint.source == "orbax":
        return checkpoint
    return RenamedCheckpoint(checkpoint, found.renames)


def after_load(
    architectures: list[str], params: dict[str, jax.Array], abstract: Abstract, config: Any
) -> dict[str, jax.Array]:
    """`params` after the registered post_load hook, if there is one.

    Args:
        config: the model's, passed on to the hook.

    Raises:
        LoadError: the hook lost or added a parameter, or changed a shape or dtype.
    """
    found = find_architecture(architectures)
    if found is None or found.post_load is None:
        return params
    changed = imported(found.post_load)(dict(params), config)
    report = LoadReport()
    if not isinstance(changed, Mapping):
        raise LoadError(f"post_load of {architectures[0]} returned no dict of parameters.")
    report.missing += [(name, "lost by post_load") for name in abstract.keys() - changed.keys()]
    report.unexpected += [(name, "added by post_load") for name in changed.keys() - abstract.keys()]
    for name in abstract.keys() & changed.keys():
        target, value = abstract[name], changed[name]
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            detail = f"post_load made it {list(value.shape)} {value.dtype}, the model needs "
            detail += f"{list(target.shape)} {np.dtype(target.dtype)}"
            report.mismatched.append((name, detail))
    if report:
        raise LoadError(report.text(f"post_load of {architectures[0]}"))
    return {name: jax.device_put(changed[name], abstract[name].sharding) for name in abstract}
