"""Damaged checkpoints load, or end in an error of ours that names the file: nothing else happens.

Seeded: 2,400 mutations of valid tiny files, each opened, planned and read as the engine does.
"""

import json
import logging
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxllm import JaxllmError
from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.load_plan import plan_load
from jaxllm.converters.model_config import read_model_config
from jaxllm.converters.tied_head import effective_config
from jaxllm.models.registry import resolve
from tests.converters.gguf_files import bpe_metadata, model_metadata, model_tensors, write_gguf
from tests.converters.tiny_models import SIZES, abstract_of, save_model

MUTATIONS = 400
"""Of each kind of file."""
NUMBERS = [0, 1, 2**31, 2**40, 2**63, 2**64 - 1]
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**40, 2**63, 0.5, -1e308, 1e308, "", "text",
    "../../x", [], [1], [[]], {}, {"a": 1}, float("nan"), float("inf"), "\0",
]  # fmt: skip

Mutation = Callable[[random.Random, bytes], bytes]


def change_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Flips bits, overwrites, inserts, repeats, removes or cuts, mostly where the headers are."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        end = len(data) if rng.random() < 0.3 else min(len(data), 4096)
        if rng.random() < 0.2:
            at = max(0, len(data) - rng.randrange(1, 2500))  # a zip's directory is at its end
        else:
            at = rng.randrange(max(1, end))
        kind = rng.randrange(7)
        if kind <= 1 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2 and data:
            data[at % len(data)] = rng.choice(INTERESTING)
        elif kind == 3:
            data[at : at + 8] = rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)).to_bytes(
                8, "little"
            )
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 5:
            del data[at : at + rng.randrange(1, 40)]
        else:
            del data[at:]
    return bytes(data)


def change_json(rng: random.Random, raw: bytes) -> bytes:
    """Swaps, renames, removes or adds a value somewhere, or changes the text's bytes."""
    if rng.random() < 0.2:
        return change_bytes(rng, raw)
    value = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(list(places(value)))
        kind = rng.randrange(5)
        if kind <= 2:
            holder[key] = rng.choice(VALUES)
        elif kind == 3:
            other, place = rng.choice(list(places(value)))
            holder[key] = json.loads(json.dumps(other[place]))
        elif isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        else:
            del holder[key]
        if not value:
            break
    return json.dumps(value).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) within a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def change_header(rng: random.Random, raw: bytes) -> bytes:
    """A safetensors header with another value, its length corrected, or any other damage."""
    if rng.random() < 0.5:
        return change_bytes(rng, raw)
    length = int.from_bytes(raw[:8], "little")
    header = change_json(rng, raw[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


class Loader:
    """All that the engine does with a checkpoint before it compiles, without the devices."""

    def __init__(self, good: Path) -> None:
        checkpoint = open_checkpoint(str(good))
        self.model = self._shape_of(read_model_config(resolve, checkpoint.config, good)[1])
        self.abstract = {
            tied: abstract_of(checkpoint.config | {"tie_word_embeddings": tied})
            for tied in (False, True)
        }

    def _shape_of(self, model_config: Any) -> tuple[Any, ...]:
        biases = (getattr(model_config, name, None) for name in ("attention_bias", "mlp_bias"))
        return type(model_config), *(getattr(model_config, name) for name in SHAPE), *biases

    def __call__(self, path: Path) -> None:
        checkpoint = open_checkpoint(str(path))
        config = effective_config(checkpoint)
        _, model_config = read_model_config(resolve, config, checkpoint.path)
        if self._shape_of(model_config) != self.model:
            return  # another model's config, for which no tree of parameters is at hand
        abstract = self.abstract[bool(model_config.tie_word_embeddings)]
        for fill in plan_load(abstract, checkpoint, name_map_for(config["architectures"]), config):
            for name in fill.tensors:
                np.array(checkpoint.read(name), np.float32)


SHAPE = sorted(SIZES.keys() - {"max_position_embeddings"})
SMALL: dict[str, Any] = SIZES | {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 16,
    "head_dim": 4,
    "num_hidden_layers": 1,
}


def make_checkpoint(folder: Path, kind: str) -> tuple[Path, Path]:
    """A valid checkpoint, and the file in it that is to be damaged."""
    if kind == "gguf":
        path = write_gguf(
            folder / "tiny.gguf",
            model_metadata() | bpe_metadata(size=280),
            model_tensors(vocab=280),
        )
        return path, path
    shard = "6KB" if kind == "index" else "5GB"
    save_model(folder, max_shard_size=shard, tie_word_embeddings=False, **SMALL)
    if kind != "bin":
        name = {"safetensors": "model.safetensors", "index": "model.safetensors.index.json"}
        return folder, folder / name.get(kind, f"{kind}.json")
    checkpoint = open_checkpoint(str(folder))
    state = {name: torch.tensor(checkpoint.read(name)) for name in checkpoint.tensors}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    return folder, folder / "pytorch_model.bin"


KINDS: dict[str, Mutation] = {
    "safetensors": change_header,
    "index": change_json,
    "config": change_json,
    "generation_config": change_json,
    "gguf": change_bytes,
    "bin": change_bytes,
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_ends_in_a_load_or_a_clear_error(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    (tmp_path / "good").mkdir()
    path, file = make_checkpoint(tmp_path / "good", kind)
    raw = file.read_bytes()
    open_and_load = Loader(path)
    open_and_load(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    for seed in range(MUTATIONS):
        damaged = KINDS[kind](random.Random(f"{kind} {seed}"), raw)
        file.write_bytes(damaged)
        try:
            open_and_load(path)
        except JaxllmError as error:
            outcomes["refused"] += 1
            message = str(error)
            named = path if path.is_dir() else file
            assert str(named) in message, f"seed {seed}: {message}"
            assert len(message) < 5000, f"seed {seed}: {message[:300]}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        else:
            outcomes["loaded"] += 1
    assert min(outcomes["refused"], outcomes["loaded"]) > 0, outcomes
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 100 * 2**20, outcomes
    shutil.rmtree(tmp_path)


def test_enough_mutations() -> None:
    assert len(KINDS) * MUTATIONS >= 2000
