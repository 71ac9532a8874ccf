"""The application: routes, middleware and error handlers around an engine. Knows no uvicorn, sockets or signals."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from miniserve.api.deps import Server
from miniserve.api.errors import install_error_handlers
from miniserve.api.middleware import install_middleware
from miniserve.api.openapi import install_openapi
from miniserve.api.routers import chat, completions, health, metrics, models, stats, tokenize
from miniserve.api.routers import version as version_router
from miniserve.config import ServerConfig
from miniserve.engine.async_engine import AsyncEngine

ROUTERS = (chat, completions, models, tokenize, health, stats, metrics, version_router)


def create_app(engine: AsyncEngine, config: ServerConfig, model_names: tuple[str, ...]) -> FastAPI:
    """The application for `engine`, which it starts and stops with its own life.

    Args:
        model_names: what the model is called in the API; the first is its name, the others are aliases.
    """
    server = Server.create(engine, config, model_names, started=int(time.time()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()
            server.workers.shutdown(wait=False, cancel_futures=True)

    app = FastAPIOffline(  # /docs with its scripts from here: the page would fetch them from a CDN
        title="miniserve",
        version=version("miniserve"),
        description="OpenAI-compatible inference server",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = server
    app.state.engine = engine
    for module in ROUTERS:
        app.include_router(module.router)
    install_error_handlers(app)
    install_middleware(app, metrics=engine.metrics, model_name=model_names[0], allowed_origins=config.allowed_origins)
    install_openapi(app, with_keys=bool(config.api_key))
    return app
