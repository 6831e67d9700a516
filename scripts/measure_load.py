"""Host memory and speed of loading: `python scripts/measure_load.py --size 4GiB --devices 8`.

Makes a sharded safetensors checkpoint of random weights, loads it with the engine's loader onto
so many virtual CPU devices (or onto the GPUs that there are), and prints the rate and the peak of
host memory beyond the final arrays. Mapped pages of the files are not counted: the kernel drops
them when it needs the memory. Exits with 1 if the peak is beyond twice the largest tensor.
"""

import argparse
import contextlib
import json
import math
import mmap
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
LAYERS, FFN_RATIO, VOCAB, HEAD_DIM = 8, 3.5, 8192, 64
SHARD_BYTES = 2**29
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bytes_of(text: str) -> int:
    """512MiB, 4GiB, 16GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB|MB|GB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512MiB or 4GiB")
    return int(float(match[1]) * UNITS[match[2]])


def config_of(nbytes: int) -> dict[str, Any]:
    """A Llama of bfloat16 weights that take at least `nbytes`, and at most a layer more."""
    # A layer has 2.5 D^2 of attention (with a quarter of kv heads) and 3 x 3.5 D^2 of MLP.
    quadratic, linear = LAYERS * (2.5 + 3 * FFN_RATIO), 2 * VOCAB
    values = nbytes / 2
    hidden = (-linear + (linear**2 + 4 * quadratic * values) ** 0.5) / (2 * quadratic)
    # Eight devices share even the kv heads: at least eight, and a multiple of that.
    step = 512 if hidden < 2048 else 2048
    hidden = max(step, round(hidden / step) * step)
    layers = math.ceil((values - linear * hidden) / (quadratic / LAYERS * hidden**2))
    heads = hidden // HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(hidden * FFN_RATIO),
        "num_hidden_layers": max(1, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": max(8, heads // 4),
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes, in the order in which transformers saves them."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], HEAD_DIM
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, ffn),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_proj": (q, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCAB, hidden)}


class RandomCheckpoint:
    """Tensors of noise, made when they are read."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        from jaxllm.converters.safetensors_file import TensorInfo

        self.path = folder
        self.tensors = {
            name: TensorInfo(shape, BFLOAT16, math.prod(shape) * 2)
            for name, shape in shapes.items()
        }
        self._noise = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(BFLOAT16)

    def read(self, name: str) -> np.ndarray:
        return np.resize(self._noise, self.tensors[name].shape)


def make_checkpoint(folder: Path, nbytes: int) -> None:
    """Writes config.json and the shards, tensor by tensor."""
    from jaxllm.converters.safetensors_writer import write_safetensors

    config = config_of(nbytes)
    checkpoint: Any = RandomCheckpoint(folder, tensors_of(config))
    dtypes = dict.fromkeys(checkpoint.tensors, BFLOAT16)
    write_safetensors(checkpoint, dtypes, folder, shard_bytes=SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file."""
    status = Path("/proc/self/status").read_text()
    return sum(int(kb) << 10 for kb in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


class PeakSampler:
    """The largest `anonymous_bytes` seen, asked for every two milliseconds."""

    peak = 0

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.002):
                self.peak = max(self.peak, anonymous_bytes())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def touch_memory(nbytes: int) -> float:
    """Takes and gives back as much memory; the seconds that it took.

    A virtual machine's host hands memory over when it is first touched (at half a GB/s where this
    was written), which is not the loader's time.
    """
    start = time.perf_counter()
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return time.perf_counter() - start


def load(folder: Path, dtype: str) -> dict[str, Any]:
    """Loads the checkpoint as the engine does; the figures, in bytes and seconds."""
    import jax

    from jaxllm.converters.architectures import name_map_for
    from jaxllm.converters.checkpoint import open_checkpoint
    from jaxllm.converters.loader import load_params
    from jaxllm.models.registry import resolve
    from jaxllm.runner.mesh import make_mesh
    from jaxllm.runner.weights import build_abstract

    checkpoint = open_checkpoint(str(folder))
    model_class = resolve(checkpoint.config["architectures"])
    mesh = make_mesh(jax.devices(), tensor_parallel_size=len(jax.devices()))
    config = model_class.Config.from_hf(checkpoint.config)
    abstract = build_abstract(model_class, config, dtype, mesh).shapes
    name_map = name_map_for(checkpoint.config["architectures"])
    for name in checkpoint.tensors:  # into the page cache
        checkpoint.read(name).view(np.uint16).max()
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    touched = touch_memory(total)
    before, sampler, start = anonymous_bytes(), PeakSampler(), time.perf_counter()
    with sampler.sampling():
        params = load_params(abstract, checkpoint, name_map, checkpoint.config, progress=False)
    seconds = time.perf_counter() - start
    on_host = jax.default_backend() == "cpu"
    shards = [s for param in params.values() for s in param.addressable_shards]
    final = sum(shard.data.nbytes for shard in shards) if on_host else 0
    return {
        "bytes": total,
        "largest": max(info.nbytes for info in checkpoint.tensors.values()),
        "beyond": sampler.peak - before - final,
        "seconds": seconds,
        "touched": touched,
        "devices": len(jax.devices()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the loader.")
    parser.add_argument("--size", type=bytes_of, default=2**30, help="such as 4GiB (default 1GiB)")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument("--gpu", action="store_true", help="load onto the GPUs instead")
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters")
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint; kept")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/h200.json")
    args = parser.parse_args()
    if not args.gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_checkpoint(folder, args.size)
        figures = load(folder, args.dtype)
    rate = figures["bytes"] / figures["seconds"] / 1e9
    ratio = figures["beyond"] / figures["largest"]
    print(f"{figures['bytes'] / 1e9:.2f} GB onto {figures['devices']} devices in "
          f"{figures['seconds']:.2f} s: {rate:.2f} GB/s (files and memory touched before; the "
          f"memory's first touch took {figures['touched']:.2f} s)")  # fmt: skip
    print(f"largest tensor {figures['largest'] / 2**20:.1f} MiB; peak beyond the final arrays "
          f"{figures['beyond'] / 2**20:.1f} MiB, {ratio:.2f} of it (allowed: 2)")  # fmt: skip
    if args.record and args.gpu:
        from record import record

        record("load", rate, "GB/s", gigabytes=figures["bytes"] / 1e9, peak_ratio=round(ratio, 2))
    return 0 if ratio <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
