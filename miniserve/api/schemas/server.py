"""Models, health, stats, version."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miniserve.api.schemas.common import ResponseModel


class ModelCard(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="the model that an alias stands for")
    parent: None = None
    max_model_len: int = Field(description="longest prompt + output in tokens")


class ModelList(ResponseModel):
    """All served models: names of one model."""

    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(ResponseModel):
    """Whether the engine thread is alive and stepping."""

    status: Literal["loading", "ok", "draining", "stopped", "dead", "stuck"]
    last_step_age_seconds: float = Field(description="0 when idle")
    detail: str | None = None


class StatsResponse(ResponseModel):
    """What a person would look at."""


class VersionResponse(ResponseModel):
    """The server's version."""

    version: str
