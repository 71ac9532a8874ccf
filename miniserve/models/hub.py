"""Models from the Hugging Face hub: download or cache, and one line that says why not.

HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT and the cache's place are honoured by huggingface_hub itself. What is in the
folder is not known here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from miniserve.errors import HubError

_WEIGHTS = ["*.safetensors"]
_OTHERS = ["*.json", "*.jinja", "*.model", "*.txt"]
# Subfolders hold other formats of the same weights; "consolidated" files are Mistral's second copy of them.
_IGNORED = ["*/*", "consolidated*"]
_PROBE_SECONDS = 5.0


def download(model_id: str, revision: str | None, *, weights: bool = True) -> Path:
    """The local folder of a model, downloaded where the cache does not have it yet.

    When the hub cannot be reached, a complete cached copy serves. Progress shows on a terminal only.

    Args:
        model_id: "owner/name".
        revision: a branch, tag or commit; None is the default branch.
        weights: whether the weight files are needed, or only the configuration and the tokenizer.

    Raises:
        HubError: the model is neither on the hub for us nor in the cache; the message names the cause.
    """
    from huggingface_hub import HfApi, errors

    try:
        # The library's own first request has no time limit: this one finds out whether there is a hub at all.
        HfApi().model_info(model_id, revision=revision, timeout=_PROBE_SECONDS)
    except errors.HFValidationError as error:
        raise _refusal(model_id, f"not a model id ({_first_line(error)})") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise _refusal(model_id, _answer(error, revision)) from error
    except Exception as error:  # whatever the HTTP library raises
        return _from_cache(model_id, revision, weights, error)
    return _from_hub(model_id, revision, weights)


def _from_hub(model_id: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=_patterns(weights),
            ignore_patterns=_IGNORED,
        )
    except Exception as error:  # whatever the HTTP library raises
        raise _refusal(model_id, _answer(error, revision)) from error
    return Path(folder)


def _from_cache(model_id: str, revision: str | None, weights: bool, cause: Exception) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=_patterns(weights),
            ignore_patterns=_IGNORED,
            local_files_only=True,
        )
    except errors.LocalEntryNotFoundError as error:
        incomplete = isinstance(error, errors.IncompleteSnapshotError)
        cached = "the cached copy is incomplete" if incomplete else "it is not in the cache"
        raise _refusal(model_id, f"{_answer(cause, revision)}, and {cached}") from cause
    return Path(folder)


def _patterns(weights: bool) -> list[str]:
    return _OTHERS + _WEIGHTS if weights else _OTHERS


def _answer(error: Exception, revision: str | None) -> str:
    """The cause in a few words."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, errors.GatedRepoError):
        return "access is gated (accept the model's terms on the hub, and set HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such model, or a private one (check the name, and HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision}"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub answered with status {error.response.status_code}"
    return f"the hub cannot be reached ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _refusal(model_id: str, cause: str) -> HubError:
    return HubError(f"cannot get {model_id} from the hub: {cause}; --model smollm2 is embedded and needs no network")
