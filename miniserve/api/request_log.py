"""`--log-requests`: one line a prompt with what was asked. Only then is user text logged."""

from __future__ import annotations

import logging
from dataclasses import fields

from miniserve.api.errors import cut
from miniserve.sampling_params import SamplingParams

MAX_PROMPT_LENGTH = 2000
MAX_VALUE_LENGTH = 200
_DEFAULTS = SamplingParams()

logger = logging.getLogger(__name__)


def log_request(request_id: str, prompt: str, sampling: SamplingParams, n: int | None) -> None:
    """Log one prompt, as JSON, and the parameters that are not the default."""
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    named = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    shown = " ".join(f"{name}={cut(repr(value), MAX_VALUE_LENGTH)}" for name, value in named.items())
    logger.info("request %s: n=%d %s prompt=%s", request_id, n or 1, shown, cut(prompt, MAX_PROMPT_LENGTH))
