"""`GET /stats`: what a person would look at with curl. Open."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from miniserve.api.deps import EngineDep
from miniserve.api.schemas.server import StatsResponse

router = APIRouter(tags=["server"])


@router.get("/stats", summary="The server at a glance", response_model=StatsResponse)
async def get_stats(engine: EngineDep) -> Response:
    """Counts and rates of the engine."""
    return JSONResponse(engine.stats.snapshot())
