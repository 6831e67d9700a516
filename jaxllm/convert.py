"""`python -m jaxllm.convert SRC DST`: writes any readable checkpoint as a Hugging Face folder.

With --to orbax the weights are written as the engine holds them, for faster starts on any mesh.
"""

import argparse
import contextlib
import json
import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.converters.architectures import NAME_MAPS
from jaxllm.converters.checkpoint import Checkpoint, open_checkpoint
from jaxllm.converters.checksums import write_sums
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.new_folder import appearing_folder, check_target
from jaxllm.converters.safetensors_writer import (
    FLOAT_DTYPES,
    SHARD_BYTES,
    stored_dtypes,
    write_safetensors,
)
from jaxllm.converters.tied_head import effective_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)

TARGETS = ("safetensors", "orbax")
# Devices over which an Orbax tree is split, if its shapes allow; the first that does is taken.
SPLITS = (8, 4, 2, 1)

logger = logging.getLogger(__name__)


def convert(
    source: str,
    target: str | Path,
    *,
    to: str = "safetensors",
    dtype: str = "auto",
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> Path:
    """Writes `source` as a folder and returns the folder.

    The folder appears under its name only once it is complete.

    Args:
        source: a folder, a .gguf file, "demo" or a hub id.
        target: a new or empty folder.
        to: "safetensors", which transformers loads too, or "orbax": the model's own parameter
            tree, which is held in memory meanwhile. That runs JAX, which reserves the GPU if
            there is one and jax_platforms has not been set to "cpu", as the command does.
        dtype: of the floating-point tensors; "auto" keeps each as it is (float32 where the
            source is a dequantized GGUF); an Orbax tree has one for all, the most frequent.
        shard_bytes: beyond this size of the weights, in bytes, they are split over several files.

    Raises:
        CheckpointError: the source cannot be read, or the target is taken or too small.
    """
    target = Path(target).expanduser()
    check_target(target)
    if to not in TARGETS:
        raise CheckpointError(f"to {to!r} is none of {', '.join(TARGETS)}.")
    checkpoint = open_checkpoint(source, revision=revision)
    if checkpoint.source == "orbax":
        raise CheckpointError(
            f"{source} is converted already: convert from the checkpoint that it was made of."
        )
    named = _under_registered_names(checkpoint) if to == "orbax" else checkpoint
    config = effective_config(named)
    dtypes = stored_dtypes(named, _wanted_tensors(named, config), dtype)
    with appearing_folder(target) as folder:
        _check_space(folder, named, dtypes)
        written = _written_config(config, dtypes)
        _write_json(folder / "config.json", written)
        if checkpoint.generation_config:
            _write_json(folder / "generation_config.json", checkpoint.generation_config)
        _write_tokenizer(checkpoint, folder)
        if to == "orbax":
            _write_parameters(named, written, folder, progress=progress)
        else:
            write_safetensors(
                checkpoint, dtypes, folder, shard_bytes=shard_bytes, progress=progress
            )
        write_sums(folder)
    return target


def _under_registered_names(checkpoint: Checkpoint) -> Checkpoint:
    # Imported here, since safetensors need no jax.
    from jaxllm.converters.renamed import with_registered_names
    from jaxllm.registration import load_plugins

    load_plugins()
    return with_registered_names(checkpoint)


def _write_parameters(
    checkpoint: Checkpoint, config: dict[str, Any], folder: Path, *, progress: bool
) -> None:
    """Fills the model on the CPU and writes its parameters, in config["dtype"], through Orbax.

    They are split over virtual devices, for the chunks of the files to follow the sharding.
    """
    # Imported here, since safetensors need no jax.
    import jax

    from jaxllm.converters.architectures import name_map_for
    from jaxllm.converters.loader import load_params
    from jaxllm.converters.orbax_checkpoint import write_orbax
    from jaxllm.registration import resolve
    from jaxllm.runner.mesh import make_mesh
    from jaxllm.runner.weights import build_abstract

    dtype = config.get("dtype", "float32")
    model_class = resolve(config.get("architectures") or [])
    model_config = model_class.Config.from_hf(config)
    devices = jax.devices("cpu")
    shapes: dict[str, Any] = {}
    for size in (n for n in SPLITS if n <= len(devices)):
        mesh = make_mesh(devices, tensor_parallel_size=size)
        shapes = build_abstract(model_class, model_config, dtype, mesh).shapes
        if all(_divides(target) for target in shapes.values()):
            break
    name_map = name_map_for(config["architectures"])
    params = load_params(shapes, checkpoint, name_map, config, progress=progress)
    write_orbax(params, folder, architecture=model_class.__name__, dtype=dtype)


def _divides(target: Any) -> bool:
    """Whether the mesh splits a ShapeDtypeStruct evenly."""
    try:
        target.sharding.shard_shape(target.shape)
    except ValueError:
        return False
    return True


def _wanted_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    """All tensors but recomputable ones and the copy of a tied matrix."""
    names = list(checkpoint.tensors)
    for architecture in config.get("architectures") or ():
        name_map = NAME_MAPS.get(architecture)
        if name_map is None:
            continue
        names = [name for name in names if not name_map.ignores(name)]
        if config.get("tie_word_embeddings") and name_map.embedding in names:
            names = [name for name in names if name != name_map.head]
    return names


def _written_config(config: dict[str, Any], dtypes: dict[str, np.dtype]) -> dict[str, Any]:
    """The config with the dtype that most weights have, and without pointers to code."""
    written = {key: value for key, value in config.items() if key != "auto_map"}
    floats = [dtype.name for dtype in dtypes.values() if dtype.name in FLOAT_DTYPES]
    if floats:
        name = max(set(floats), key=floats.count)
        written["dtype"] = name
        if "torch_dtype" in written:
            written["torch_dtype"] = name
    return written


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.source == "gguf":
        # Imported here, since the other formats need no gguf package.
        from jaxllm.converters.gguf_checkpoint import GgufCheckpoint
        from jaxllm.converters.gguf_tokenizer import write_tokenizer_files

        assert isinstance(checkpoint, GgufCheckpoint)
        write_tokenizer_files(checkpoint, folder)
        return
    copied = 0
    for pattern in TOKENIZER_FILES:
        for file in sorted(checkpoint.path.glob(pattern)):
            destination = folder / file.relative_to(checkpoint.path)
            destination.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, destination)
            copied += 1
    if not copied:
        logger.warning("%s has no tokenizer files: the converted model has none", checkpoint.path)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _check_space(folder: Path, checkpoint: Checkpoint, dtypes: dict[str, np.dtype]) -> None:
    needed = sum(
        int(np.prod(checkpoint.tensors[name].shape)) * dtype.itemsize
        for name, dtype in dtypes.items()
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, the weights need {needed / 1e9:.1f} GB."
        )


def _keep_to_cpu() -> None:
    """Leaves the GPUs alone and makes virtual CPU devices, unless JAX runs already."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", SPLITS[0])


def main(arguments: list[str] | None = None) -> int:
    """The command: 0, or 1 after a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m jaxllm.convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", help="a folder, a .gguf file, 'demo' or a hub id")
    parser.add_argument("target", metavar="DST", help="the folder to write; must not exist")
    parser.add_argument(
        "--to", choices=TARGETS, default=TARGETS[0], help="format of the written weights"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", *FLOAT_DTYPES],
        default="auto",
        help="of the written weights; auto keeps the source's (float32 from GGUF)",
    )
    parser.add_argument("--revision", help="hub revision of the source")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="neither a bar nor the line at the end"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if options.to == "orbax":
        _keep_to_cpu()
    try:
        folder = convert(
            options.source,
            options.target,
            to=options.to,
            dtype=options.dtype,
            revision=options.revision,
            progress=not options.quiet and sys.stderr.isatty(),
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted: {options.target} was not written", file=sys.stderr)
        return 130
    except ValueError as error:  # CheckpointError among them
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not options.quiet:
        print(f"wrote {folder}")
    return 0


def _interrupt(*_: object) -> None:
    """As Ctrl-C: what was begun is deleted."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
