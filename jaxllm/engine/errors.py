"""What can go wrong between the front and the engine process."""


class EngineError(RuntimeError):
    """Something failed on our side, not the user's."""


class EngineStartError(EngineError):
    """The engine could not start; the message is meant for the user."""


class EngineDeadError(EngineError):
    """The engine process failed or ended; nothing can be generated any more."""


class EngineStoppedError(EngineError):
    """The engine is shutting down, or not ready yet."""


class RequestRejectedError(ValueError):
    """The engine refused this one request; the message says why."""
