"""Fetch the official files of a dataset; nothing is put in place before its checksum is right."""

import hashlib
import http.client
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from expunge.data.sources import Source, read_verified
from expunge.errors import DataError

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30


def fetch(source: Source, data_dir: Path) -> None:
    """Download what is missing or damaged of a dataset; files that are right are left alone.

    Args:
        source: The dataset's files.
        data_dir: The data folder; `source.folder` is made below it.

    Raises:
        DataError: When offline, when the server fails, or when what came is not the official file.

    Example:
        >>> fetch(Source("nothing", {}, url="https://example.org/"), Path())
    """
    wanted = [name for name in source.checksums if not _is_right(source, data_dir, name)]
    if not wanted:
        return
    folder = data_dir / source.folder
    if source.archive is None:
        for name in wanted:
            download(source.url + name, folder / name, source.checksums[name])
        return
    _fetch_archive(source, wanted, folder, source.archive)


def download(url: str, path: Path, checksum: str) -> None:
    """Download one file to `path`, atomically, with a progress bar on standard error.

    Args:
        url: Where the file is.
        path: Where it goes; its folder is made where it is missing.
        checksum: Its SHA-256 in hexadecimal.

    Raises:
        DataError: When it cannot be had, or is another file than expected.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     here, there = Path(folder) / "here", Path(folder) / "there"
        ...     _ = here.write_bytes(b"abc")
        ...     download(here.as_uri(), there, hashlib.sha256(b"abc").hexdigest())
        ...     there.read_bytes()
        b'abc'
    """
    try:
        with urlopen(url, timeout=_TIMEOUT_SECONDS) as reply, _verified(path, checksum, url) as write:
            _copy(reply, write, path.name, int(reply.headers.get("Content-Length") or 0) or None)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise DataError(
            f"{url} could not be downloaded ({reason}): go online, "
            "or set EXPUNGE_DATA or --data-dir to a folder that holds the dataset."
        ) from None


def _fetch_archive(source: Source, names: list[str], folder: Path, checksum: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the files and not in the system's temporary folder, which may lack room for an archive.
        with TemporaryDirectory(dir=folder) as beside:
            archive = Path(beside) / source.url.rsplit("/", 1)[-1]
            download(source.url, archive, checksum)
            _unpack(source, names, archive, folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error.strerror}): choose another --data-dir.") from None


def _is_right(source: Source, data_dir: Path, name: str) -> bool:
    try:
        read_verified(source, data_dir, name)
    except DataError:
        return False
    return True


class _HashingFile:
    """A file open for writing that knows the SHA-256 of what went into it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        self.hash.update(chunk)
        self.file.write(chunk)


@contextmanager
def _verified(path: Path, checksum: str, origin: str) -> Iterator[_HashingFile]:
    """Write beside `path` and rename only when the checksum is right, so that no half file is ever there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            hashing = _HashingFile(file)
            yield hashing
        if hashing.hash.hexdigest() != checksum:
            raise DataError(f"{path.name} from {origin} came damaged (wrong SHA-256): try again later.")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _copy(reply: BinaryIO, write: _HashingFile, name: str, size: int | None) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=size)
        while chunk := reply.read(_CHUNK):
            write.write(chunk)
            progress.advance(task, len(chunk))


def _unpack(source: Source, names: list[str], archive: Path, folder: Path) -> None:
    """Take only the named files out of the archive: a path inside it never decides where one is written."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in names:
                member = tar.extractfile(f"{source.folder}/{name}")
                if member is None:
                    raise KeyError(name)
                with member, _verified(folder / name, source.checksums[name], archive.name) as write:
                    while chunk := member.read(_CHUNK):
                        write.write(chunk)
    except (tarfile.TarError, KeyError, EOFError, OSError):
        raise DataError(
            f"{archive.name} cannot be unpacked into {folder}: see that the disk has room and try again."
        ) from None
