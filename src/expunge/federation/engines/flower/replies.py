"""Training replies as a Recorder reads them: whose they are, what they sent, and how they trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor, nn

from expunge.core.vectors import Layout, named_as
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.flower.legacy import declined
from expunge.federation.engines.flower.stamps import FIRST_ONES, OWN, PROBLEM, STAMP, STRANGE, TRAINABLE
from expunge.federation.engines.flower.trainings import Statement, Training
from expunge.federation.training.notes import Note, Rule
from expunge.federation.training.works import ROUNDING


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one site sent in one round, and how it had trained.

    Attributes:
        update: what it sent minus what it got.
        weight: in the mean.
        samples: that it has.
        training: how it trained.
        moments: of its optimiser.
        apart: parameters that it sends, but trained from values of its own.
        own: parts of its model that it trains for itself.
        strange: parts that have other values in its ``Site`` than where it trains.
        mark: a digest of its first samples; empty where it did not say.
    """

    update: Tensor
    weight: float
    samples: int
    training: Training
    moments: tuple[float, ...] = ()
    apart: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    mark: str = ""


@dataclass(frozen=True, eq=False)
class _Reply:
    """A training reply as it came: ``keys`` has the model's name of each array."""

    name: str
    samples: int
    weight: float
    update: Tensor
    keys: Mapping[str, str]
    note: Note | None
    own: tuple[str, ...]
    strange: tuple[str, ...]
    mark: str

    @property
    def is_idle(self) -> bool:
        """Whether the site did not train, and sends what it got."""
        made_steps = self.note is not None and self.note.learning_rate > 0
        return not made_steps and not bool(self.update.any())

    def named(self, arrays: Iterable[str]) -> list[str]:
        """The model's names of these arrays."""
        return [self.keys[key] for key in arrays if key in self.keys]


class Names:
    """What the arrays of a message are called in the model, or in a wrapper of it; a legacy client numbers them."""

    def __init__(self, model: nn.Module) -> None:
        self.layout = Layout.of(model)
        self._all = list(model.state_dict())

    def of(self, keys: Iterable[str]) -> dict[str, str]:
        """For each array its name in the model."""
        given, trained = list(keys), [name for name, _ in self.layout.shapes]
        if set(trained) <= set(given):
            return {key: key for key in given}
        known = named_as([*trained, *self._all], given)
        if set(trained) <= known.keys():
            return {key: name for name, key in known.items()}
        for names in (self._all, trained):
            if len(names) == len(given):
                return dict(zip(given, names, strict=True))
        missing = [name for name in trained if name not in known]
        raise ModelError(
            f"The arrays are of another model: {len(given)} of them, where the model has {len(trained)}, "
            f"{missing[0]!r} among them. What stays at the sites needs requires_grad=False in the models of Recorder "
            "and Site."
        )

    def tensors(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """The arrays as tensors, under the model's names."""
        names = self.of(arrays)
        return {names[key]: torch.from_numpy(array.numpy()) for key, array in arrays.items()}


@dataclass(frozen=True, eq=False)
class Reading:
    """What is needed to read the replies of one round.

    Attributes:
        names: of the model's parameters.
        sent: the parameters that the sites got.
        weighted_by: the metric that the strategy weights by.
        stated: what is said of the sites' training.
        number: of the round.
        known: the rule by which the sites trained so far; None before the first round.
    """

    names: Names
    sent: Tensor
    weighted_by: str
    stated: Statement
    number: int
    known: Rule | None = None

    def contributions(self, replies: Iterable[Message]) -> dict[str, Contribution]:
        """What each site sent; replies that are errors are the strategy's business."""
        found: dict[str, tuple[int, RecordDict, ConfigRecord]] = {}
        for content in (reply.content for reply in replies if reply.has_content()):
            if declined(content):
                continue
            stamp = content.config_records.get(STAMP)
            if stamp is None:
                raise RequestError("A training reply does not name its site: wrap the ClientApp with unlearnable().")
            name, samples = _stamped(stamp)
            if name in found:
                raise RequestError(f"Two sites call themselves {name!r}: every site needs a name of its own.")
            found[name] = (samples, content, stamp)
        ordered = [self._reply(name, *own) for name, own in sorted(found.items())]  # replies come in any order
        trained = {reply.name: self._contribution(reply) for reply in ordered if not reply.is_idle}
        like = next(iter(trained.values()), None)
        return {reply.name: trained.get(reply.name) or self._idle(reply, like) for reply in ordered}

    def _reply(self, name: str, samples: int, content: RecordDict, stamp: ConfigRecord) -> _Reply:
        arrays, metrics = list(content.array_records.values()), list(content.metric_records.values())
        weight = metrics[0].get(self.weighted_by) if len(metrics) == 1 else None
        if len(arrays) != 1 or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise RequestError(
                f"The training reply of site {name!r} needs one set of arrays and a weight {self.weighted_by!r} of at "
                "least 0."
            )
        update = self.names.layout.flatten(self.names.tensors(arrays[0])) - self.sent
        trainable = stamp.get(TRAINABLE, self.names.layout.size)
        if trainable != self.names.layout.size:
            raise RequestError(
                f"The model of Site({name!r}) has {trainable!r} trainable parameters where the Recorder's has "
                f"{self.names.layout.size}: give both the same, with requires_grad=False on the same parts."
            )
        note, keys, mark = Note.read(name, stamp), self.names.of(arrays[0]), stamp.get(FIRST_ONES)
        parts = (_texts(stamp, OWN), _texts(stamp, STRANGE), mark if isinstance(mark, str) else "")
        return _Reply(name, samples, float(weight), update, keys, note, *parts)

    def _contribution(self, reply: _Reply) -> Contribution:
        name, note, update = reply.name, reply.note, reply.update
        training = self.stated.of(name, reply.samples, note, self.number)
        moments: tuple[float, ...] = ()
        if training.rule.adaptive:
            moments = self._moments(training, reply)
        trained = {own for own, _ in self.names.layout.shapes}
        apart = tuple(own for own in reply.named(note.apart if note is not None else ()) if own in trained)
        seen = (apart, reply.own, reply.strange, reply.mark)
        return Contribution(update, reply.weight, reply.samples, training, moments, *seen)

    def _idle(self, reply: _Reply, like: Contribution | None) -> Contribution:
        """A site that sends what it got has its part in the mean, and leaves what others did as it was: no steps."""
        rule = like.training.rule if like is not None else self.known or self.stated.optimiser
        if rule is None:
            raise RequestError(
                f"Nobody trained in round {self.number}: site {reply.name!r} and all others sent what they had got. "
                "Begin with a round in which somebody trains."
            )
        rate = like.training.learning_rate if like is not None else 1.0
        moments = like.moments if like is not None else (0.0,) * len(self.names.layout.shapes) * rule.adaptive
        return Contribution(reply.update, reply.weight, reply.samples, Training(rule, rate, ROUNDING), moments)

    def _moments(self, training: Training, reply: _Reply) -> tuple[float, ...]:
        """Second moments in the order of the parameters; what did not move needs none."""
        known = reply.note.moments if reply.note is not None else {}
        own = {reply.keys[key]: moment for key, moment in known.items() if key in reply.keys}
        other = reply.note is not None and reply.note.rule is None and not known
        found = []
        for parameter, part in self.names.layout.unflatten(reply.update).items():
            if parameter not in own and bool(part.any()):
                rest = (
                    "its optimiser keeps none that are known here: train with Adam or AdamW of torch, state SGD, or "
                    "train without a Recorder and forget by hf-kcu."
                    if other
                    else "train with torch.optim inside the handler that unlearnable() wraps, in its own thread, and "
                    "send the weights as they were trained."
                )
                raise RequestError(
                    f"{training.rule.name} divides by second moments, and site {reply.name!r} sent none of "
                    f"{parameter!r}: {rest}"
                )
            found.append(own.get(parameter, 0.0))
        return tuple(found)


def _texts(stamp: ConfigRecord, key: str) -> tuple[str, ...]:
    """Names in a stamp."""
    given = stamp.get(key)
    return tuple(" ".join(str(each).split())[:200] for each in given) if isinstance(given, list) else ()


def _stamped(stamp: ConfigRecord) -> tuple[str, int]:
    """The site that trained, and its sample count."""
    name, samples = stamp.get("site"), stamp.get("samples")
    if isinstance(problem := stamp.get(PROBLEM), str):
        raise RequestError(f"Site {name!r} trains, but could not help to forget: {problem}")
    if not isinstance(name, str) or not name:
        raise RequestError("A training reply has a stamp without the name of its site: give its Site(...) one.")
    if type(samples) is not int or samples <= 0:
        raise RequestError(f"The training reply of site {name!r} needs a sample count that is a whole number above 0.")
    return name, samples
