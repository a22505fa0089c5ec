"""Rows in one file that change together or not at all: SQLite, with a digest in every row.

    FOLDER/rows.sqlite     rows(key, type, value, digest): SHA-256 of key, type and value
                           the row "revision" counts how often it was changed

A change is one transaction: a crash at any moment, of the process or of the machine, leaves the rows before it or those
after it. What is deleted or replaced is overwritten with zeros in the same transaction (``secure_delete``). Whoever
reads says which revision it knows: rows that have gone on since then are not mixed with what is known of older ones.
"""

from __future__ import annotations

import hashlib
import sqlite3
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import private_folder

_FILE, _REVISION = "rows.sqlite", "revision"

_SETTINGS = (
    "page_size = 65536",  # vectors are long
    "cache_size = -65536",  # in kB: a round's worth, so that few pages are written twice
    "secure_delete = ON",
    "temp_store = MEMORY",  # nothing of a client in a file of nobody's
    "synchronous = FULL",
    "journal_mode = DELETE",
)

_TABLE = "CREATE TABLE IF NOT EXISTS rows (key TEXT UNIQUE NOT NULL, type TEXT, value BLOB, digest BLOB)"

# In place, so that rows keep their order: that in which they were written first.
_PUT = (
    "INSERT INTO rows (key, type, value, digest) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET type = excluded.type, value = excluded.value, digest = excluded.digest"
)


@dataclass(frozen=True)
class Row:
    """A value, and how its bytes are to be read."""

    type: str
    value: bytes


class Rows:
    """The file in a folder, which is made, for its owner only, where it is not there.

    Args:
        folder: where it is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     rows = Rows(Path(place))
        ...     rows.change([("ada", Row("text", b"kept")), ("bob", None)], revision=0)
        ...     rows.read("ada", revision=1), rows.read("bob", revision=1), rows.revision
        (Row(type='text', value=b'kept'), None, 1)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        private_folder(folder)
        file = folder / _FILE
        with self._telling():
            self._connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._connection.close)
            for setting in _SETTINGS:
                self._connection.execute(f"PRAGMA {setting}")
            self._connection.execute(_TABLE)
        file.chmod(0o600)

    def __reduce__(self) -> tuple[type[Rows], tuple[Path]]:
        """For another process, which opens the file itself."""
        return Rows, (self.folder,)

    @staticmethod
    def are_in(folder: Path) -> bool:
        """Whether a folder has such a file."""
        return (folder / _FILE).exists()

    @property
    def revision(self) -> int:
        """How often the rows were changed."""
        with self._telling():
            return self._revision()

    def read(self, key: str, revision: int) -> Row | None:
        """The row of a key, None where there is none; refused where it is damaged or the rows have gone on."""
        with self._telling():
            self._require(revision)
            found = self._connection.execute("SELECT type, value, digest FROM rows WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        row = Row(found[0], found[1])
        if _digest(key, row) != found[2]:
            raise DataError(f"A row in {self.folder} is not the one that was written, so take it from a backup.")
        return row

    def keys(self, start: str, revision: int) -> list[str]:
        """The keys that begin with this, in the order in which they were first written."""
        with self._telling():
            self._require(revision)
            asked = "SELECT key FROM rows WHERE key >= ? AND key < ? ORDER BY rowid"
            return [key for (key,) in self._connection.execute(asked, (start, start + "\U0010ffff"))]

    def has(self, key: str, revision: int) -> bool:
        """Whether there is a row of this key."""
        with self._telling():
            self._require(revision)
            return self._connection.execute("SELECT 1 FROM rows WHERE key = ?", (key,)).fetchone() is not None

    def change(self, changes: Iterable[tuple[str, Row | None]], revision: int) -> None:
        """Put rows, delete those that are None, and count the revision on: all of it, or nothing.

        Args:
            changes: may read rows themselves while they are asked for one after another.
            revision: that they are made from; refused where the rows have gone on since.
        """
        with self._telling():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._require(revision)
                for key, row in changes:
                    self._put(key, row)
                self._put(_REVISION, Row("number", str(revision + 1).encode()))
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _put(self, key: str, row: Row | None) -> None:
        if row is None:
            self._connection.execute("DELETE FROM rows WHERE key = ?", (key,))
        else:
            self._connection.execute(_PUT, (key, row.type, row.value, _digest(key, row)))

    def _revision(self) -> int:
        found = self._connection.execute("SELECT value FROM rows WHERE key = ?", (_REVISION,)).fetchone()
        return int(found[0]) if found is not None else 0

    def _require(self, revision: int) -> None:
        if self._revision() != revision:
            raise RequestError(
                f"The vectors in {self.folder} have gone on since this memory was made: use the memory that was saved "
                "last, or Memory.load(folder)."
            )

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell what SQLite does to us as one sentence."""
        try:
            yield
        except sqlite3.OperationalError as problem:  # locked, full, not to be written
            raise RequestError(f"{self.folder} cannot be read or written: {problem}.") from problem
        except (sqlite3.DatabaseError, ValueError) as problem:
            raise DataError(f"{self.folder} cannot be read: it is damaged, so take it from a backup.") from problem


def _digest(key: str, row: Row) -> bytes:
    state = hashlib.sha256(f"{key}\n{row.type}\n".encode())
    state.update(row.value)
    return state.digest()
