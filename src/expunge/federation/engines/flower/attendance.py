"""Who takes part in a training: names are bound to the keys of their nodes, and who has left stays out.

A departed site is a tombstone in the store's book: its name, and the fingerprints of the keys that it had. A node with
such a key is not asked, and a reply under such a name is left out, with a line in the log: the others' run goes on. A
site that comes back with a new key and a new name cannot be told.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from expunge.errors import RequestError
from expunge.federation.engines.flower.stamps import STAMP
from expunge.federation.keeping.book import Book

_log = logging.getLogger("flwr")


def fingerprints(grid: Grid) -> dict[int, str | None]:
    """SHA-256 of the public key of every node that is online; None for one that has no key."""
    return {node.node_id: _fingerprint(node.public_key) for node in grid.get_nodes()}


def _fingerprint(key: bytes) -> str | None:
    return hashlib.sha256(key).hexdigest() if key else None


class Attendance:
    """Looks at every round of one training.

    Args:
        book: of the store, as it is when the training begins.
    """

    def __init__(self, book: Book) -> None:
        self._keys = {name: list(own) for name, own in book.keys.items()}
        self._nodes: dict[str, int] = {}
        self._online: dict[int, str | None] = {}
        self._told: set[str] = set()

    def asked(self, messages: Iterable[Message], grid: Grid, departed: Iterable[str]) -> list[Message]:
        """The messages of a round without those to nodes of sites that have left."""
        self._online = fingerprints(grid)
        gone: dict[str | None, str] = {key: name for name in departed for key in self._keys.get(name, [])}
        found = []
        for message in messages:
            key = self._online.get(message.metadata.dst_node_id)
            if key in gone:
                self._tell(f"node {message.metadata.dst_node_id} has the key of site {gone[key]!r}, which has left")
            else:
                found.append(message)
        return found

    def staying(self, replies: Iterable[Message], departed: Iterable[str]) -> list[Message]:
        """The replies of a round without those of sites that have left; one name from two nodes is refused."""
        gone, found = set(departed), []
        for reply in replies:
            name = _name(reply)
            if name in gone:
                self._tell(f"site {name!r} has left")
                continue
            if name is not None:
                self._bind(name, reply.metadata.src_node_id)
            found.append(reply)
        return found

    def noted(self, book: Book) -> Book:
        """The book with the keys that sites answered from."""
        return replace(book, keys={name: tuple(own) for name, own in self._keys.items()})

    def _bind(self, name: str, node: int) -> None:
        """Hold a name to its node, and write the node's key down; a node that has gone makes room for another."""
        before, key = self._nodes.get(name), self._online.get(node)
        if before is not None and before != node and before in self._online:
            raise RequestError(f"Two sites call themselves {name!r}: every site needs a name of its own.")
        self._nodes[name] = node
        known = self._keys.get(name, [])
        if key is None or key in known:
            return
        others = [other for other, own in self._keys.items() if key in own and other != name]
        if others:
            _log.warning("expunge: site %r answers with the key that site %r had.", name, others[0])
        elif known:
            _log.warning("expunge: site %r has another key than before; if you did not change it, look there.", name)
        self._keys[name] = [*known, key]

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _log.warning("expunge: left out of the training: %s; readmit it, or switch it off.", why)


def _name(reply: Message) -> str | None:
    """The site behind a reply, as far as it says so."""
    if not reply.has_content():
        return None
    stamp = reply.content.config_records.get(STAMP)
    name = stamp.get("site") if stamp is not None else None
    return name if isinstance(name, str) else None
