"""The base of every model's config: config.json read strictly, under its own names."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.rope_config import RopeConfig

logger = logging.getLogger(__name__)

_HARMLESS_NAMES = """
architectures model_type auto_map dtype torch_dtype transformers_version use_cache name_or_path
initializer_range initializer_factor attention_dropout hidden_dropout embd_pdrop resid_pdrop
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
pretraining_tp chunk_size_feed_forward is_decoder is_llama_config output_attentions
output_hidden_states return_dict problem_type id2label label2id num_labels finetuning_task
task_specific_params tokenizer_class attn_implementation gradient_checkpointing torchscript
use_bfloat16 tf_legacy_loss rope_theta rope_scaling rope_parameters
original_max_position_embeddings partial_rotary_factor max_sequence_length transformers.js_config
unsloth_fixed unsloth_version loss_type max_length min_length do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Keys that change no number of the forward pass here (RopeConfig reads and checks the rotary
ones), so that every other unknown key can be refused."""

_HARMLESS_OFF = frozenset(
    [
        "use_mrope",
        "use_sliding_window",
        "is_encoder_decoder",
        "add_cross_attention",
        "tie_encoder_decoder",
    ]
)
"""Flags for what is not done here, which are false in many a checkpoint."""

_SET_LATER = ("rope", "tensor_parallel_size", "kv_replicas")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of a decoder under HF's names. A subclass adds its own and their checks.

    Raises:
        ValueError: a field's value is impossible or not supported; it is named.
    """

    architecture: ClassVar[str] = ""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    # Not of config.json: what `with_tensor_parallel` sets.
    tensor_parallel_size: int = 1
    kv_replicas: int = 1

    def __post_init__(self) -> None:
        for item in dataclasses.fields(ModelConfig):
            value = getattr(self, item.name)
            if item.type is int and value < 1:
                raise _bad(item.name, value, "must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _bad(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads = {self.num_attention_heads}",
            )
        if not 0 <= self.rms_norm_eps < 1:
            raise _bad("rms_norm_eps", self.rms_norm_eps, "must be from 0 to 1")
        if self.head_dim % 2:
            raise _bad("head_dim", self.head_dim, "must be even for rotary positions")
        if self.hidden_act not in ACTIVATIONS:
            raise _bad("hidden_act", self.hidden_act, f"is not one of {', '.join(ACTIVATIONS)}")

    @classmethod
    def from_hf(cls, config_json: dict[str, Any]) -> Self:
        """Reads config.json in HF's form; null counts as absent.

        Raises:
            ValueError: required keys are missing (all are listed), a value has the wrong type or
                is not supported, or an unknown key could change the numbers; it is named.
        """
        given = {key: value for key, value in config_json.items() if value is not None}
        if "quantization_config" in given:
            raise _bad(
                "quantization_config",
                given["quantization_config"],
                "is not supported: use a checkpoint without quantization",
            )
        own = {item.name: item for item in dataclasses.fields(cls) if item.name not in _SET_LATER}
        cls._check_unknown({key: value for key, value in given.items() if key not in own})
        values = {
            name: _typed(name, item.type, given[name])
            for name, item in own.items()
            if name in given
        }
        values = cls._derived(values) | values
        missing = [
            name
            for name, item in own.items()
            if name not in values and item.default is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)} for {cls.architecture}.")
        return cls(**values, rope=RopeConfig.from_hf(given))

    @classmethod
    def _derived(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What the fields are that follow from others of `values` where they are absent."""
        heads = values.get("num_attention_heads", 1)
        return {
            "num_key_value_heads": heads,
            "head_dim": values.get("hidden_size", 1) // max(heads, 1),
        }

    @classmethod
    def _check_unknown(cls, unknown: dict[str, Any]) -> None:
        """Refuses what may change numbers, all at once; a text or a flag that is off only warns."""
        refused = []
        for key, value in unknown.items():
            if key in _HARMLESS or key.startswith("_"):
                continue
            if key == "layer_types" and value == ["full_attention"] * len(value):
                continue
            if isinstance(value, str) or value is False:
                if value is False and key in _HARMLESS_OFF:
                    continue
                logger.warning("config.json: %s = %r is not known and ignored", key, value)
                continue
            refused.append(f"{key} = {value!r}")
        if refused:
            verb = "is" if len(refused) == 1 else "are"
            raise ValueError(
                f"config.json: {', '.join(refused)} {verb} not supported by {cls.architecture}."
            )

    def with_tensor_parallel(self, size: int) -> Self:
        """The config of the model as `size` devices share it.

        With fewer kv heads than devices each kv head is there `kv_replicas` times, which share
        out its query heads: num_key_value_heads counts the copies, and query heads keep their
        order.

        Raises:
            ValueError: a dimension does not divide; names it, the axis and the sizes that would.
        """
        problem = self._indivisible(size)
        if problem:
            works = ", ".join(map(str, self.tensor_parallel_sizes()))
            raise ValueError(
                f"--tensor-parallel-size {size} does not divide {problem} over the mesh axis "
                f"'tp'. Sizes that work: {works}."
            )
        heads = max(self.num_key_value_heads, size)
        return dataclasses.replace(
            self,
            num_key_value_heads=heads,
            tensor_parallel_size=size,
            kv_replicas=heads // self.num_key_value_heads,
        )

    def tensor_parallel_sizes(self, most: int = 64) -> list[int]:
        """The numbers of devices, up to `most`, that can share the model's layers."""
        return [size for size in range(1, most + 1) if not self._indivisible(size)]

    def _indivisible(self, size: int) -> str:
        """The first dimension that `size` devices cannot share, with its size; "" if none."""
        for name in ("num_attention_heads", "intermediate_size"):
            if getattr(self, name) % size:
                return f"{name} = {getattr(self, name)}"
        kv_heads = self.num_key_value_heads
        return f"num_key_value_heads = {kv_heads}" if kv_heads % size and size % kv_heads else ""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: vocab_size, up to the next that all devices share."""
        size = self.tensor_parallel_size
        return -(-self.vocab_size // size) * size

    @property
    def context_length(self) -> int:
        """Tokens the model may see, after rope scaling."""
        return self.rope.context_length

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, itself included; None is all."""
        return None


@dataclass(frozen=True, kw_only=True)
class SlidingWindowConfig(ModelConfig):
    """Qwen's rule for which layers see a window only.

    An explicit layer_types decides; else the layers from max_window_layers on slide, and none
    where use_sliding_window is false.
    """

    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_window_layers < 0:
            raise _bad("max_window_layers", self.max_window_layers, "must be at least 0")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise _bad("sliding_window", self.sliding_window, "must be at least 1")
        if not self.layer_types:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise _bad(
                "layer_types",
                list(self.layer_types),
                f"has {len(self.layer_types)} entries for num_hidden_layers = "
                f"{self.num_hidden_layers}",
            )
        for layer_type in self.layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise _bad("layer_types", layer_type, "is not full_attention or sliding_attention")
        if "sliding_attention" in self.layer_types and self._active_window is None:
            raise _bad(
                "layer_types",
                "sliding_attention",
                f"needs a window, but use_sliding_window = {self.use_sliding_window} and "
                f"sliding_window = {self.sliding_window}",
            )

    @property
    def _active_window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def window(self, layer: int) -> int | None:
        if self.layer_types:
            slides = self.layer_types[layer] == "sliding_attention"
        else:
            slides = layer >= self.max_window_layers
        return self._active_window if slides else None


def _bad(key: str, value: Any, problem: str) -> ValueError:
    return ValueError(f"config.json: {key} = {value!r} {problem}.")


def _typed(key: str, kind: Any, value: Any) -> Any:
    """`value`, if it is of the field's type (a float may be written as a whole number)."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise _bad(key, value, "must be a list of texts")
    wanted = int if kind == int | None else kind
    if isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return value
    raise _bad(key, value, f"must be of type {wanted.__name__}")
