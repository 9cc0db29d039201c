# SPDX-License-Identifier: Apache-2.0
"""The files of the served model on this machine."""

from pathlib import Path

from blake3 import blake3

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "video_preprocessor_config.json",
)
"""Files that say how images, videos and sounds become a model's input, for example how many pixels an image may
have."""


def safetensors_files(model: str, revision: str | None) -> list[Path]:
    """The model's weights. Empty when they are not on this machine, or are not safetensors."""
    directory = _directory(model, revision)
    return sorted(directory.glob("*.safetensors")) if directory else []


def processor_digests(model: str, revision: str | None) -> dict[str, str]:
    """The digest of each file of a multimodal model's processor that is here."""
    directory = _directory(model, revision)
    found = [directory / name for name in _PROCESSOR_FILES] if directory else []
    return {path.name: file_digest(path) for path in found if path.is_file()}


def file_digest(path: Path) -> str:
    """Of a small file's bytes."""
    return blake3(path.read_bytes()).hexdigest()


def _directory(model: str, revision: str | None) -> Path | None:
    directory = Path(model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None
