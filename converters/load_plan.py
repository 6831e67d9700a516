"""Decides which tensors fill which parameter, and finds every misfit before anything is read."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.converters.checkpoint import Checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.load_report import LoadReport, merge_numbers
from jaxllm.converters.name_map import NameMap, Op
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.tied_head import head_differs

CASTABLE = ("float64", "float32", "float16", "bfloat16")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fill:
    """One parameter and where it comes from.

    Attributes:
        dtypes: in which the tensors go to the device: theirs, but float64 as float32.
        nbytes: of the tensors in the file.
        host_bytes: of the tensors once they are read.
    """

    param: str
    target: jax.ShapeDtypeStruct
    op: Op
    tensors: tuple[str, ...]
    dtypes: tuple[np.dtype, ...]
    nbytes: int
    host_bytes: int


def plan_load(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: Checkpoint,
    name_map: NameMap,
    config: Mapping[str, Any],
) -> list[Fill]:
    """The parameters' sources, in the checkpoint's order.

    Raises:
        LoadError: not every parameter is filled exactly once, or a tensor is left over.
    """
    report = LoadReport()
    sources = find_sources(abstract, name_map, report)
    _follow_tied_head(sources, abstract, checkpoint, name_map)
    fills = [
        _fill(param, abstract[param], op, tensors, checkpoint)
        for param, (op, tensors) in sources.items()
    ]
    for fill in fills:
        _check_tensors(fill, checkpoint, report)
        _check_mesh(fill, report)
    _check_usage(fills, abstract, checkpoint, name_map, report)
    if report:
        report.hints += _hints(report, name_map, checkpoint, config)
        raise LoadError(report.text(checkpoint.path))
    _warn_about_range(fills, checkpoint)
    for line in dtype_changes(fills, checkpoint):
        logger.info("%s: %s", checkpoint.path, line)
    position = {name: at for at, name in enumerate(checkpoint.tensors)}
    return sorted(fills, key=lambda fill: position[fill.tensors[0]])


def find_sources(
    abstract: Mapping[str, jax.ShapeDtypeStruct], name_map: NameMap, report: LoadReport
) -> dict[str, tuple[Op, tuple[str, ...]]]:
    """The op and the tensors of each parameter, as the name map has them."""
    found: dict[str, tuple[Op, tuple[str, ...]]] = {}
    for param, target in abstract.items():
        for rule in name_map.rules:
            tensors = rule.sources(param)
            if tensors is None:
                continue
            if param in found:
                report.duplicated.append((param, "filled by several rules"))
            found[param] = rule.op, tensors
        if param not in found:
            report.unmapped.append((param, str(list(target.shape))))
    return found


def _follow_tied_head(
    sources: dict[str, tuple[Op, tuple[str, ...]]],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: Checkpoint,
    name_map: NameMap,
) -> None:
    """A tied model whose checkpoint kept the one matrix under the head's name."""
    head, embedding = name_map.head, name_map.embedding
    tied = head not in abstract and embedding in sources
    if tied and embedding not in checkpoint.tensors and head in checkpoint.tensors:
        sources[embedding] = sources[embedding][0], (head,)
        logger.info("%s: the tied embedding is read from %s", checkpoint.path, head)


def _check_tensors(fill: Fill, checkpoint: Checkpoint, report: LoadReport) -> None:
    shapes = fill.op.tensor_shapes(fill.target.shape)
    for name, expected in zip(fill.tensors, shapes, strict=True):
        info = checkpoint.tensors.get(name)
        if info is None:
            report.missing.append((name, str(list(expected))))
        elif info.shape != expected:
            detail = f"is {list(info.shape)}, the model needs {list(expected)}"
            report.mismatched.append((name, detail))
        elif not _castable(info, fill.target):
            detail = f"is {info.dtype}, the model needs {np.dtype(fill.target.dtype)}"
            report.mismatched.append((name, detail))


def _castable(info: TensorInfo, target: jax.ShapeDtypeStruct) -> bool:
    dtype = np.dtype(target.dtype)
    return info.dtype == dtype or (info.dtype.name in CASTABLE and dtype.name in CASTABLE)


def _check_mesh(fill: Fill, report: LoadReport) -> None:
    sharding = fill.target.sharding
    if not isinstance(sharding, NamedSharding):
        return
    for size, axes in zip(fill.target.shape, tuple(sharding.spec), strict=False):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        devices = math.prod(sharding.mesh.shape[name] for name in names)
        if size % devices:
            detail = (
                f"{list(fill.target.shape)}: {size} over {devices} devices ({', '.join(names)})"
            )
            report.indivisible.append((fill.param, detail))


def _check_usage(
    fills: list[Fill],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    checkpoint: Checkpoint,
    name_map: NameMap,
    report: LoadReport,
) -> None:
    users: dict[str, list[str]] = defaultdict(list)
    for fill in fills:
        for name in fill.tensors:
            users[name].append(fill.param)
    for name, params in users.items():
        if len(params) > 1:
            report.duplicated.append((name, "taken by " + " and ".join(params)))
    ignored = []
    for name, info in checkpoint.tensors.items():
        if name in users:
            continue
        detail = f"{list(info.shape)} {info.dtype}"
        if name == name_map.head and name_map.embedding in abstract:
            if head_differs(checkpoint, name_map):
                detail += ", which differs from the embedding that the model ties to it"
                report.unexpected.append((name, detail))
            else:
                ignored.append(name)
        elif name_map.ignores(name):
            ignored.append(name)
        else:
            report.unexpected.append((name, detail))
    if ignored:
        logger.info(
            "%s: %d tensors not needed, such as %s", checkpoint.path, len(ignored), ignored[0]
        )


def _hints(
    report: LoadReport, name_map: NameMap, checkpoint: Checkpoint, config: Mapping[str, Any]
) -> list[str]:
    hints = []
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        hints.append(f"The checkpoint is quantized ({method or 'see its quantization_config'}).")
    if any(name == name_map.head for name, _ in report.missing):
        hints.append(
            "If the head shares the embedding's weights, config.json must say "
            '"tie_word_embeddings": true.'
        )
    missing = {detail for _, detail in report.missing}
    if any(detail.rpartition(" ")[0] in missing for _, detail in report.unexpected):
        hints.append(
            "If the checkpoint only names them otherwise, jaxllm.register_model(…, "
            "rename={…}) maps its names."
        )
    if report.mismatched and checkpoint.source in ("safetensors", "pt"):
        hints.append(
            "The needed shapes follow from config.json: check that it belongs to these weights."
        )
    return hints


def dtype_changes(fills: list[Fill], checkpoint: Checkpoint) -> list[str]:
    """A line for each change of dtype, with its tensors, equal ones of several layers merged."""
    changes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    total = 0
    for fill in fills:
        target = np.dtype(fill.target.dtype)
        total += len(fill.tensors)
        for name in fill.tensors:
            if checkpoint.tensors[name].dtype != target:
                changes[f"{checkpoint.tensors[name].dtype} -> {target}"].append((name, ""))
    lines = []
    for change, names in changes.items():
        which = ", ".join(name for name, _ in merge_numbers(names))
        if len(names) == total:
            which = "all"
        lines.append(f"{len(names)} of {total} tensors change dtype, {change}: {which}")
    return lines


def _warn_about_range(fills: list[Fill], checkpoint: Checkpoint) -> None:
    wide = [
        name
        for fill in fills
        if np.dtype(fill.target.dtype).name == "float16"
        for name in fill.tensors
        if checkpoint.tensors[name].dtype.name == "bfloat16"
    ]
    if wide:
        logger.warning(
            "%s: %d bfloat16 tensors are cast to float16, which overflows above 65504; "
            "prefer --dtype bfloat16",
            checkpoint.path,
            len(wide),
        )


def _fill(
    param: str,
    target: jax.ShapeDtypeStruct,
    op: Op,
    tensors: tuple[str, ...],
    checkpoint: Checkpoint,
) -> Fill:
    infos = [checkpoint.tensors[name] for name in tensors if name in checkpoint.tensors]
    wide = np.dtype(np.float64)
    return Fill(
        param,
        target,
        op,
        tensors,
        dtypes=tuple(np.dtype(np.float32) if i.dtype == wide else i.dtype for i in infos),
        nbytes=sum(info.nbytes for info in infos),
        host_bytes=sum(math.prod(info.shape) * info.dtype.itemsize for info in infos),
    )
