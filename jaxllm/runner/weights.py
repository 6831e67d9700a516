"""From a model class to `(merge, params)`: the only place where nnx trees are taken apart.

Outside this file a model is a function over a nested dict of arrays: `nnx.jit` costs 15 ms a
call at 300 leaves, a plain dict 0.15 ms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

Params = dict[Any, Any]
"""Nested dict of arrays; the keys of a list are its indices."""


@dataclass(frozen=True, slots=True)
class AbstractModel:
    """A model whose parameters are shapes only.

    Attributes:
        merge: params -> the module, ready to be called (inside jit).
        shapes: dotted name -> shape, dtype and sharding of each parameter.
    """

    merge: Callable[[Params], Any]
    shapes: dict[str, jax.ShapeDtypeStruct]


def build_abstract(
    model_class: type, model_config: Any, dtype: Any, mesh: Mesh | AbstractMesh
) -> AbstractModel:
    """Declares the model on `mesh` without allocating anything."""
    shape_only = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    with jax.sharding.use_abstract_mesh(shape_only):
        abstract = nnx.eval_shape(lambda: model_class(model_config, jnp.dtype(dtype)))
    graphdef, state = nnx.split(abstract)
    shapes = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)
        )
        for name, leaf in flatten(nnx.to_pure_dict(state)).items()
    }
    return AbstractModel(lambda params: nnx.merge(graphdef, params), shapes)


def flatten(params: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {0: x}} -> {"a.0": x}."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """The inverse of `flatten`; a number in a name is the index of a list."""
    params: Params = {}
    for name, value in flat.items():
        *parents, leaf = (int(part) if part.isdigit() else part for part in name.split("."))
        node = params
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return params
