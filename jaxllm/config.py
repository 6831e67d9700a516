"""The engine's whole configuration: one frozen, flat dataclass under vLLM's flag names."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "orbax", "dummy"]
Dtype = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
AttentionBackend = Literal["auto", "reference", "triton", "mosaic_gpu"]
VERIFICATIONS = ("sha256", "finite")

DEMO_MODEL = "demo"


def _flag(help_text: str, *, short: str = "", **kwargs: Any) -> Any:
    """A field whose help text, and letter if any, become the flag's (see serve/args.py)."""
    return field(metadata={"help": help_text, "short": short}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. None means: derived by `resolve` or by the runner at start.

    Raises:
        ValueError: a value is out of range; the message names the flag and what would work.
    """

    model: str = _flag(
        "a folder in Hugging Face form, a .gguf file, a hub id, or 'demo'", default=DEMO_MODEL
    )
    tokenizer: str | None = _flag(
        "folder or hub id of the tokenizer, if not the model's", default=None
    )
    revision: str | None = _flag("hub revision of the model", default=None)
    served_model_name: tuple[str, ...] | None = _flag(
        "names that the API answers to; the first is reported", default=None
    )
    dtype: Dtype = _flag(
        "compute dtype; auto is bfloat16 on a GPU, float32 on the CPU", default="auto"
    )
    load_format: LoadFormat = _flag(
        "where the weights come from; dummy makes random ones", default="auto"
    )
    quantization: str | None = _flag(
        "how the checkpoint's weights are quantized, where config.json does not say it: awq, "
        "gptq, compressed-tensors, fp8 or bitsandbytes; they are dequantized when loading",
        short="-q",
        default=None,
    )
    verify_weights: str | None = _flag(
        "sha256 (compare the files with SHA256SUMS or the hub cache's names), finite (look for "
        "NaN and infinity), or both with a comma",
        default=None,
    )
    tensor_parallel_size: int = _flag(
        "devices that share each layer: heads, feed-forward and vocabulary", short="-tp", default=1
    )
    pipeline_parallel_size: int = _flag(
        "devices, or groups of --tensor-parallel-size of them, that share out the layers",
        short="-pp",
        default=1,
    )
    max_model_len: int | None = _flag(
        "longest context (prompt and output), in tokens", default=None
    )
    max_num_seqs: int | None = _flag("most requests in one step", default=None)
    max_num_batched_tokens: int | None = _flag("most tokens in one step", default=None)
    gpu_memory_utilization: float = _flag(
        "share of the device's memory that the engine may use", default=0.92
    )
    kv_cache_memory_bytes: int | None = _flag(
        "size of the block cache in bytes; overrides --gpu-memory-utilization", default=None
    )
    num_gpu_blocks_override: int | None = _flag("number of cache blocks, for tests", default=None)
    block_size: int = _flag("tokens in a cache block; a power of two", default=16)
    enable_prefix_caching: bool = _flag(
        "reuse the cached blocks of equal prompt prefixes", default=True
    )
    seed: int = _flag("seed of the sampler, for requests without one", default=0)
    enforce_eager: bool = _flag("compile on first use instead of before serving", default=False)
    attention_backend: AttentionBackend = _flag(
        "attention kernels; auto takes the fastest", default="auto"
    )
    num_scheduler_steps: int | None = _flag(
        "decode steps given to the device at once while no request waits: hides the host behind "
        "small models; by default while at most 8 requests run, named for any number; 1 turns it "
        "off",
        default=None,
    )
    generation_config: str = _flag(
        "'auto' takes sampling defaults from the model's generation_config.json, 'vllm' does not",
        default="auto",
    )
    max_logprobs: int = _flag("most logprobs a request may ask for", default=20)
    skip_tokenizer_init: bool = _flag("take and return token ids only", default=False)
    chat_template: str | None = _flag("chat template: a file or the template itself", default=None)
    trust_remote_code: bool = _flag("refused: no code from a checkpoint is ever run", default=False)
    compilation_cache_dir: str | None = _flag(
        "folder of the persistent compilation cache; '' turns it off", default=None
    )
    allow_compile_after_warmup: bool = _flag(
        "warn, instead of failing, when a step needs a compile after warm-up", default=False
    )

    coordinator_address: str | None = _flag(
        "host:port of process 0, where the processes of one engine meet; needs --num-processes and "
        "--process-id",
        default=None,
    )
    num_processes: int | None = _flag(
        "processes that share the model, over all hosts", default=None
    )
    process_id: int | None = _flag(
        "which of them this one is: 0 serves, the others follow it", default=None
    )
    distributed: bool = _flag(
        "take these three, where not given, from SLURM, Open MPI or Kubernetes", default=False
    )
    join_timeout: int = _flag("seconds that the processes wait for each other", default=300)

    def __post_init__(self) -> None:
        for name, literal in (
            ("dtype", Dtype),
            ("load_format", LoadFormat),
            ("attention_backend", AttentionBackend),
        ):
            value = getattr(self, name)
            if value not in get_args(literal):
                choices = ", ".join(get_args(literal))
                raise ValueError(f"{_flag_name(name)} must be one of {choices}; got {value!r}.")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_gpu_blocks_override",
            "num_scheduler_steps",
            "kv_cache_memory_bytes",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "num_processes",
            "join_timeout",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag_name(name)} must be at least 1, got {value}.")
        if self.block_size < 8 or self.block_size & (self.block_size - 1):
            raise ValueError(
                f"--block-size must be a power of two from 8 on, got {self.block_size}."
            )
        if (self.num_scheduler_steps or 1) > self.block_size:
            raise ValueError(
                f"--num-scheduler-steps must be at most --block-size {self.block_size}, "
                f"got {self.num_scheduler_steps}."
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}."
            )
        self._check_verification()
        self._check_processes()
        if self.trust_remote_code:
            raise ValueError(
                "--trust-remote-code is not supported: jaxllm runs no code from a checkpoint."
            )

    def _check_verification(self) -> None:
        unknown = self.verification - {*VERIFICATIONS}
        if unknown or (self.verify_weights is not None and not self.verification):
            raise ValueError(
                f"--verify-weights takes {' and '.join(VERIFICATIONS)}, got "
                f"{self.verify_weights!r}."
            )
        if self.verification and self.load_format == "dummy":
            raise ValueError("--verify-weights has nothing to verify with --load-format dummy.")

    def _check_processes(self) -> None:
        names = ("coordinator_address", "num_processes", "process_id")
        missing = [_flag_name(name) for name in names if getattr(self, name) is None]
        if missing and len(missing) < len(names) and not self.distributed:
            raise ValueError(
                f"{' and '.join(missing)} must be given too, or --distributed where SLURM, Open "
                "MPI or Kubernetes started the processes."
            )
        if self.coordinator_address is not None:
            host, _, port = self.coordinator_address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(
                    "--coordinator-address must be host:port, such as 10.0.0.1:1234, got "
                    f"{self.coordinator_address!r}."
                )
        if self.several_processes and self.pipeline_parallel_size > 1:
            raise ValueError(
                "--pipeline-parallel-size works within one process so far: over several take "
                "--tensor-parallel-size."
            )
        if self.process_id is not None and not 0 <= self.process_id < (
            self.num_processes or self.process_id + 1
        ):
            raise ValueError(
                f"--process-id must be from 0 to --num-processes {self.num_processes} less one, "
                f"got {self.process_id}."
            )

    @property
    def several_processes(self) -> bool:
        """Whether this engine is one of several processes that run the same steps."""
        return (self.num_processes or 1) > 1

    @property
    def verification(self) -> frozenset[str]:
        """What `verify_weights` asks for."""
        parts = (self.verify_weights or "").split(",")
        return frozenset(part.strip() for part in parts if part.strip())

    def replace(self, **changes: Any) -> "EngineConfig":
        """A copy with `changes`, checked anew."""
        return dataclasses.replace(self, **changes)

    def resolve(self, *, platform: str, context_length: int, offline: bool) -> "EngineConfig":
        """The config with every None that needs no device measurement filled.

        Args:
            platform: "gpu" or "cpu".
            context_length: the model's own longest context, in tokens.
            offline: whether `LLM` (throughput) or the server (latency) asks; as in vLLM they
                differ in max_num_batched_tokens.
        """
        gpu = platform == "gpu"
        dtype = {"float": "float32", "half": "float16"}.get(self.dtype, self.dtype)
        if dtype == "auto":
            dtype = "bfloat16" if gpu else "float32"
        max_model_len = self.max_model_len or context_length
        if max_model_len > context_length:
            raise ValueError(
                f"--max-model-len {max_model_len} exceeds the model's context of {context_length} "
                f"tokens (max_position_embeddings in its config.json)."
            )
        max_num_seqs = self.max_num_seqs or (256 if gpu else 16)
        tokens = self.max_num_batched_tokens
        if tokens is None:
            tokens = (16384 if offline else 8192) if gpu else 512
        if tokens < max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {tokens} is below --max-num-seqs {max_num_seqs}: "
                f"every running request needs a token a step. Raise the one or lower the other."
            )
        return self.replace(
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
        )


def _flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
