"""What the hashes of compiled programs tell apart."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.runner import program_context
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.program_context import source_hash, tree_hash


def test_the_source_is_all_code_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = tmp_path / "elsewhere"
    package = tmp_path / "package"
    for path in (linked / "table.json", package / "code.py", package / "notes.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
    (package / "linked").symlink_to(linked)
    monkeypatch.setattr(program_context, "_IMPORTED", time.time() + 60)
    first = source_hash(package)
    (package / "notes.txt").write_text("2")
    assert source_hash(package) == first
    for path in (linked / "table.json", package / "code.py"):
        path.write_text("2")
        assert source_hash(package) not in (first, None)
        path.write_text("1")
        assert source_hash(package) == first
    monkeypatch.setattr(program_context, "_IMPORTED", time.time() - 60)
    assert source_hash(package) is None


def test_trees_differ_by_structure_shape_dtype_and_sharding() -> None:
    mesh = make_mesh(jax.devices()[:2], tensor_parallel_size=2)

    def leaf(size: int = 4, dtype: type = jnp.float32, axis: str | None = None) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(axis))
        return jnp.zeros((size,), dtype, device=sharding)

    trees = [
        {"a": leaf()},
        {"b": leaf()},
        [leaf()],
        {"a": leaf(6)},
        {"a": leaf(dtype=jnp.int32)},
        {"a": leaf(axis="tp")},
    ]
    assert len({tree_hash(tree) for tree in trees}) == len(trees)
    shapes = {"a": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=leaf().sharding)}
    assert tree_hash(shapes) == tree_hash(trees[0])
