"""A model's class and config from config.json, with the file's name in every complaint."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.converters.errors import CheckpointError

# Beyond any model: a damaged number would have the engine build layers until memory ends.
MAX_LAYERS = 2048


def read_model_config(
    resolve: Callable[[list[str]], Any], config: Mapping[str, Any], path: Path
) -> tuple[Any, Any]:
    """The class that serves `config`, and `class.Config.from_hf(config)`.

    Args:
        resolve: finds the class of config.json's `architectures`.
        config: as `tied_head.effective_config` gives it.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: no such class, or a value is missing, impossible or of the wrong type.
        ImportError: the module of the class cannot be imported.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        model_class = resolve(config.get("architectures") or [])
        model_config = model_class.Config.from_hf(config)
    except CheckpointError:
        raise
    except ValueError as error:
        text = str(error).removeprefix("config.json: ")
        raise CheckpointError(f"{file}: {text}") from error
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise CheckpointError(
            f"{file} has a value of the wrong type or size: {type(error).__name__}: {error}."
        ) from error
    if model_config.num_hidden_layers > MAX_LAYERS:
        raise CheckpointError(
            f"{file}: num_hidden_layers = {model_config.num_hidden_layers} is more than any "
            f"model's; at most {MAX_LAYERS} can be served."
        )
    return model_class, model_config
