"""A pure-JAX inference engine for large language models: the whole public API.

The names load on first use, so that `import jaxllm` starts no accelerator.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.errors import JaxllmError
    from jaxllm.llm import LLM
    from jaxllm.outputs import RequestOutput
    from jaxllm.registration import register_model
    from jaxllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "EngineConfig",
    "JaxllmError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "register_model",
]

_HOME = {
    "LLM": "jaxllm.llm",
    "EngineConfig": "jaxllm.config",
    "JaxllmError": "jaxllm.errors",
    "RequestOutput": "jaxllm.outputs",
    "SamplingParams": "jaxllm.sampling_params",
    "register_model": "jaxllm.registration",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
