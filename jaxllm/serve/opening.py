"""From a started engine to one that takes requests."""

import asyncio
import logging

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.serve.state import ServerState

logger = logging.getLogger(__name__)

TOKENIZER_GRACE_S = 15.0


async def open_engine(state: ServerState) -> None:
    """Waits for engine and tokenizer and reads the sampling defaults.

    Raises:
        EngineStartError, ValueError, OSError: one of them failed; the message is for the user.
    """
    state.engine.open(await _load(state.engine))
    logger.info("%s", state.take_defaults())


async def _load(engine: AsyncEngine) -> Tokenizer | None:
    """The tokenizer, loaded while the engine warms up."""
    config = engine.config
    if config.skip_tokenizer_init:
        await engine.wait_ready()
        return None
    load = asyncio.create_task(
        asyncio.to_thread(
            Tokenizer.load,
            config.tokenizer or config.model,
            revision=config.revision,
            chat_template=config.chat_template,
        )
    )
    ready = asyncio.create_task(engine.wait_ready())
    try:
        await asyncio.wait((load, ready), return_when=asyncio.FIRST_EXCEPTION)
        if load.done() and load.exception() is not None and not ready.done():
            # What ails the tokenizer may ail the model, and the engine says it better.
            await asyncio.wait((ready,), timeout=TOKENIZER_GRACE_S)
        if ready.done():
            await ready
        return await load
    finally:
        for task in (load, ready):
            task.cancel()
        await asyncio.gather(load, ready, return_exceptions=True)
