"""`GET /metrics`: for Prometheus. Open."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from miniserve.api.deps import EngineDep

router = APIRouter(tags=["server"])


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def get_metrics(engine: EngineDep) -> Response:
    """All of them, in the text format."""
    return Response(generate_latest(engine.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
