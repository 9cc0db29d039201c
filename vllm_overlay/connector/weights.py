# SPDX-License-Identifier: Apache-2.0
"""A model's weight files, and one digest of all their bytes. A file is read again only if it may have changed."""

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from blake3 import blake3

from vllm_overlay.common.file_lock import locked_if_possible
from vllm_overlay.config import ConfigError
from vllm_overlay.connector.digest_cache import FileIdentity, read_digests, write_digests

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_SETTLED_NS = 60 * 10**9
"""A digest is kept if the file's last change is at least so long ago. A later change then shows in its times.

File systems keep time in ticks of up to 2 s. Stores through a memory map show only after the kernel's write-back, 35 s
by default. The rest is for a file server whose clock is behind.
"""
_BUFFER_BYTES = 4 << 20


def safetensors_files(model: str, revision: str | None) -> list[Path]:
    """The model's weights. Empty when they are not on this machine, or are not safetensors."""
    directory = model_directory(model, revision)
    return sorted(directory.glob("*.safetensors")) if directory else []


def model_directory(model: str, revision: str | None) -> Path | None:
    """Where the model's files lie on this machine; None when they do not."""
    directory = Path(model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class _FileDigest:
    """``is_settled`` says that a file with this identity has this digest, now and later."""

    identity: FileIdentity
    digest: str
    is_settled: bool = True


def weights_digest(files: Iterable[Path], cache_file: Path) -> str:
    """One digest of all bytes of ``files``, in 64 hex digits. Called by every worker at start.

    A file counts by the name that the model's directory gives it. What a link leads to has any name, such as a blob's
    in the Hub's cache. One process reads at a time, so that the ranks of an engine do the work once. Raises ConfigError
    when a file does not stay as it is, and OSError when one cannot be read.
    """
    with _one_at_a_time(cache_file.with_suffix(".lock")):
        known = read_digests(cache_file)
        found = {path: _digest_of(path.resolve(), known) for path in dict.fromkeys(files)}
        settled = {file.identity: file.digest for file in found.values() if file.is_settled}
        if not settled.items() <= known.items():
            others = {identity: digest for identity, digest in known.items() if identity not in settled}
            write_digests(cache_file, {**others, **settled})
    total = blake3()
    for path, file in found.items():
        total.update(f"{path.name}:{file.digest};".encode(errors="surrogateescape"))
    return total.hexdigest()


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Holds the lock. Where it cannot be opened (a link, for example) each rank reads for itself."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked_if_possible(str(lock)))
        except OSError as error:
            logger.warning(
                "Each rank reads the weights itself, because the lock %r cannot be opened (%s)", str(lock), error
            )
        yield


def _identity_of(path: Path) -> FileIdentity:
    """The identity of the file that is there now. Opens it, because over NFS only that asks the server for its
    times."""
    with path.open("rb", buffering=0) as file:
        return _opened_identity(path, file)


def _opened_identity(path: Path, file: FileIO) -> FileIdentity:
    name, found = blake3(os.fsencode(path)).hexdigest(), os.fstat(file.fileno())
    return FileIdentity(name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest_of(path: Path, known: dict[FileIdentity, str]) -> _FileDigest:
    """Reads a file that is not known, and again while it changes or is replaced. Raises ConfigError when that does not
    end."""
    identity = _identity_of(path)
    if identity in known:
        return _FileDigest(identity, known[identity])
    for _ in range(_MAX_ATTEMPTS):
        started_ns = time.time_ns()
        with path.open("rb", buffering=0) as file:
            identity = _opened_identity(path, file)
            digest = read_digest(file, identity.size)
        if _identity_of(path) == identity:
            return _FileDigest(identity, digest, max(identity.mtime_ns, identity.ctime_ns) + _SETTLED_NS < started_ns)
        logger.warning("%r changed while it was read for its fingerprint", str(path))
    raise ConfigError(
        f"{str(path)!r} changed while it was read, {_MAX_ATTEMPTS} times one after the other, so the disk tier cannot "
        "tell which weights these are: start again when nobody writes to it"
    )


def read_digest(file: FileIO, num_bytes: int) -> str:
    """The BLAKE3 of an unbuffered file that has ``num_bytes``. If the file grows meanwhile, only a little more is read.
    Not through a memory map: a file that gets shorter would end the process (SIGBUS)."""
    started = time.monotonic()
    digest = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    num_read = 0
    while count := file.readinto(buffer[: num_bytes + 1 - num_read]):
        digest.update(buffer[:count])
        num_read += count
    name, seconds = str(file.name), time.monotonic() - started
    logger.info("Read %r (%.1f MB) for its fingerprint in %.1f s", name, num_read / 1e6, seconds)
    return digest.hexdigest()
