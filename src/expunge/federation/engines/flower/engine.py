"""The engine on a Flower Grid: the same methods on a simulated or deployed federation.

Sites are addressed by name; which node a site is at is found out by greeting the nodes. A model is sent to a site
once and then named by its digest. A message that was lost is sent again until the deadline; a site that has not
answered then is named in the error, and never left out.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from expunge.errors import DataError, ExpungeError, ModelError, RequestError, SiteError
from expunge.federation.engines.client import Client
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.flower.mail import Letter, Mail, listed
from expunge.federation.engines.flower.members import Activation, Member, greet, greeted, judge, note_stranger, told
from expunge.federation.engines.flower.records import facts_of, packed_of, to_records
from expunge.federation.engines.flower.site import FIRST, TASK
from expunge.federation.messages.tasks import Reply, Task
from expunge.federation.messages.wire import WIRE_VERSION, pack, unpack


class FlowerEngine:
    """Reaches the sites of a Flower federation by their names.

    Args:
        grid: from the ServerApp's main function.
        deadline: seconds that one message round may take, lost and repeated messages included.
        wait_for: sites that must be there before work starts, waited for until the deadline.
        poll: most seconds between two looks for replies.
        validation: the server's own data, where it has some.
        on_round: called after each message round with the number of rounds so far.
        trained_with: how many samples sites trained with; one that has got more since is asked for its first ones only.

    Greeting the sites is not counted among the rounds.
    """

    sums_only = False

    def __init__(
        self,
        grid: Grid,
        *,
        deadline: float = 900.0,
        wait_for: Iterable[str] = (),
        poll: float = 2.0,
        validation: Client | None = None,
        on_round: Callable[[int], None] | None = None,
        trained_with: Mapping[str, int] | None = None,
    ) -> None:
        if not (deadline > 0 and poll > 0):
            raise RequestError("The deadline and the time between two looks must be above 0 seconds.")
        self.cost = Cost()
        self.validation = validation
        self.on_round = on_round
        self._grid, self._deadline, self._poll = grid, deadline, poll
        self._wait_for, self._trained_with = tuple(wait_for), dict(trained_with or {})
        self._members: dict[str, Member] = {}
        self._known: dict[str, tuple[str, str]] = {}  # the model that a site has, and the activation since which

    def members(self) -> dict[str, Member]:
        """The sites that are online, greeted the first time that this is asked."""
        if not self._members:
            self._members = self._greeted(self._wait_for)
        return dict(self._members)

    def clients(self) -> dict[str, int]:
        """Names and sample counts of the sites that are online."""
        return {name: member.samples for name, member in self.members().items()}

    def without(self, names: Iterable[str]) -> FlowerEngine:
        """An engine on the same sites but these, with its own cost account: they are not asked any more."""
        other, left_out = copy.copy(self), set(names)
        other.cost = Cost()
        other._members = {name: member for name, member in self.members().items() if name not in left_out}
        return other

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """One message round: every site's reply, or an error that names who did not answer in time."""
        self._require_members(tasks)
        mail = Mail(self._grid, self._deadline, self._poll)
        try:
            replies = self._delivered(tasks, mail)
        finally:
            self.cost.bytes_down += mail.bytes_sent
            self.cost.bytes_up += mail.bytes_received
        self.cost.rounds += 1
        self.cost.sample_gradients += sum(reply.sample_gradients for reply in replies.values())
        if self.on_round is not None:
            self.on_round(self.cost.rounds)
        return {name: replies[name] for name in tasks}

    def _greeted(self, wanted: tuple[str, ...]) -> dict[str, Member]:
        found = greeted(self._grid, self._deadline, self._poll, wanted)
        return {
            name: member.trained_with(self._trained_with.get(name, member.samples)) for name, member in found.items()
        }

    def _require_members(self, tasks: Mapping[str, Task]) -> None:
        """Each site must be known, if need be waited for, and have a model of this size."""
        missing = [name for name in tasks if name not in self._members]
        if missing:
            found = self._greeted((*self._wait_for, *missing))
            self._members.update({name: found[name] for name in (missing if self._members else found)})
        for name, task in tasks.items():
            own, sent = self._members[name].parameters, task.model.parameters.numel()
            if own != sent:
                raise ModelError(f"The task's model has {sent} parameters where that of site {name!r} has {own}.")

    def _delivered(self, tasks: Mapping[str, Task], mail: Mail) -> dict[str, Reply]:
        """All replies, however often a task must be sent for it."""
        replies: dict[str, Reply] = {}
        strangers: dict[Activation, str | None] = {}
        died: Counter[str] = Counter()
        while True:
            for letter, message in mail.collect():
                if letter.addressee is None:
                    note_stranger(letter, message, strangers)
                    continue
                reply = self._reply(letter.addressee, letter, message, tasks[letter.addressee], died)
                if reply is not None:
                    replies[letter.addressee] = reply
                    mail.settle(letter.addressee)
            waiting = [name for name in tasks if name not in replies]
            if not waiting:
                return replies
            if mail.over:
                raise SiteError(
                    f"No answer from {listed(waiting)} within {self._deadline:g} s, and nothing was changed: "
                    "start what has stopped and run it again, or raise the deadline."
                )
            online = mail.online()
            for name in waiting:
                self._follow(name, online, strangers)
                if self._members[name].node in online and not mail.under_way(name, online):
                    self._send(name, tasks[name], mail, online)
            if any(self._members[name].node not in online for name in waiting):
                greet(mail, online, {member.node for member in self._members.values()}, strangers)
            mail.wait()

    def _send(self, name: str, task: Task, mail: Mail, online: Mapping[int, str]) -> None:
        node = self._members[name].node
        named = self._known.get(name) == (task.model.digest, online[node])
        packed = pack(task, known=task.model.digest if named else None)
        records = to_records(packed, wire=WIRE_VERSION, **self._first(name))
        mail.send(Letter(name, node, online[node], whole=not named), records, TASK)

    def _first(self, name: str) -> dict[str, int]:
        """What a site is told that has more samples than it trained with."""
        member = self._members[name]
        return {FIRST: member.samples} if member.newer else {}

    def _reply(self, name: str, letter: Letter, message: Message, task: Task, died: Counter[str]) -> Reply | None:
        """The reply to a task, or None where the task must be sent again; what a site tells is a SiteError."""
        if message.has_error():
            judge(f"Site {name!r} failed at its task", message.error, died)
            return None
        try:
            facts = facts_of(message.content)
            if facts.get("status") == "unknown-model" and not letter.whole:
                self._known.pop(name, None)
                return None
            if facts.get("status") != "done":
                raise told(facts)
            for part, asked in (
                ("site", name),
                ("model", task.model.digest),
                ("task", pack(task, known=task.model.digest).digest),
                *self._first(name).items(),
            ):
                if facts.get(part) != asked:
                    raise SiteError(f"its reply is for the {part} {facts.get(part)!r} where {asked!r} was asked.")
            reply = unpack(packed_of(message.content), device=task.model.parameters.device)
            if not isinstance(reply, Reply):
                raise DataError(f"it replied with a task, {type(reply).__name__}.")
        except ExpungeError as problem:
            raise type(problem)(f"Site {name!r}: {problem}") from problem
        self._known[name] = (task.model.digest, letter.activated)
        return reply

    def _follow(self, name: str, online: Mapping[int, str], strangers: Mapping[Activation, str | None]) -> None:
        """A site whose node has gone may have come back as another one."""
        if self._members[name].node in online:
            return
        for node, activated in online.items():
            if strangers.get((node, activated)) == name:
                self._members[name] = replace(self._members[name], node=node)
                self._known.pop(name, None)
