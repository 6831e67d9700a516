"""config.json's rotary settings, in every spelling that checkpoints use, as one dataclass."""

import logging
from dataclasses import dataclass, field, fields
from typing import Any

logger = logging.getLogger(__name__)

_USED_BY = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""The settings that each scaling reads."""

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}

_HARMLESS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary settings under HF's names; what a scaling does not read keeps its default."""

    rope_theta: float
    max_position_embeddings: int
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = field(default=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def context_length(self) -> int:
        """Tokens that the scaled positions are made for."""
        match self.rope_type:
            case "linear" | "dynamic":
                return int(self.max_position_embeddings * self.factor)
            case "yarn":
                scaled = int(self.original_max_position_embeddings * self.factor)
                return max(scaled, self.max_position_embeddings)
            case _:  # llama3's max_position_embeddings is the scaled one
                return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config_json: dict[str, Any]) -> "RopeConfig":
        """Reads rope_theta and rope_scaling, or the newer rope_parameters; null counts as absent.

        Both `rope_type` and the older `type` are read, and the former wins, as in transformers.

        Raises:
            ValueError: a scaling of unknown or missing type, a missing or unknown setting, or a
                bad value, named.
        """
        where, given = _settings(config_json)
        rope_type = _rope_type(where, given)
        limit = config_json["max_position_embeddings"]
        used = {name: given[name] for name in given if name in _USED_BY[rope_type]}

        for name in given.keys() - _USED_BY[rope_type] - _HARMLESS:
            if name not in {item.name for item in fields(cls)}:
                raise ValueError(f"config.json: {where}.{name} = {given[name]!r} is not known.")
            logger.warning("config.json: %s.%s is not used by %r", where, name, rope_type)
        partial = given.get("partial_rotary_factor", config_json.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise ValueError(f"config.json: partial_rotary_factor = {partial!r} is not supported.")

        if "original_max_position_embeddings" in _USED_BY[rope_type]:
            # A value outside the dict is the one that was used for training (as in Phi-3).
            outside = config_json.get("original_max_position_embeddings")
            original = outside or used.get("original_max_position_embeddings")
            if rope_type == "yarn" and original and "factor" not in used:
                used["factor"] = limit / original
            used["original_max_position_embeddings"] = original or limit
        for name in _REQUIRED.get(rope_type, ()):
            if name not in used:
                raise ValueError(f"config.json: {where} of type {rope_type!r} needs {name!r}.")
        for name, value in used.items():
            _check_number(f"{where}.{name}", value, may_be_bool=name == "truncate")
        theta = given.get("rope_theta", config_json.get("rope_theta", 10000.0))
        _check_number("rope_theta", theta)
        config = cls(
            rope_theta=float(theta), max_position_embeddings=limit, rope_type=rope_type, **used
        )
        if rope_type == "llama3" and config.high_freq_factor <= config.low_freq_factor:
            raise ValueError(
                f"config.json: {where}.high_freq_factor = {config.high_freq_factor} must exceed "
                f"low_freq_factor = {config.low_freq_factor}."
            )
        return config


def _settings(config_json: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key that holds the settings, and the settings that are not null."""
    present = [name for name in ("rope_scaling", "rope_parameters") if config_json.get(name)]
    for name in present:
        if not isinstance(config_json[name], dict):
            raise ValueError(f"config.json: {name} = {config_json[name]!r} must be an object.")
    if len(present) == 2 and config_json["rope_scaling"] != config_json["rope_parameters"]:
        logger.warning("config.json: rope_scaling differs from rope_parameters and wins")
    where = present[0] if present else "rope_scaling"
    given = (
        {k: v for k, v in config_json.get(where, {}).items() if v is not None} if present else {}
    )
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"config.json: {where}.{nested[0]} = {given[nested[0]]!r}: settings by layer type are "
            f"not supported for this architecture."
        )
    return where, given


def _rope_type(where: str, given: dict[str, Any]) -> str:
    new, old = given.get("rope_type"), given.get("type")
    if new is not None and old is not None and new != old:
        logger.warning("config.json: %s.rope_type %r wins over type %r", where, new, old)
    rope_type = new if new is not None else old
    if rope_type is None:
        others = sorted(given.keys() - _HARMLESS)
        if others:
            raise ValueError(
                f"config.json: {where} sets {', '.join(others)} but neither 'rope_type' nor "
                f"'type'; add \"rope_type\" with one of {', '.join(_USED_BY)}."
            )
        return "default"
    if rope_type not in _USED_BY:
        raise ValueError(
            f"config.json: {where}.rope_type = {rope_type!r} is not supported; "
            f"supported are {', '.join(_USED_BY)}."
        )
    return rope_type


def _check_number(name: str, value: Any, *, may_be_bool: bool = False) -> None:
    if isinstance(value, bool):
        if may_be_bool:
            return
    elif isinstance(value, int | float) and value > 0 and not may_be_bool:
        return
    wanted = "true or false" if may_be_bool else "a number above 0"
    raise ValueError(f"config.json: {name} = {value!r} must be {wanted}.")
