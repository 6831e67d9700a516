"""What goes wrong while a checkpoint is opened or loaded."""

from jaxllm.errors import JaxllmError


class CheckpointError(JaxllmError, ValueError):
    """A checkpoint cannot be read; the message names the file, what is wrong and the way out."""


class LoadError(CheckpointError):
    """A readable checkpoint does not fit the model; the message lists every difference."""
