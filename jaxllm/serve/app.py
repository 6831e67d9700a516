"""The FastAPI application: routes, error shapes and what stands before them."""

from fastapi import FastAPI

from jaxllm import __version__
from jaxllm.serve import routes_chat, routes_completions, routes_meta
from jaxllm.serve.errors import install_handlers
from jaxllm.serve.middleware import Gate
from jaxllm.serve.state import ServerState


def make_app(state: ServerState) -> FastAPI:
    """The application around `state`; it answers 503 until the engine is ready."""
    # No interactive pages: they would load scripts from elsewhere.
    app = FastAPI(title="jaxllm", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    app.add_middleware(Gate, keys=state.serve_config.api_key or (), engine=state.engine)
    install_handlers(app)
    for routes in (routes_completions, routes_chat, routes_meta):
        app.include_router(routes.router)
    return app
