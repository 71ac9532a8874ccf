"""`GET /version`. Open."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miniserve.api.schemas.server import VersionResponse

router = APIRouter(tags=["server"])


@router.get("/version", summary="The server's version", response_model=VersionResponse)
async def get_version(request: Request) -> Response:
    """As in the package's metadata."""
    return JSONResponse({"version": request.app.version})
