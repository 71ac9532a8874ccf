"""`serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniserve.cli.console import progress_bar, say
from miniserve.cli.flags import add_config_flags, engine_config, server_config
from miniserve.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from miniserve.engine.build import EngineParts
    from miniserve.engine.metrics import MetricsHook


def add_command(commands: Any) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("serve", help="serve the OpenAI API over HTTP")
    add_config_flags(parser, "server", ServerConfig)
    add_config_flags(parser, "engine", EngineConfig)
    parser.set_defaults(command=_serve)


def _serve(args: argparse.Namespace) -> int:
    server, config = server_config(args), engine_config(args)
    from miniserve.api.app import create_app
    from miniserve.engine.async_engine import AsyncEngine
    from miniserve.server import serve

    def build(hooks: Sequence[MetricsHook]) -> EngineParts:
        from miniserve.engine.build import build_engine

        with progress_bar("loading") as progress:
            return build_engine(config, progress=progress, on_build=say, hooks=hooks)

    names = _model_names(server, config)
    engine = AsyncEngine(
        build,
        model_name=names[0],
        max_queued_requests=server.max_queued_requests,
        stuck_after=server.timeout_step,
    )
    serve(create_app(engine, server, names), engine, server, lambda url: _announce(engine.parts, names[0], url))
    return 0


def _model_names(server: ServerConfig, config: EngineConfig) -> tuple[str, ...]:
    """What clients call the model. Of a path only the last part: where it lies is nobody's business."""
    local = Path(config.model)
    return server.served_model_name or (local.name if local.exists() else config.model,)


def _announce(parts: EngineParts, name: str, url: str) -> None:
    backend = f"{parts.resolved.device}, {parts.backend_name}"
    for line in (*parts.summary, f"serving {name} on {url} ({backend})"):
        say(line)
