"""Training replies as a Recorder reads them: whose they are, what they sent, and how they trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor, nn

from expunge.core.vectors import Layout, named_as
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.flower.legacy import declined
from expunge.federation.engines.flower.stamps import PROBLEM, STAMP
from expunge.federation.engines.flower.trainings import Statement, Training
from expunge.federation.training.notes import Note


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one site sent in one round, and how it had trained."""

    update: Tensor
    weight: float
    samples: int
    training: Training
    moments: tuple[float, ...] = ()
    apart: tuple[str, ...] = ()


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
        raise ModelError(f"The arrays are of another model: {len(given)} of them, where the model has {len(trained)}.")

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
    """

    names: Names
    sent: Tensor
    weighted_by: str
    stated: Statement
    number: int

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
        ordered = sorted(found.items())  # replies come in any order
        return {
            name: self._contribution(name, samples, content, Note.read(name, stamp))
            for name, (samples, content, stamp) in ordered
        }

    def _contribution(self, name: str, samples: int, content: RecordDict, note: Note | None) -> Contribution:
        arrays, metrics = list(content.array_records.values()), list(content.metric_records.values())
        weight = metrics[0].get(self.weighted_by) if len(metrics) == 1 else None
        if len(arrays) != 1 or not isinstance(weight, int | float):
            raise RequestError(
                f"The training reply of site {name!r} needs one set of arrays and a weight {self.weighted_by!r}."
            )
        update = self.names.layout.flatten(self.names.tensors(arrays[0])) - self.sent
        training = self.stated.of(name, samples, note, self.number)
        moments: tuple[float, ...] = ()
        keys = self.names.of(arrays[0])
        if training.rule.adaptive:
            known = note.moments if note is not None else {}
            own = {keys[key]: moment for key, moment in known.items() if key in keys}
            moments = self._moments(name, training, own, update)
        apart = tuple(keys[key] for key in (note.apart if note is not None else ()) if key in keys)
        return Contribution(update, float(weight), samples, training, moments, apart)

    def _moments(self, name: str, training: Training, own: Mapping[str, float], update: Tensor) -> tuple[float, ...]:
        """Second moments in the order of the parameters; what did not move needs none."""
        found = []
        for parameter, part in self.names.layout.unflatten(update).items():
            if parameter not in own and bool(part.any()):
                raise RequestError(
                    f"{training.rule.name} divides by second moments, and site {name!r} sent none of {parameter!r}: "
                    "train with torch.optim inside the handler that unlearnable() wraps, in its own thread, and send "
                    "the weights as they were trained."
                )
            found.append(own.get(parameter, 0.0))
        return tuple(found)


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
