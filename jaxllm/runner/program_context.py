"""What compiled programs depend on, as hashes: equal hashes, equal programs.

The context is what all programs of an engine have in common; a program's own arguments are in its
name (`tree_hash`), so that engines with caches of different sizes share their samplers. Whatever
might change a program is in one of them, needed or not: a hash too many costs a compilation, one
too few would run a stale program.
"""

import functools
import hashlib
import logging
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jaxllm
from jaxllm.config import EngineConfig
from jaxllm.runner.program_cache import ProgramCache
from jaxllm.runner.weights import ModelStage

logger = logging.getLogger(__name__)

SUBFOLDER = "programs"
"""Of the compilation cache's folder."""
_IMPORTED = time.time()
_PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy", "ml_dtypes"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
)
_SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_enable_custom_prng",
    "jax_enable_pgle",
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_optimization_level",
    "jax_pallas_enable_debug_checks",
    "jax_pallas_poison_buffers",
    "jax_random_seed_offset",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    "jax_use_hlo_logistic_lowering",
    "jax_use_shardy_partitioner",
)
"""Settings of JAX that change a lowered program."""
_HASHED_CODE = ("jaxllm", "flax", "builtins", "abc", "typing", "collections")
"""Packages whose code is in the hash, itself or by its version."""


def open_cache(config: EngineConfig, stages: list[ModelStage], model: Any) -> ProgramCache | None:
    """The cache for an engine's programs, or None if they must not be cached.

    Args:
        config: resolved.
        model: the module, with shapes for parameters; its `config` is the model's.
    """
    folder = jax.config.jax_compilation_cache_dir
    off = not config.compilation_cache_dir and config.compilation_cache_dir is not None
    if off or not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    # A program of several processes is loaded by all or by none of them, which nobody agrees on.
    if config.enforce_eager or jax.process_count() > 1:
        return None
    if not (_is_ours(type(model)) and _is_ours(type(model.config))):
        logger.debug("%s is not jaxllm's own: its programs are not cached", type(model))
        return None
    sources = source_hash(Path(jaxllm.__file__).parent)
    if sources is None:
        logger.debug("the source has changed since it was imported: no program is cached")
        return None
    parts = [
        sources,
        _versions(),
        (os.environ.get("XLA_FLAGS"), os.environ.get("NVIDIA_TF32_OVERRIDE")),
        {name: getattr(jax.config, name, None) for name in _SETTINGS},
        [(stage.stage, _devices(stage.mesh)) for stage in stages],
        f"{type(model).__module__}.{type(model).__qualname__}",
        model.config,
        (config.dtype, config.block_size, config.attention_backend, config.max_logprobs),
        config.max_model_len,
    ]
    context = hashlib.sha256(repr(parts).encode()).hexdigest()
    gpu = stages[0].mesh.devices.flat[0].platform == "gpu"
    return ProgramCache(Path(folder) / SUBFOLDER, context, gpu=gpu)


def _is_ours(kind: type) -> bool:
    """Whether all code of a class is in the hash: that of a user's class may change unseen."""
    return all(base.__module__.split(".")[0] in _HASHED_CODE for base in kind.__mro__)


def source_hash(package: Path) -> str | None:
    """Of all code and tables of the package; None if a file is newer than what was imported."""
    digest = hashlib.sha256()
    # The package's links lead to folders that rglob would leave out.
    for folder, folders, names in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix not in (".py", ".json"):
                continue
            if path.stat().st_mtime > _IMPORTED:
                return None
            data = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _devices(mesh: Mesh) -> tuple[Any, ...]:
    devices = list(mesh.devices.flat)
    client = devices[0].client
    host = _processor() if client.platform == "cpu" else None
    kinds = [(device.id, device.process_index, device.device_kind) for device in devices]
    return client.platform, client.platform_version, client.device_count(), kinds, str(mesh), host


@functools.cache
def _processor() -> list[str]:
    """What XLA's code for the CPU depends on: a shared folder may be read on other hosts."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = ("model name", "flags", "Features", "CPU part")
    return [platform.machine(), *sorted({line for line in lines if line.startswith(told)})]


def tree_hash(tree: Any) -> str:
    """Of a tree's structure, and of shape, dtype and sharding of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [(x.shape, str(x.dtype), str(x.sharding), str(x.sharding.memory_kind)) for x in leaves]
    return hashlib.sha256(repr((str(structure), arrays)).encode()).hexdigest()
