"""The base of this package's own errors."""


class JaxllmError(Exception):
    """What jaxllm refuses on purpose; the message names the thing, the value and the way out."""
