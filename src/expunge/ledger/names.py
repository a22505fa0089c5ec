"""Names and free texts, outside the log: they can be erased there, which leaves only salted digests.

    names.json    {DIGEST: {"salt", "text", "kind", "requests"}}

A digest is HMAC-SHA256 of the text under a random salt of its own. While the table has the entry, whoever holds the
table can show that a digest is of this name; once the entry is erased, nobody can.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import write_whole
from expunge.ledger.canonical import canonical, parsed
from expunge.ledger.canonical import digest as digest_of

VERSION = 1
ERASED = "(erased)"
"""Shown in the place of a name that is not in the table any more."""


@dataclass(frozen=True)
class Name:
    """An entry: the text, its salt, what it is (client, site, person, reason, samples), and for which requests."""

    salt: str
    text: str
    kind: str
    requests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """What stands in the log."""
        return salted(self.salt, self.text)


def salted(salt: str, text: str) -> str:
    """HMAC-SHA256 of a text, in hexadecimal digits.

    Example:
        >>> salted("00", "ada") == salted("00", "ada"), salted("00", "ada") == salted("01", "ada")
        (True, False)
    """
    return hmac.new(bytes.fromhex(salt), text.encode(), hashlib.sha256).hexdigest()


class Names:
    """The table, as it is now; whoever changes it holds the ledger's lock.

    Args:
        file: where it is.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._entries = self._read()

    def text(self, digest: str) -> str:
        """The name behind a digest."""
        found = self._entries.get(digest)
        return found.text if found is not None else ERASED

    def all(self) -> tuple[str, ...]:
        """Every digest in the table."""
        return tuple(self._entries)

    def of(self, request: str) -> dict[str, Name]:
        """What is known for a request."""
        return {digest: own for digest, own in self._entries.items() if request in own.requests}

    def add(self, text: str, kind: str, *requests: str) -> str:
        """The digest of a name; the same name in the same part of the same requests has one digest."""
        for digest, own in self._entries.items():
            if (own.text, own.kind, own.requests) == (text, kind, requests):
                return digest
        try:
            name = Name(secrets.token_hex(32), text, kind, requests)
            self._entries[name.digest] = name
        except UnicodeEncodeError as problem:
            raise RequestError(f"{text!r} is no text: it has half a character in it.") from problem
        return name.digest

    def erase(self, digests: Iterable[str]) -> None:
        """Take entries out; the digests in the log are then of nobody."""
        for digest in digests:
            self._entries.pop(digest, None)

    def write(self) -> None:
        """Put the table as it is now on the disk, whole."""
        plain = {key: {**vars(own), "requests": list(own.requests)} for key, own in self._entries.items()}
        content = {"version": VERSION, "digest": digest_of(plain), "names": plain}
        write_whole(self.file, canonical(content).decode() + "\n", private=True)

    def _read(self) -> dict[str, Name]:
        if not self.file.exists():
            return {}
        try:
            content = parsed(self.file.read_bytes().removesuffix(b"\n"), str(self.file))
            plain = content["names"]
            if content["version"] != VERSION or content["digest"] != digest_of(plain):
                raise ValueError("it is not what was written")
            found = {key: Name(**{**own, "requests": tuple(own["requests"])}) for key, own in plain.items()}
            if any(own.digest != key for key, own in found.items()):
                raise ValueError("an entry is not of its digest")
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as problem:
            raise DataError(f"{self.file} cannot be read: it is damaged, so take it from a backup.") from problem
        return found
