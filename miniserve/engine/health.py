"""Where the engine is in its life, and what those are told who want something of it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineStatus(StrEnum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ok"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    STOPPED = "stopped"
    DEAD = "dead"  # could not be built, or hit an error that it cannot go on after


STUCK = "stuck"  # shown in place of "ok" while a step takes far too long
DETAILS: dict[str, str] = {
    EngineStatus.LOADING: "the model is being loaded; try again in a moment",
    EngineStatus.DRAINING: "the server is shutting down",
    EngineStatus.STOPPED: "the server has shut down",
    EngineStatus.DEAD: "the engine has failed, and the server must be restarted; its log says why",
}


@dataclass(frozen=True, slots=True)
class Health:
    """Whether new requests can be served, and why not.

    Attributes:
        status: a value of `EngineStatus`, or "stuck".
        last_step_age_seconds: since the last step ended, or the current work began; 0 when there is no work.
    """

    status: str
    healthy: bool
    last_step_age_seconds: float
    detail: str | None = None
