"""Files and folders that appear whole or not at all, also where the machine loses power.

What is being written lies in a folder ``.staging-PROCESS-...`` beside its place, which nobody else may look into, and
then takes its place in one move. Where a process dies, that folder is left, and removed by ``tidy``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from expunge.errors import DataError, RequestError

STAGING = ".staging-"
"""What half-made folders begin with; then comes the process."""

_ASIDE = ".old-"  # stands in the name of a folder that makes room for another, before its own name


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A folder beside the target, for what is being written; it is gone afterwards, unless it was moved."""
    target.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{STAGING}{os.getpid()}-", dir=target.parent))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


@contextmanager
def whole(path: Path, *, private: bool = True) -> Iterator[Path]:
    """A place to write a file, which then takes the place of ``path`` in one move.

    Args:
        path: where it will be.
        private: whether only the owner may read it, as vectors and models.
    """
    with staging(path) as own:
        yield own / path.name
        if private:
            (own / path.name).chmod(0o600)
        to_disk(own / path.name)
        (own / path.name).replace(path)
        to_disk(path.parent)


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file whole or not at all."""
    try:
        with whole(path, private=private) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"Cannot write {path}: {error.strerror or error}.") from error


def appear(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside its place and move it there, so that it is whole or not there; only its owner may enter.

    One that is there already is moved aside first; where another process was quicker, its folder stays.
    """
    try:
        with staging(target) as own:
            fill(own)
            _settle(own)
            aside = own.with_name(own.name + _ASIDE + target.name)
            try:
                if target.exists():
                    target.rename(aside)
                with suppress(FileExistsError):
                    _move(own, target)
                to_disk(target.parent)
            finally:
                _put_back_or_remove(aside)
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise RequestError(f"{target} cannot be written: {reason}.") from problem


def private_folder(path: Path) -> None:
    """Make a folder for its owner only, unless it is there."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as problem:
        raise RequestError(f"{path} cannot be written: {problem.strerror or problem}.") from problem


def _settle(folder: Path) -> None:
    """Everything in it for the owner only, and on the disk itself; a file with a second name is both already."""
    for place in (*folder.rglob("*"), folder):
        is_folder = place.is_dir()
        if is_folder or place.stat().st_nlink == 1:
            place.chmod(0o700 if is_folder else 0o600)
            to_disk(place)


def _move(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError from problem
        raise


def _put_back_or_remove(left: Path) -> None:
    """What was moved aside goes back where nothing has taken its place; everything else is removed."""
    _, aside, name = left.name.partition(_ASIDE)
    if aside and left.exists() and not left.with_name(name).exists():
        left.rename(left.with_name(name))
    else:
        remove(left)


def remove(folder: Path) -> None:
    """Delete a folder with all that is in it; an error where it cannot be deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise RequestError(f"{folder} cannot be deleted: remove it yourself, and start again.")


def tidy(folder: Path, *, alone: bool = False) -> None:
    """Remove what processes that are no more have left half-made.

    Args:
        folder: where to look.
        alone: that no other process writes there; else those are spared that are still running.
    """
    for left in folder.glob(f"{STAGING}*"):
        number = left.name.removeprefix(STAGING).partition("-")[0]
        if alone or (number.isdigit() and not _is_running(int(number))):
            _put_back_or_remove(left)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk itself: a crash of the machine must find it there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else there is refused."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(f"{file} cannot be read: it is damaged.") from problem
    if not isinstance(content, dict):
        raise DataError(f"{file} cannot be read: it is damaged or not ours.")
    return content


def require_writable(path: Path) -> None:
    """Refuse a folder that cannot be written, by writing a file that vanishes at once where it would be."""
    ancestor = next(place for place in [path.absolute(), *path.absolute().parents] if place.exists())
    try:
        tempfile.TemporaryFile(dir=ancestor).close()
    except OSError as problem:
        raise RequestError(f"{path} cannot be written: choose a folder that you may write to.") from problem
