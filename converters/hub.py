"""Checkpoints from the Hugging Face hub, through huggingface_hub and its cache."""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.safetensors_folder import SAFETENSORS, Layout, read_json
from jaxllm.converters.torch_folder import PYTORCH

# All but the weights: configuration, tokenizer, chat template.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_SUBFOLDERS = ("*/*",)  # other formats and copies of the same weights

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}(?:/{_PART})?")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: "model" or "owner/model"."""
    return _HUB_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def download(
    model: str, *, revision: str | None = None, weights: bool = True, load_format: str = "auto"
) -> Path:
    """The local folder of hub model `model`, downloaded as far as it is not in the cache.

    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE act as everywhere. Of the weights, only the
    files that the index names are fetched, and PyTorch's only if there are no safetensors.

    Raises:
        CheckpointError: no such model, no access, or not in the cache while offline.
    """
    folder = _snapshot(model, revision, _SMALL_FILES)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"hub model {model!r} has no config.json. If it holds GGUF files, download one with "
            f"`hf download {model} FILE.gguf` and give its path."
        )
    if not weights:
        return folder
    if load_format != "pt":
        folder = _with_weights(folder, model, revision, SAFETENSORS)
    if load_format == "pt" or (load_format == "auto" and not SAFETENSORS.in_folder(folder)):
        folder = _with_weights(folder, model, revision, PYTORCH)
    return folder


def _with_weights(folder: Path, model: str, revision: str | None, layout: Layout) -> Path:
    index = folder / layout.index
    files = [layout.single]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        files = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    return _snapshot(model, revision, files) if files else folder


def _snapshot(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    # Imported here: it takes half a second, which local models need not wait for.
    import httpx
    from huggingface_hub import constants, errors

    where = f"{model!r} (revision {revision!r})" if revision else repr(model)
    nowhere = f"no model {where}: there is no such local folder,"
    offline = constants.HF_HUB_OFFLINE
    try:
        try:
            return _fetch(model, revision, patterns, local_files_only=offline)
        except httpx.TransportError as error:
            unreachable = error
        try:
            return _fetch(model, revision, patterns, local_files_only=True)
        except errors.LocalEntryNotFoundError as error:
            raise error from unreachable
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"hub model {where} is gated: accept its terms on its page, then set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"hub model {model!r} has no revision {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{nowhere} and none on the hub that the current HF_TOKEN may read."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        part = "only in part" if isinstance(error, errors.IncompleteSnapshotError) else "not"
        cause = "HF_HUB_OFFLINE is set, unset it to download"
        if not offline:
            cause = f"the hub cannot be reached ({_cause(error)})"
        raise CheckpointError(
            f"{nowhere} it is {part} in the hub's cache ({constants.HF_HUB_CACHE}), and {cause}."
        ) from error
    except (errors.HFValidationError, httpx.HTTPError, OSError) as error:
        raise CheckpointError(f"cannot download {where} from the hub: {_cause(error)}.") from error


def _fetch(
    model: str, revision: str | None, patterns: Sequence[str], *, local_files_only: bool
) -> Path:
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_SUBFOLDERS),
            local_files_only=local_files_only,
        )
    )


def _cause(error: BaseException) -> str:
    """The first cause's own words, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join((str(error) or type(error).__name__).split()).rstrip(".")
