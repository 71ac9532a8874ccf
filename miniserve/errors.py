"""Every error that miniserve raises on purpose, and the HTTP status each one maps to.

    MiniserveError                  500
    ├── StartupError                500   refused at start: one line on stderr, exit code 2
    │   ├── ConfigError                   a flag or an EngineConfig field is wrong
    │   └── ModelLoadError                the model cannot be found, read or trusted
    │       ├── CheckpointError           a file or a tensor is missing, damaged or misshapen
    │       ├── HubError                  the model hub cannot be reached or says no
    │       └── UnsupportedModelError     an architecture or a feature that is not implemented
    └── RequestError                400   one request is wrong; others are not touched
        ├── InvalidParameterError         a sampling parameter or a prompt is out of range
        └── ContextLengthError            the prompt (and its output) do not fit

The message always says what was wrong, with the value, and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class MiniserveError(Exception):
    """Base of all errors raised on purpose."""

    status: ClassVar[int] = 500


class StartupError(MiniserveError):
    """The engine cannot start as asked."""


class ConfigError(StartupError):
    """A flag or an `EngineConfig` field is wrong."""


class ModelLoadError(StartupError):
    """The model cannot be found, read or trusted."""


class CheckpointError(ModelLoadError):
    """A file or a tensor of the checkpoint is missing, damaged or misshapen."""


class HubError(ModelLoadError):
    """The model hub cannot be reached, or does not hand out the model."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint asks for something that miniserve does not implement."""


class RequestError(MiniserveError):
    """One request is wrong.

    `param` names the request field at fault, `code` is OpenAI's error code, both may be None.
    """

    status: ClassVar[int] = 400
    code: ClassVar[str | None] = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameterError(RequestError):
    """A sampling parameter or a prompt is out of range."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt and its output, do not fit into the context or the KV cache."""

    code: ClassVar[str | None] = "context_length_exceeded"
