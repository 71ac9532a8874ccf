"""`GET /health`: whether the engine lives. Open, and never waits for the engine."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from miniserve.api.deps import EngineDep
from miniserve.api.schemas.server import HealthResponse

router = APIRouter(tags=["server"])


@router.get(
    "/health",
    summary="Whether the engine lives",
    response_model=HealthResponse,
    responses={503: {"model": HealthResponse, "description": "it does not, or not yet"}},
)
async def get_health(engine: EngineDep) -> Response:
    """200 only while the engine thread is alive and stepping."""
    health = engine.health()
    fields = asdict(health)
    healthy = fields.pop("healthy")
    return JSONResponse(fields, status_code=200 if healthy else 503)
