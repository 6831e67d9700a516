"""A GGUF file, or all the parts of a split one, as a Checkpoint under Hugging Face's names."""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.file_kinds import HEAD_BYTES
from jaxllm.converters.gguf_config import (
    config_from_gguf,
    generation_config_from_gguf,
    interleaves_rope_rows,
)
from jaxllm.converters.gguf_file import GgufFile, GgufTensor, check_magic
from jaxllm.converters.gguf_types import NATIVE_DTYPES, dequantize_rows
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.safetensors_folder import Check

logger = logging.getLogger(__name__)

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
# What config_from_gguf has read (rotary factors) or what can be computed.
_NO_PARAMETERS = ("rope_freqs.weight", "attn_rot_embd.weight")

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from; heads: in how many the rows of the rotary order are, or 0."""

    file: GgufFile
    tensor: GgufTensor
    heads: int


class GgufCheckpoint:
    """The Checkpoint of a GGUF file; tensors are dequantized when they are read.

    Attributes:
        metadata: the file's key-value pairs, those of the tokenizer among them.
        config, generation_config: config.json and generation_config.json, made from them.
        tensors: by Hugging Face's name; nbytes is the size in the file, dtype that after reading
            (float32 for quantized types).
    """

    source: Literal["gguf"] = "gguf"

    def __init__(self, path: Path, files: list[GgufFile]) -> None:
        self.path = path
        self.files = files
        self.metadata: Mapping[str, Any] = files[0].metadata
        by_gguf_name = _merge_tables(files)
        shapes = {name: tensor.shape for name, (_, tensor) in by_gguf_name.items()}
        self.config: dict[str, Any] = config_from_gguf(
            self.metadata, shapes, lambda name: _read_whole(*by_gguf_name[name]), str(path)
        )
        self.generation_config: dict[str, Any] = generation_config_from_gguf(self.metadata)
        self._sources = {
            hf_name(name): _Source(file, tensor, self._rotary_heads(name))
            for name, (file, tensor) in by_gguf_name.items()
            if not name.endswith(_NO_PARAMETERS)
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                source.tensor.shape,
                NATIVE_DTYPES.get(source.tensor.type, np.dtype(np.float32)),
                source.tensor.nbytes,
            )
            for name, source in self._sources.items()
        }

    @cached_property
    def type_histogram(self) -> dict[str, int]:
        """How many tensors there are of each ggml type, most frequent first."""
        types = (tensor.type.name for file in self.files for tensor in file.tensors.values())
        return dict(Counter(types).most_common())

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or its part `index`; of a matrix only the blocks in it are dequantized.

        Raises:
            KeyError: there is no such tensor.
        """
        source = self._sources[name]
        shape = source.tensor.shape
        index = (index or ()) + (slice(None),) * (len(shape) - len(index or ()))
        if len(shape) != 2:
            values = _read_whole(source.file, source.tensor)
            if source.heads:
                values = values[_row_order(shape[0], source.heads)]
            return values[index]
        rows = source.file.rows(source.tensor)
        if source.heads:
            rows = rows[_row_order(shape[0], source.heads)[index[0]]]
        else:
            rows = rows[index[0]]
        return _columns(rows, source.tensor, index[1])

    def _rotary_heads(self, name: str) -> int:
        if interleaves_rope_rows(self.metadata):
            if ".attn_q." in name:
                return self.config["num_attention_heads"]
            if ".attn_k." in name:
                return self.config["num_key_value_heads"]
        return 0


def open_gguf(path: Path | str, *, check: Check | None = None) -> GgufCheckpoint:
    """Opens a .gguf file, any part of a split one, or a folder that holds one of either.

    Args:
        check: sees all parts before the first is opened.

    Raises:
        CheckpointError: nothing there, damaged, incomplete, or of an unsupported kind; the
            message names the file.
    """
    path = Path(path)
    first = _one_in(path) if path.is_dir() else path
    parts = _parts(first)
    if check is not None:
        check(parts)
    files = [GgufFile(part) for part in parts]
    _check_parts(files)
    return GgufCheckpoint(first, files)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file with a GGUF file's first bytes."""
    try:
        with path.open("rb") as file:
            check_magic(path, file.read(HEAD_BYTES))
    except (OSError, CheckpointError):
        return False
    return True


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; unknown ones keep their own, for the loader to report."""
    match = _NAME.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        return name
    prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{prefix}{_NAMES[match['part']]}.{match['kind']}"


def _one_in(folder: Path) -> Path:
    """The only GGUF file in a folder, or the first part of the only split one."""
    names = sorted(file.name for file in folder.glob("*.gguf"))
    models = {(m["stem"] if (m := _SPLIT_NAME.fullmatch(name)) else name): name for name in names}
    if not names:
        raise CheckpointError(f"no .gguf file in {folder}.")
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} holds several GGUF models, name one of them: {', '.join(names)}."
        )
    return folder / names[0]


def _parts(path: Path) -> list[Path]:
    """`path` itself, or all parts of the split file that it is one of, in order."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path} is one of {count} parts, and these are missing beside it: "
            f"{', '.join(missing)}."
        )
    return parts


def _check_parts(files: list[GgufFile]) -> None:
    """Raises unless the parts say of themselves what their names say."""
    count = len(files)
    for number, file in enumerate(files):
        said = file.metadata.get("split.count", 0 if count == 1 else None)
        if said != count and not (count == 1 and said in (0, 1)):
            raise CheckpointError(
                f"{file.path} says that it is one of {said} parts (split.count), but there are "
                f"{count} by its name."
            )
        # split.no counts from 0, the names from 1.
        if count > 1 and file.metadata.get("split.no") != number:
            raise CheckpointError(
                f"{file.path} says that it is part {file.metadata.get('split.no')} counted from 0 "
                f"(split.no), but by its name it is {number}."
            )
    total = sum(len(file.tensors) for file in files)
    said = files[0].metadata.get("split.tensors.count", total)
    if count > 1 and said != total:
        raise CheckpointError(
            f"{files[0].path} announces {said} tensors in all parts (split.tensors.count), but "
            f"they hold {total}."
        )


def _merge_tables(files: list[GgufFile]) -> dict[str, tuple[GgufFile, GgufTensor]]:
    merged: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in merged:
                raise CheckpointError(
                    f"tensor {name!r} is in two parts: {merged[name][0].path} and {file.path}."
                )
            merged[name] = (file, tensor)
    return merged


def _read_whole(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    return dequantize_rows(file.rows(tensor), tensor.type).reshape(tensor.shape)


def _columns(rows: np.ndarray, tensor: GgufTensor, columns: slice) -> np.ndarray:
    """Columns of a matrix: cut at block borders first, then exactly."""
    width = tensor.shape[1]
    start, stop, step = columns.indices(width)
    if step < 0 or start >= stop or not len(rows):
        return dequantize_rows(rows, tensor.type).reshape(len(rows), width)[:, columns]
    row_bytes = rows.shape[1]
    # The smallest piece that both begins and ends at a byte: a block of so many values.
    values = tensor.block_values
    nbytes = row_bytes * values // width
    first, last = start // values, -(-stop // values)
    part = dequantize_rows(
        np.ascontiguousarray(rows[:, first * nbytes : last * nbytes]), tensor.type
    )
    return part[:, start - first * values : stop - first * values : step]


def _row_order(rows: int, heads: int) -> np.ndarray:
    """For each row in Hugging Face's order, its row in the file.

    llama.cpp rotates neighbouring pairs of a head's rows, transformers its two halves: a row
    (half, i) of a head stands in the file at (i, half). Source: LlamaModel.permute in llama.cpp's
    convert_hf_to_gguf.py.
    """
    order = np.arange(rows).reshape(heads, -1, 2)
    return order.swapaxes(1, 2).reshape(-1)
