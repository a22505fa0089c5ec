"""A Grid in one process: real ClientApps, real Messages through Flower's own serialisation, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from expunge.federation.engines.flower.site import HELLO, TASK, Site, answer_hello, answer_task

SUPERLINK = 1


def site_app(site: Callable[[Context], Site]) -> ClientApp:
    """A ClientApp with nothing but expunge's handlers."""
    app = ClientApp()
    app.query(HELLO)(lambda message, context: answer_hello(message, context, site))
    app.query(TASK)(lambda message, context: answer_task(message, context, site))
    return app


def travelled(message: Message) -> Message:
    """The message as it is after Flower has sent it: taken apart into bytes, and put together again."""
    identity = message.object_id
    parts = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(identity, parts)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = identity
    return arrived


@dataclass
class Node:
    """A SuperNode: its app, what it was started with, and what it keeps until it dies."""

    app: ClientApp
    config: dict[str, int | str] = field(default_factory=dict)
    state: RecordDict = field(default_factory=RecordDict)
    activations: int = 1
    online: bool = True


class InProcessGrid(Grid):
    """Messages are handled when they are pushed, and replies are there when they are pulled.

    ``handle`` is what happens to a message, and returns the replies that come back (none: it was lost). A test may
    put another function there, which may call ``answer`` (the real app), ``restart`` and so on.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = dict(nodes)
        self.handle: Callable[[Message], list[Message]] = lambda message: [self.answer(message)]
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda look: None
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK, 1

    @classmethod
    def of(cls, sites: Mapping[str, Site]) -> InProcessGrid:
        """One node per site, numbered from 101."""
        nodes = {101 + number: Node(site_app(lambda _, s=site: s)) for number, site in enumerate(sites.values())}
        return cls(nodes)

    def answer(self, message: Message) -> Message:
        """What the node's app replies, or Flower's error where it raises or is not there."""
        node = self.nodes.get(message.metadata.dst_node_id)
        if node is None or not node.online:
            return self.error(message, ErrorCode.NODE_UNAVAILABLE)
        context = Context(1, message.metadata.dst_node_id, dict(node.config), node.state, {})
        try:
            return travelled(node.app(message, context))
        except Exception as problem:
            reason = f"{type(problem)}:<'{problem}'>"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)

    def error(self, message: Message, code: int) -> Message:
        """An error that the SuperLink made: it comes from node 1."""
        reply = Message(Error(code, "made by the SuperLink"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK
        return reply

    def restart(self, node: int) -> None:
        """Kill the node and start it again: its state is gone, and it is activated anew."""
        self.nodes[node].state = RecordDict()
        self.nodes[node].activations += 1
        self.nodes[node].online = True

    def stop(self, node: int) -> None:
        self.nodes[node].online = False

    def tasks_sent(self) -> list[Message]:
        return [message for message in self.sent if message.metadata.message_type == f"query.{TASK}"]

    # What Flower's Grid asks for.

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def get_nodes(self) -> list[NodeInfo]:
        self.looks += 1
        self.on_look(self.looks)
        return [
            NodeInfo(node_id=number, last_activated_at=f"2026-01-01T00:00:{self.nodes[number].activations:02}")
            for number in self.get_node_ids()
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        identities = []
        for message in messages:
            if message.metadata.dst_node_id not in self.nodes:
                continue  # as the in-memory SuperLink does
            arrived = travelled(message)
            self.sent.append(arrived)
            self.replies.extend(self.handle(arrived))
            identities.append(arrived.metadata.message_id)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        pulled = [reply for reply in self.replies if reply.metadata.reply_to_message_id in wanted]
        self.replies = [reply for reply in self.replies if reply.metadata.reply_to_message_id not in wanted]
        return pulled
