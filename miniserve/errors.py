"""Every error that miniserve raises on purpose, and the HTTP status each one maps to.

    MiniserveError                  500
    ├── StartupError                500   refused at start: one line on stderr, exit code 2
    │   ├── ConfigError                   a flag or an EngineConfig field is wrong
    │   ├── KernelBuildError              the native kernels cannot be compiled or loaded here
    │   └── ModelLoadError                the model cannot be found, read or trusted
    │       ├── CheckpointError           a file or a tensor is missing, damaged or misshapen
    │       ├── HubError                  the model hub cannot be reached or says no
    │       └── UnsupportedModelError     an architecture or a feature that is not implemented
    ├── RequestError                400   one request is wrong; others are not touched
    │   ├── InvalidParameterError         a field is malformed or out of range
    │   ├── UnsupportedParameterError     a field that would change the answer and is not implemented
    │   ├── ContextLengthError            the prompt (and its output) do not fit
    │   ├── AuthenticationError     401   no key, or a wrong one
    │   ├── ModelNotFoundError      404   a model that is not served here
    │   ├── RequestTooLargeError    413   the body is over the limit
    │   └── QueueFullError          429   too many requests wait already
    ├── EngineUnavailableError      503   loading, shutting down, stuck, or dead
    └── InternalError               500   our fault: a request that the engine could not finish
        └── DeviceFailedError             the accelerator computes nothing any more: the end of the engine

The message always says what was wrong, with the value, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

_MAX_SHOWN = 100  # characters of a wrong value


class MiniserveError(Exception):
    """Base of all errors raised on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"  # OpenAI's error type and code
    code: ClassVar[str | None] = "internal_error"
    param: str | None = None


class StartupError(MiniserveError):
    """The engine cannot start as asked."""


class ConfigError(StartupError):
    """A flag or an `EngineConfig` field is wrong."""


class KernelBuildError(StartupError):
    """The native kernels cannot be compiled or loaded on this machine."""


class ModelLoadError(StartupError):
    """The model cannot be found, read or trusted."""


class CheckpointError(ModelLoadError):
    """A file or a tensor of the checkpoint is missing, damaged or misshapen."""


class HubError(ModelLoadError):
    """The model hub cannot be reached, or does not hand out the model."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint asks for something that miniserve does not implement."""


class RequestError(MiniserveError):
    """One request is wrong. `param` names the request field at fault, where it is one."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameterError(RequestError):
    """A field is malformed or out of range."""


class UnsupportedParameterError(RequestError):
    """A field that would change the answer and is not implemented: refused, never ignored."""

    code: ClassVar[str | None] = "unsupported_parameter"


class ContextLengthError(RequestError):
    """The prompt, or the prompt and its output, do not fit into the context or the KV cache."""

    code: ClassVar[str | None] = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    status: ClassVar[int] = 401
    type: ClassVar[str] = "authentication_error"
    code: ClassVar[str | None] = "invalid_api_key"


class ModelNotFoundError(RequestError):
    """A model that is not served here."""

    status: ClassVar[int] = 404
    code: ClassVar[str | None] = "model_not_found"


class RequestTooLargeError(RequestError):
    """The body is over the limit."""

    status: ClassVar[int] = 413
    code: ClassVar[str | None] = "request_too_large"


class QueueFullError(RequestError):
    """Too many requests wait already; later there may be room."""

    status: ClassVar[int] = 429
    type: ClassVar[str] = "rate_limit_error"
    code: ClassVar[str | None] = "queue_full"


class EngineUnavailableError(MiniserveError):
    """The engine is loading, shutting down or dead."""

    status: ClassVar[int] = 503
    code: ClassVar[str | None] = "engine_unavailable"


class InternalError(MiniserveError):
    """Our fault: the engine could not finish a request."""


class DeviceFailedError(InternalError):
    """The accelerator has failed, and computes nothing any more until the process is started again."""


def shown(value: object) -> str:
    """A wrong value in an error message, in the words of JSON and cut.

    An integer may have thousands of digits, a string a megabyte; in Python, a value may be of any type.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "an array"
    if not isinstance(value, (int, float, str)):
        return type(value).__name__
    text = repr(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
