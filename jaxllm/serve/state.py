"""What all routes share: the engine, the names of the model, the sampling defaults."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.sampling_params import SamplingParams, generation_defaults
from jaxllm.serve.errors import ApiError
from jaxllm.serve.metrics import Metrics
from jaxllm.serve.options import ServeConfig
from jaxllm.serve.snapshot import Origins


@dataclass(slots=True)
class ServerState:
    """Lives in `app.state.server`.

    Attributes:
        names: that the model answers to; the first is reported.
        defaults: of SamplingParams, from the model's generation_config.json.
        origins: of the settings that a file or a flag has set.
        created: Unix time of the start.
    """

    engine: AsyncEngine
    serve_config: ServeConfig
    metrics: Metrics
    names: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def configs(self) -> tuple[Any, Any]:
        """The engine's settings, resolved once it is ready, and the server's."""
        return self.engine.config, self.serve_config

    @property
    def health(self) -> Literal["starting", "ready", "stalled", "stopping", "dead"]:
        """ready: the engine takes requests and its steps go on."""
        return "stalled" if self.engine.stalled else self.engine.state

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ApiError(
                "This server takes token ids only (--skip-tokenizer-init): send the prompt as a "
                "list of token ids.",
                param="prompt",
                code="no_tokenizer",
            )
        return self.engine.tokenizer

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 unless `model` is ours; leaving it out is fine."""
        if model and model not in self.names:
            raise ApiError(
                f"The model {model!r} does not exist; this server has {', '.join(self.names)}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def reported_name(self, model: str | None) -> str:
        """The model's name in an answer: the one that the client used."""
        return model or self.name

    def take_defaults(self) -> str:
        """Reads the sampling defaults once the engine is ready; returns a line for the log.

        Raises:
            ValueError: the model's generation_config.json holds a value out of range.
        """
        if self.engine.config.generation_config != "auto":
            return "sampling defaults: none of the model's (--generation-config)"
        self.defaults = generation_defaults(self.engine.generation_config)
        try:
            SamplingParams(**self.defaults)
        except ValueError as error:
            raise ValueError(
                f"generation_config.json: {error} Use --generation-config vllm to ignore the file."
            ) from None
        shown = ", ".join(f"{k}={v}" for k, v in self.defaults.items()) or "none"
        return f"sampling defaults of generation_config.json: {shown}"
