"""Letters to the nodes of a Flower Grid: what is under way, what came back, and what must have been lost.

Found in flwr 1.41: a node that restarts after it fetched a message loses it without an error, so a letter is believed
to be under way only while its node is online and has not been activated anew. The error for a node that went offline
comes from the SuperLink (its ``src_node_id`` is 1), so replies are told apart by the message that they answer.
``push_messages`` leaves out a message for an unknown node, or gives None for it: letters go one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from expunge.federation.engines.flower.records import payload_bytes

FIRST_LOOK = 0.05
"""Seconds until replies are looked for; then longer and longer, up to the engine's ``poll``."""


@dataclass(frozen=True)
class Letter:
    """A message that was sent: for which site (None: whoever is there), to which node, activated when."""

    addressee: str | None
    node: int
    activated: str
    whole: bool = True


class Mail:
    """The letters of one message round.

    Args:
        grid: Flower's.
        seconds: that the round may take.
        poll: most seconds between two looks.
    """

    def __init__(self, grid: Grid, seconds: float, poll: float) -> None:
        self._grid, self._poll, self._next = grid, poll, min(FIRST_LOOK, poll)
        self._ends = time.monotonic() + seconds
        self._lifetime = 2 * seconds + 60  # of a message: it must not expire before the round does
        self._letters: dict[str, Letter] = {}
        self.bytes_sent = self.bytes_received = 0

    def online(self) -> dict[int, str]:
        """The nodes that are online, each with the time of its last activation."""
        return {node.node_id: node.last_activated_at for node in self._grid.get_nodes()}

    def send(self, letter: Letter, records: RecordDict, query: str) -> bool:
        """Push one message; False where the SuperLink did not take it, such as for a node that has gone."""
        message = Message(records, letter.node, f"query.{query}", ttl=self._lifetime)
        for identity in self._grid.push_messages([message]):
            if identity:
                self._letters[identity] = letter
                self.bytes_sent += payload_bytes(records)
                return True
        return False

    def under_way(self, addressee: str, online: Mapping[int, str]) -> bool:
        """Whether a letter to it can still be answered, as far as can be known."""
        return any(
            letter.addressee == addressee and online.get(letter.node) == letter.activated
            for letter in self._letters.values()
        )

    def collect(self) -> Iterator[tuple[Letter, Message]]:
        """What has come back; a letter is answered once."""
        if not self._letters:
            return
        for message in self._grid.pull_messages(list(self._letters)):
            letter = self._letters.pop(message.metadata.reply_to_message_id, None)
            if letter is not None:
                if message.has_content():
                    self.bytes_received += payload_bytes(message.content)
                yield letter, message

    def settle(self, addressee: str) -> None:
        """It has answered: nothing more is expected from it."""
        self._letters = {key: letter for key, letter in self._letters.items() if letter.addressee != addressee}

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._ends

    def wait(self) -> None:
        """Sleep a little, but not beyond the end."""
        time.sleep(max(0.0, min(self._next, self._ends - time.monotonic())))
        self._next = min(1.5 * self._next, self._poll)


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(repr(name) for name in names)
