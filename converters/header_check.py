"""Compares a checkpoint with a model before any weight is read, as far as its headers allow."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.converters.checkpoint import Checkpoint, Source, TensorInfo
from jaxllm.converters.errors import LoadError
from jaxllm.converters.load_plan import find_sources, plan_load
from jaxllm.converters.load_report import LoadReport
from jaxllm.converters.name_map import NameMap
from jaxllm.converters.tied_head import has_both_heads

Abstract = Mapping[str, jax.ShapeDtypeStruct]


class _Headers:
    """A Checkpoint of which nothing may be read; without the head that its config ties."""

    def __init__(self, checkpoint: Checkpoint, name_map: NameMap, abstract: Abstract) -> None:
        self._checkpoint = checkpoint
        tied = name_map.head not in abstract and name_map.embedding in abstract
        dropped = name_map.head if tied and has_both_heads(checkpoint, name_map) else None
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in checkpoint.tensors.items() if name != dropped
        }

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def source(self) -> Source:
        return self._checkpoint.source

    @property
    def config(self) -> dict[str, Any]:
        return self._checkpoint.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self._checkpoint.generation_config

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        raise RuntimeError(f"{name} must not be read")


def check_headers(abstract: Abstract, checkpoint: Checkpoint, name_map: NameMap) -> None:
    """Names, shapes and dtypes of all tensors. A tied head's values are not compared.

    Raises:
        LoadError: what the loader would say.
    """
    headers = _Headers(checkpoint, name_map, abstract)
    plan_load(abstract, headers, name_map, checkpoint.config)


def check_names(abstract: Abstract, names: Collection[str], name_map: NameMap, path: Path) -> None:
    """The names alone, which is all that an index has.

    Args:
        path: of the checkpoint, for the message.

    Raises:
        LoadError: names that the model needs and misses, or does not know.
    """
    report = LoadReport()
    needed: dict[str, str] = {}
    for param, (op, tensors) in find_sources(abstract, name_map, report).items():
        shapes = op.tensor_shapes(abstract[param].shape)
        needed |= {name: str(list(shape)) for name, shape in zip(tensors, shapes, strict=True)}
    pair = {name_map.embedding, name_map.head}
    tied = name_map.head not in needed and name_map.embedding in needed
    report.missing += [
        (name, shape)
        for name, shape in needed.items()
        if name not in names and not (tied and name in pair and pair & set(names))
    ]
    for name in names:
        if name not in needed and not name_map.ignores(name) and not (tied and name in pair):
            report.unexpected.append((name, ""))
    if report:
        raise LoadError(report.text(path))
