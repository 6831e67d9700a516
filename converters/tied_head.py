"""Tied heads: whether the checkpoint agrees with its config.

A config may say that the head shares the embedding's weights while the checkpoint carries a head
of its own, equal or trained apart (vllm#51063). The checkpoint is followed.
"""

import logging
from typing import Any

import numpy as np

from jaxllm.converters.architectures import find_name_map
from jaxllm.converters.checkpoint import Checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.name_map import NameMap

_CHUNK_ELEMENTS = 2**24

logger = logging.getLogger(__name__)


def effective_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config, with `tie_word_embeddings` as its tensors have it.

    Reads tensors only where the config says tied and the checkpoint has both.

    Raises:
        LoadError: said to be tied, but head and embedding have unlike shapes.
    """
    config = dict(checkpoint.config)
    if not config.get("tie_word_embeddings"):
        return config
    name_map = find_name_map(config.get("architectures") or [])
    if name_map is not None and head_differs(checkpoint, name_map):
        logger.warning(
            "%s: tie_word_embeddings is set, but the head differs from the embedding; "
            "following the checkpoint, untied",
            checkpoint.path,
        )
        config["tie_word_embeddings"] = False
    return config


def has_both_heads(checkpoint: Checkpoint, name_map: NameMap) -> bool:
    """Whether the checkpoint has both head and embedding. Reads no tensor.

    Raises:
        LoadError: their shapes differ, so neither can stand for the other.
    """
    head, embedding = (checkpoint.tensors.get(name) for name in (name_map.head, name_map.embedding))
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape:
        raise LoadError(
            f"{checkpoint.path}: tie_word_embeddings is set, but {name_map.head} has shape "
            f"{list(head.shape)} and {name_map.embedding} {list(embedding.shape)}; "
            f"set it to false in config.json if the head is a separate one."
        )
    return True


def head_differs(checkpoint: Checkpoint, name_map: NameMap) -> bool:
    """Whether the checkpoint has both head and embedding, and they differ.

    Raises:
        LoadError: as `has_both_heads`.
    """
    if not has_both_heads(checkpoint, name_map):
        return False
    first = checkpoint.read(name_map.head)
    second = checkpoint.read(name_map.embedding)
    return not _equal(first, second)


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype != second.dtype:
        first, second = first.astype(np.float32), second.astype(np.float32)
    bits = f"u{first.dtype.itemsize}"  # bfloat16 compares ten times faster as integers
    first, second = first.reshape(-1).view(bits), second.reshape(-1).view(bits)
    return all(
        np.array_equal(first[at : at + _CHUNK_ELEMENTS], second[at : at + _CHUNK_ELEMENTS])
        for at in range(0, first.size, _CHUNK_ELEMENTS)
    )
