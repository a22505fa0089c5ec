"""Who is at the nodes of a Flower Grid: sites introduce themselves, and are refused where they do not fit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from expunge.errors import ExpungeError, SiteError
from expunge.federation.engines.flower.mail import Letter, Mail, listed
from expunge.federation.engines.flower.mods import BYPASSED
from expunge.federation.engines.flower.records import facts_of, to_records
from expunge.federation.engines.flower.site import HELLO
from expunge.federation.messages.wire import WIRE_VERSION
from expunge.version import __version__

ATTEMPTS = 4
"""How often a message is given to a site whose process dies of it."""

GRACE = 10.0
"""Seconds that nodes which nobody waits for have to say who they are, and those waited for to outdo a bad answer."""

_MAY_PASS = (
    ErrorCode.UNKNOWN,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
"""Errors of Flower's that may not come again."""

_log = logging.getLogger("flwr")

Activation = tuple[int, str]
"""A node, and when it was last activated."""


@dataclass(frozen=True)
class Member:
    """A site as it introduced itself: where it is, its samples, its model's parameters, its version of expunge.

    Of samples that it got since it trained, ``newer`` says how many; they are not used, nor counted among its samples.
    """

    node: int
    samples: int
    parameters: int
    version: str
    newer: int = 0

    def trained_with(self, count: int) -> Member:
        """The same, with no more samples than these."""
        return replace(self, samples=min(count, self.samples), newer=max(0, self.samples - count))


def greeted(grid: Grid, deadline: float, poll: float, wanted: tuple[str, ...]) -> dict[str, Member]:
    """Greet all nodes until each that is online has answered, and everyone who is wanted is there.

    Where somebody is wanted, the others cannot stand in the way: a node that answers badly, or not within ``GRACE``
    seconds, is left out with a line in the log. Where nobody is, the first bad answer is an error.
    """
    mail = Mail(grid, deadline, poll)
    answered: dict[Activation, str | None] = {}
    found: dict[Activation, Member] = {}
    bad: dict[Activation, SiteError] = {}
    died: Counter[str] = Counter()
    patience = _Patience()
    while True:
        for letter, message in mail.collect():
            node = (letter.node, letter.activated)
            try:
                if message.has_error():
                    judge(_no_handlers(letter.node), message.error, died)
                    answered.pop(node)  # and greet it again, once it is back
                else:
                    answered[node], found[node] = _introduced(letter.node, message)
            except SiteError as problem:
                if not wanted:
                    raise
                bad[node] = problem
        online = mail.online()
        present = {node: name for node in online.items() if (name := answered.get(node)) is not None}
        doubled = {name for name, count in Counter(present.values()).items() if count > 1}
        for name in sorted(doubled & set(wanted) if wanted else doubled):
            raise SiteError(f"Two sites call themselves {name!r}: give each a name of its own.")
        missing = [name for name in wanted if name not in present.values()]
        silent = [node for node in online.items() if node not in present and node not in bad]
        problems = [problem for node, problem in bad.items() if node in online.items()]
        if present and not missing and (not silent or (wanted and patience.spent("silence"))):
            left_out = [str(problem) for problem in problems] + [f"Node {node} does not answer." for node, _ in silent]
            left_out += [f"Two sites call themselves {name!r}." for name in sorted(doubled)]
            for why in left_out:
                _log.warning("expunge: left out, since nobody waits for it: %s", why)
            members = sorted(present.items(), key=lambda item: item[1])
            return {name: found[node] for node, name in members if name not in doubled}
        if missing and problems and (mail.over or patience.spent("a bad answer")):
            raise problems[0]
        if mail.over:
            raise _too_few(missing, [node for node, _ in silent], sorted(present.values()), deadline)
        greet(mail, online, set(), answered)
        mail.wait()


class _Patience:
    """``GRACE`` seconds from the first time that something is asked about."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def spent(self, what: str) -> bool:
        return time.monotonic() - self._began.setdefault(what, time.monotonic()) >= GRACE


def greet(mail: Mail, online: Mapping[int, str], known: set[int], greeted: dict[Activation, str | None]) -> None:
    """Ask nodes that are not known who they are, once after each activation."""
    for node, activated in online.items():
        if node in known or (node, activated) in greeted:
            continue
        if mail.send(Letter(None, node, activated), to_records(wire=WIRE_VERSION), HELLO):
            greeted[node, activated] = None


def _introduced(node: int, message: Message) -> tuple[str, Member]:
    """Who is at a node, refused where it is of another version."""
    try:
        facts = facts_of(message.content)
        if facts.get("status") != "hello":
            raise told(facts)
    except ExpungeError as problem:
        raise SiteError(f"Node {node}: {problem}") from problem
    name, samples, parameters = facts.get("name"), facts.get("samples"), facts.get("parameters")
    version, wire = str(facts.get("version")), facts.get("wire")
    if wire != WIRE_VERSION:
        raise SiteError(
            f"Site {name!r} runs expunge {version} (messages {wire}) and the server {__version__} "
            f"(messages {WIRE_VERSION}): bring both to the same version."
        )
    if not isinstance(name, str) or not name:
        raise SiteError(f"Node {node} has no proper name: look at its Site(...).")
    if type(samples) is not int or type(parameters) is not int or min(samples, parameters) <= 0:
        raise SiteError(
            f"Site {name!r} (node {node}) announces {_line(repr(samples))} samples and {_line(repr(parameters))} "
            "parameters, which must be whole numbers above 0: look at its Site(...)."
        )
    if bypassed := facts.get(BYPASSED):
        _log.warning("expunge: site %r answers around its mods (%s), as its app allows.", name, _line(str(bypassed)))
    return name, Member(node, samples, parameters, version)


def note_stranger(letter: Letter, message: Message, strangers: dict[Activation, str | None]) -> None:
    """Note the name of who is at a node, if it is one of ours; where it could not answer, it may be asked again."""
    node = (letter.node, letter.activated)
    if message.has_error() and message.error.code in (*_MAY_PASS, ErrorCode.NODE_UNAVAILABLE):
        strangers.pop(node, None)
    elif message.has_content():
        with suppress(ExpungeError):
            strangers[node] = _introduced(letter.node, message)[0]


def told(facts: Mapping[str, Any]) -> SiteError:
    """What went wrong at a site, in its own words; whatever it calls it, the request can be taken up again."""
    if facts.get("status") != "failed":
        return SiteError(f"its answer {facts.get('status')!r} is not known here: bring both to the same version.")
    return SiteError(_line(str(facts.get("sentence"))))


def judge(what: str, error: Error, died: Counter[str]) -> None:
    """Errors of Flower's: a node that is away may come back, and a process that died may be started again."""
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return
    died[what] += 1
    if error.code not in _MAY_PASS or died[what] == ATTEMPTS:
        raise SiteError(f"{what}: {_line(str(error.reason))}")


def _line(text: str) -> str:
    """What somebody else has written, on one line of bearable length."""
    return " ".join(text.split())[:500]


def _no_handlers(node: int) -> str:
    return f"Node {node} does not answer expunge: wrap its ClientApp in expunge.flower.unlearnable(...); it says"


def _too_few(missing: list[str], silent: list[int], present: list[str], seconds: float) -> SiteError:
    there = listed(present) if present else "nobody"
    if missing:
        return SiteError(f"Not online within {seconds:g} s: {listed(missing)}; online: {there}; nothing was changed.")
    if silent:
        nodes = ", ".join(map(str, silent))
        return SiteError(f"No answer within {seconds:g} s from node {nodes}; online: {there}; nothing was changed.")
    return SiteError(f"No site came online within {seconds:g} s: start the SuperNodes first.")
