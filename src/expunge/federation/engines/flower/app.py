"""Make a Flower ClientApp able to forget: it answers expunge's queries, and its training replies say who trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from expunge.core.losses import as_loss
from expunge.core.vectors import Layout
from expunge.errors import ExpungeError
from expunge.federation.engines.flower.mods import BYPASSED, bypassed_mods, changing, named, require_yes
from expunge.federation.engines.flower.parts import Parts
from expunge.federation.engines.flower.records import NAME
from expunge.federation.engines.flower.site import HELLO, TASK, MakeSite, Site, answer_hello, answer_task
from expunge.federation.engines.flower.stamps import FIRST_ONES, OWN, PROBLEM, STAMP, STRANGE, TRAINABLE
from expunge.federation.training.watching import Watch

_Decorator = Callable[[ClientAppCallable], ClientAppCallable]
_Lifespan = Callable[[Context], Iterator[None]]


def unlearning_mod(site: MakeSite, *, answers_bypass_mods: bool = False) -> Mod:
    """A mod for an app that is made of a client function: ``ClientApp(client_fn, mods=[unlearning_mod(site)])``.

    It answers expunge's queries itself, lets everything else through, and stamps training replies with the site's name
    and with how its torch optimisers trained: which they are, their rate and steps, and Adam's second moments.

    Args:
        site: makes the ``Site`` of a context; called for every message, so let what loads the data keep it.
        answers_bypass_mods: yes, mods that come after this one (noise, clipping, masks) never see these answers.
    """
    answers = {f"{MessageType.QUERY}.{HELLO}": answer_hello, f"{MessageType.QUERY}.{TASK}": answer_task}

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        bypassed = bypassed_mods(call_next)

        def allowed(context: Context) -> Site:
            require_yes(bypassed, answers_bypass_mods)
            return site(context)

        if kind in answers:
            reply = answers[kind](message, context, allowed)
            reply.content.config_records[NAME][BYPASSED] = named(bypassed)
            return reply
        if kind.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        require_yes(bypassed, answers_bypass_mods)  # who could not answer later need not train now
        with Watch(lambda: _arrays(message)) as watch:
            reply = call_next(message, context)
        if reply.has_content():
            reply.content[STAMP] = _stamp(message, reply, site(context), watch)
        return reply

    return mod


def _stamp(message: Message, reply: Message, own: Site, watch: Watch) -> ConfigRecord:
    """Who trained, with how many samples, and how; or why it could not answer later."""
    try:
        facts: dict[str, Any] = {
            "samples": len(own.checked()),
            TRAINABLE: Layout.of(own.model).size,
            FIRST_ONES: own.mark(),
        }
        note = watch.note(lambda: _arrays(reply), as_loss(own.loss, own.l2).l2)
    except ExpungeError as problem:
        return ConfigRecord({"site": own.name, PROBLEM: str(problem)})
    how, apart = (note.facts(), note.apart) if note is not None else ({}, ())
    sent = _arrays(reply)
    parts = Parts.of(own.model, _arrays(message), sent, lambda: watch.kept_back(sent), apart)
    beside = {key: list(names) for key, names in ((OWN, parts.own), (STRANGE, parts.strange)) if names}
    return ConfigRecord({"site": own.name, **facts, **how, **beside})


def _arrays(message: Message) -> dict[str, Any]:
    records = message.content.array_records.values()
    return {name: array.numpy() for record in records for name, array in record.items()}


def unlearnable(app: ClientApp, site: MakeSite, *, answers_bypass_mods: bool = False) -> ClientApp:
    """The same app, able to forget; handlers may be registered with it before or after.

    Args:
        app: any ClientApp, made of handlers or of a client function.
        site: makes the ``Site`` of a context; called for every message, so let what loads the data keep it.
        answers_bypass_mods: yes, mods of the app (noise, clipping, masks) never see what the site answers expunge.
            Where the app has such mods and this is not said, it is refused.

    Example:
        >>> import torch
        >>> from expunge.federation.engines.flower.site import Site
        >>> data = (torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
        >>> app = unlearnable(ClientApp(), lambda context: Site("ada", torch.nn.Linear(2, 2), data))
        >>> isinstance(app, ClientApp)
        True
    """
    require_yes(bypassed_mods(app), answers_bypass_mods)
    return _Unlearnable(app, unlearning_mod(site, answers_bypass_mods=answers_bypass_mods), answers_bypass_mods)


class _Unlearnable(ClientApp):
    """An app inside a mod. Flower lays mods around single handlers only, which would leave out those of later ones."""

    def __init__(self, app: ClientApp, mod: Mod, answers_bypass_mods: bool) -> None:
        super().__init__()
        self._app, self._mod, self._yes = app, mod, answers_bypass_mods

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        return self._mod(message, context, self._app)

    def train(self, action: str = "default", *, mods: list[Mod] | None = None) -> _Decorator:
        """Register a handler with the app inside."""
        require_yes(changing(mods or []), self._yes)
        return self._app.train(action, mods=mods)

    def evaluate(self, action: str = "default", *, mods: list[Mod] | None = None) -> _Decorator:
        """Register a handler with the app inside."""
        require_yes(changing(mods or []), self._yes)
        return self._app.evaluate(action, mods=mods)

    def query(self, action: str = "default", *, mods: list[Mod] | None = None) -> _Decorator:
        """Register a handler with the app inside."""
        require_yes(changing(mods or []), self._yes)
        return self._app.query(action, mods=mods)

    def lifespan(self) -> Callable[[_Lifespan], _Lifespan]:
        """Register what happens around each message of the app inside."""
        return self._app.lifespan()
