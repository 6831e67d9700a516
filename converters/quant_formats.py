"""Quantized checkpoints: recognised by their config and shown as if they were not quantized.

QuantizedCheckpoint wraps a checkpoint and lists, in place of the packed tensors, the weights that
they stand for under their plain names ("….q_proj.weight", [out, in], float32), dequantized when
they are read. So name maps, the load plan and the loader know nothing of quantization. This is the
seam for kernels that keep weights quantized: such a parameter would take a module's stored tensors
through `stored(name)` instead of `read(name)`.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.quant_awq import Awq
from jaxllm.converters.quant_bnb import BitsAndBytes
from jaxllm.converters.quant_compressed import CompressedTensors
from jaxllm.converters.quant_fp8 import Fp8
from jaxllm.converters.quant_gptq import Gptq
from jaxllm.converters.quant_layout import ROW_ALIGNMENT, Layout, Parts, Scheme
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.safetensors_folder import read_json, shorten

if TYPE_CHECKING:
    from jaxllm.converters.checkpoint import Checkpoint, Source

SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": Awq,
    "gptq": Gptq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "bitsandbytes": BitsAndBytes,
}
# Names of vLLM's kernels for formats above.
_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
# config.json's keys; the second is what early compressed-tensors checkpoints have.
_CONFIG_KEYS = ("quantization_config", "compression_config")
# Where AutoAWQ and AutoGPTQ put the settings before config.json had them.
_CONFIG_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}

_SLAB_ELEMENTS = 2**19  # two MB of float32: what a core's cache holds

logger = logging.getLogger(__name__)


class QuantizedCheckpoint:
    """A Checkpoint whose packed weights appear dequantized.

    Attributes:
        inner: the checkpoint as it is stored.
        config: without its quantization_config, which is dealt with here.
        quantization: the scheme's name.
        tensors: a dequantized weight is float32, and its nbytes is what its parts take in the file.

    Raises:
        CheckpointError: parts are missing or do not fit; all are named.
    """

    def __init__(self, inner: "Checkpoint", quantization: str, scheme: Scheme) -> None:
        self.inner = inner
        self.quantization = quantization
        self.config = {k: v for k, v in inner.config.items() if k not in _CONFIG_KEYS}
        self._stored: dict[str, Parts] = {}
        self._layouts: dict[str, Layout] = {}
        modules, unused = _by_module(inner, scheme)
        self._find_layouts(scheme, modules)
        self.tensors: Mapping[str, TensorInfo] = self._list_tensors(unused)
        if unused:
            logger.info("%s: %d scales not needed: %s", self.path, len(unused), shorten(unused, 2))

    @property
    def path(self) -> Path:
        return self.inner.path

    @property
    def source(self) -> "Source":
        return self.inner.source

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.inner.generation_config

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored packed."""
        return bool(self._layouts)

    def stored(self, name: str) -> Parts | None:
        """The packed tensors behind the weight `name`; None if it is stored plainly."""
        return self._stored.get(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or its part `index`; of a packed weight only those rows are dequantized.

        Raises:
            CheckpointError: what the parts hold is impossible.
        """
        layout = self._layouts.get(name)
        if layout is None:
            return self.inner.read(name, index)
        rows, columns = (*(index or ()), slice(None), slice(None))[:2]
        start, stop, step = rows.indices(layout.shape[0])
        if step != 1:
            return self.read(name)[index]
        width = len(range(*columns.indices(layout.shape[1])))
        values = np.empty((max(0, stop - start), width), np.float32)
        slab = max(1, _SLAB_ELEMENTS // max(1, layout.shape[1]) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        for at in range(start // ROW_ALIGNMENT * ROW_ALIGNMENT, stop, slab):
            first, last = max(at, start), min(at + slab, stop)
            try:
                # Broken scales give what a scan for NaN finds; a warning a slab tells nothing more.
                with np.errstate(over="ignore", invalid="ignore"):
                    part = layout.rows(at, last)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from None
            values[first - start : last - start] = part[first - at :, columns]
        return values

    def _find_layouts(self, scheme: Scheme, modules: Mapping[str, list[str]]) -> None:
        problems, excepted = [], []
        for module, suffixes in modules.items():
            infos = {suffix: self.inner.tensors[f"{module}.{suffix}"] for suffix in suffixes}
            parts = Parts(module, infos, self.inner.read)
            weight = f"{module}.weight"
            try:
                layout = scheme.layout(parts)
                if layout and "weight" not in layout.used and weight in self.inner.tensors:
                    raise CheckpointError(f"{weight} is there beside {module}.{layout.used[0]}")
                if layout and scheme.ignores(module):
                    excepted.append(module)
            except CheckpointError as error:
                problems.append(str(error).rstrip("."))
                continue
            if layout:
                self._layouts[weight], self._stored[weight] = layout, parts
        if problems:
            raise CheckpointError(
                f"{self.path}: {len(problems)} {self.quantization} weights cannot be read: "
                f"{shorten(problems)}."
            )
        if excepted:
            logger.warning(
                "%s: excepted from quantization by the config, yet stored quantized: %s",
                self.path,
                shorten(excepted),
            )

    def _list_tensors(self, unused: list[str]) -> dict[str, TensorInfo]:
        weight_of = {
            f"{parts.module}.{suffix}": weight
            for weight, parts in self._stored.items()
            for suffix in self._layouts[weight].used
        }
        tensors: dict[str, TensorInfo] = {}
        dropped = set(unused)
        for name, info in self.inner.tensors.items():
            weight = weight_of.get(name)
            if weight is None and name not in dropped:
                tensors[name] = info
            elif weight is not None and weight not in tensors:
                layout, parts = self._layouts[weight], self._stored[weight]
                nbytes = sum(parts.infos[suffix].nbytes for suffix in layout.used)
                tensors[weight] = TensorInfo(layout.shape, np.dtype(np.float32), nbytes)
        return tensors


def dequantized(checkpoint: "Checkpoint", quantization: str | None = None) -> "Checkpoint":
    """The checkpoint itself if it is not quantized, else a QuantizedCheckpoint of it.

    Args:
        quantization: the scheme to insist on; None takes what config.json says.

    Raises:
        CheckpointError: the scheme is not supported, is another one than `quantization`, or its
            tensors are not whole.
    """
    if checkpoint.source == "gguf":
        if quantization not in (None, "gguf"):
            raise CheckpointError(f"--quantization {quantization}, but {checkpoint.path} is GGUF.")
        return checkpoint
    wanted = None if quantization is None else _known(quantization, "--quantization")
    try:
        method, config = _recognise(checkpoint, wanted)
        if method is None:
            return checkpoint
        scheme = SCHEMES[method](config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {str(error).rstrip('.')}.") from None
    wrapped = QuantizedCheckpoint(checkpoint, method, scheme)
    if checkpoint.source != "dummy" and not wrapped.quantized:
        if wanted:
            raise CheckpointError(
                f"--quantization {quantization}, but {checkpoint.path} holds no {method} weights."
            )
        logger.warning("%s: said to be %s, but no weight is quantized", checkpoint.path, method)
    return wrapped


def _recognise(checkpoint: "Checkpoint", wanted: str | None) -> tuple[str | None, dict[str, Any]]:
    """The scheme's name and its settings; None for weights that are not quantized."""
    key = next((key for key in _CONFIG_KEYS if checkpoint.config.get(key)), None)
    if key is None:
        name = _CONFIG_FILES.get(wanted or "")
        file = checkpoint.path / name if name else None
        return wanted, read_json(file) if file and file.is_file() else {}
    config = checkpoint.config[key]
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json: {key} = {config!r} is no object of settings")
    method = config.get("quant_method")
    if method is None and key == "compression_config":
        method = "compressed-tensors"
    if method is None and any(k.endswith(("load_in_4bit", "load_in_8bit")) for k in config):
        method = "bitsandbytes"  # transformers named no method in its first configs
    if method is None and wanted:
        return wanted, config
    found = _known(method, f"config.json's {key}")
    if wanted not in (None, found):
        raise CheckpointError(f"--quantization {wanted}, but config.json says {found}")
    return found, config


def _known(method: Any, where: str) -> str:
    name = _ALIASES.get(method, method) if isinstance(method, str) else method
    if not isinstance(name, str) or name not in SCHEMES:
        raise CheckpointError(
            f"{where}: the quantization {method!r} is not supported; there are {', '.join(SCHEMES)}"
        )
    return name


def _by_module(checkpoint: "Checkpoint", scheme: Scheme) -> tuple[dict[str, list[str]], list[str]]:
    """The suffixes of each module's parts, and the names of the tensors of no use."""
    modules: dict[str, list[str]] = defaultdict(list)
    unused = []
    suffixes = sorted(scheme.suffixes, key=len, reverse=True)
    for name in checkpoint.tensors:
        if name.endswith(tuple("." + suffix for suffix in scheme.unused)):
            unused.append(name)
            continue
        for suffix in suffixes:
            if name.endswith("." + suffix):
                modules[name.removesuffix("." + suffix)].append(suffix)
                break
    return modules, unused
