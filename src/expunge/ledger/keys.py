"""The ledger's own pair of keys, ed25519: one half signs events and receipts, with the other anyone can check them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from expunge.errors import DataError
from expunge.extras import require
from expunge.federation.keeping.files import write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


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
    def make(cls, private: Path, public: Path) -> Signer:
        """Make a new pair, and write it down: the public half is for everybody."""
        require("cryptography")
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        pem, plain = forms.Encoding.PEM, forms.NoEncryption()
        secret = key.private_bytes(pem, forms.PrivateFormat.PKCS8, plain)
        shown = key.public_key().public_bytes(pem, forms.PublicFormat.SubjectPublicKeyInfo)
        write_whole(private, secret.decode(), private=True)
        write_whole(public, shown.decode())
        return cls(key)

    @classmethod
    def load(cls, file: Path) -> Signer:
        """Read the private half."""
        require("cryptography")
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(_bytes(file), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
            raise DataError(f"{file} is no private key of a ledger: take it from a backup.") from problem
        if not isinstance(key, Ed25519PrivateKey):
            raise DataError(f"{file} is a key of another kind: take the ledger's own from a backup.")
        return cls(key)

    def sign(self, message: bytes) -> bytes:
        """The signature, always the same for the same message."""
        return self._key.sign(message)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as problem:
        raise DataError(f"The key {file} cannot be read: {problem.strerror or problem}.") from problem
