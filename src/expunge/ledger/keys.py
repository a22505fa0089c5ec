"""The ledger's own pair of keys, ed25519: one half signs events and receipts, with the other anyone can check them.

The private half is readable by its owner only, and where it was made so, encrypted under a passphrase.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from expunge.errors import DataError, RequestError
from expunge.extras import require
from expunge.federation.keeping.files import write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PASSPHRASE = "EXPUNGE_PASSPHRASE"
"""The environment variable with the passphrase; without it, whoever is at the terminal is asked."""

LARGEST = 100_000
"""Bytes that are read of a key."""

_TYPED: dict[Path, str] = {}  # nobody is asked twice by one process


class PublicKey:
    """Tells whether a signature is the ledger's.

    Args:
        key: as cryptography has it.
    """

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    @classmethod
    def load(cls, file: Path) -> PublicKey:
        """Read the public half, a PEM file; keys of other kinds are refused."""
        require("cryptography")
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            key = load_pem_public_key(_bytes(file))
        except (ValueError, UnsupportedAlgorithm) as problem:
            raise DataError(f"{file} is no public key in PEM: give the ledger's key.pub.") from problem
        if not isinstance(key, Ed25519PublicKey):
            raise DataError(f"{file} is a key of another kind: receipts are signed with ed25519.")
        return cls(key)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key itself, by which signatures name it."""
        return hashlib.sha256(self._key.public_bytes_raw()).hexdigest()

    def signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the signature is of this message and by this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class Signer:
    """The private half; it stays on this machine, readable by its owner only.

    Args:
        key: as cryptography has it.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key, self.public = key, PublicKey(key.public_key())

    @classmethod
    def make(cls, private: Path, public: Path, passphrase: str = "") -> Signer:
        """Make a new pair, and write it down: the public half is for everybody.

        Args:
            private: where the half goes that signs.
            public: where the other goes.
            passphrase: under which the first is encrypted; empty for none.
        """
        require("cryptography")
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key, pem = Ed25519PrivateKey.generate(), forms.Encoding.PEM
        cover = forms.BestAvailableEncryption(passphrase.encode()) if passphrase else forms.NoEncryption()
        secret = key.private_bytes(pem, forms.PrivateFormat.PKCS8, cover)
        shown = key.public_key().public_bytes(pem, forms.PublicFormat.SubjectPublicKeyInfo)
        write_whole(private, secret.decode(), private=True)
        write_whole(public, shown.decode())
        return cls(key)

    @classmethod
    def load(cls, file: Path) -> Signer:
        """Read the private half; one that others on this machine could read is refused."""
        require("cryptography")
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        content = _bytes(file)
        if file.stat().st_mode & 0o077:
            raise DataError(f"{file} signs in your name, and others can read it: run `chmod 600 {file}` first.")
        protected = b"ENCRYPTED" in content
        try:
            key = load_pem_private_key(content, passphrase_of(file).encode() if protected else None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
            if protected:
                raise RequestError(f"This is not the passphrase of {file}, or the file is damaged.") from problem
            raise DataError(f"{file} is no private key of a ledger: take it from a backup.") from problem
        if not isinstance(key, Ed25519PrivateKey):
            raise DataError(f"{file} is a key of another kind: take the ledger's own from a backup.")
        return cls(key)

    def sign(self, message: bytes) -> bytes:
        """The signature, always the same for the same message."""
        return self._key.sign(message)


def passphrase_of(file: Path, *, new: bool = False) -> str:
    """The passphrase of a key: from the environment, or asked for at the terminal, once.

    Args:
        file: of the key.
        new: that it is chosen now, so it is asked for twice.
    """
    if given := os.environ.get(PASSPHRASE):
        return given
    if sys.stdin is None or not sys.stdin.isatty():
        raise RequestError(f"{file} needs a passphrase: put it into {PASSPHRASE}, or work at a terminal.")
    if file not in _TYPED:
        _TYPED[file] = getpass.getpass(f"Passphrase of {file}: ")
        if new and (not _TYPED[file] or getpass.getpass("The same again: ") != _TYPED[file]):
            raise RequestError("That was not the same passphrase twice: nothing was made.")
    return _TYPED[file]


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as content:
            return content.read(LARGEST)
    except OSError as problem:
        raise DataError(f"The key {file} cannot be read: {problem.strerror or problem}.") from problem
