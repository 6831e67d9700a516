"""ServeConfig: the server's own settings, beside the engine's."""

from dataclasses import dataclass, field
from typing import Any, Literal


def _flag(help_text: str, **kwargs: Any) -> Any:
    return field(metadata={"help": help_text}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where and how to serve, under vLLM's flag names.

    Raises:
        ValueError: a value is out of range; the message names the flag.
    """

    host: str | None = _flag("address to listen on; all if left out", default=None)
    port: int = _flag("port to listen on; 0 takes a free one", default=8000)
    api_key: tuple[str, ...] | None = _flag(
        "key that clients must send as a bearer token; may be given several times", default=None
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = _flag(
        "log level of the HTTP server", default="info"
    )
    disable_uvicorn_access_log: bool = _flag("no log line a request", default=False)
    shutdown_timeout: float = _flag(
        "seconds that running requests get to end after SIGTERM or Ctrl-C", default=0.0
    )
    stall_timeout: float = _flag(
        "seconds without a step, with requests running, until /health gives 503", default=120.0
    )
    max_body_bytes: int = _flag("largest request body", default=64 * 2**20)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must be between 0 and 65535, got {self.port}.")
        if self.api_key is not None and not all(self.api_key):
            raise ValueError("--api-key must not be empty.")
        for name in ("shutdown_timeout", "stall_timeout", "max_body_bytes"):
            if not getattr(self, name) >= 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be at least 0, got {getattr(self, name)}.")
