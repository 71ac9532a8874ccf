"""`GET /v1/models` and `GET /v1/models/{id}`: the one model, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miniserve.api.deps import Server, ServerDep, require_key
from miniserve.api.openapi import errors
from miniserve.api.schemas.server import ModelCard, ModelList

router = APIRouter(tags=["models"], dependencies=[Depends(require_key)])

_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}


@router.get("/v1/models", summary="List the models", response_model=ModelList, responses=errors(401, 503))
async def list_models(server: ServerDep) -> Response:
    """One card a name."""
    return JSONResponse({"object": "list", "data": [_card(server, name) for name in server.model_names]})


@router.get(
    "/v1/models/{model_id:path}",
    summary="Show a model",
    response_model=ModelCard,
    responses=errors(401, 404, 503),
    openapi_extra={"parameters": [_MODEL_ID]},
)
async def get_model(request: Request, server: ServerDep) -> Response:
    """Its card. A name may contain slashes."""
    return JSONResponse(_card(server, server.model_name(request.path_params["model_id"])))


def _card(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "miniserve",
        "root": server.model_names[0],
        "parent": None,
        "max_model_len": server.engine.parts.resolved.max_model_len,
    }
