"""The audit of somebody's own models: the verdict that benchmark federations get, from plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from expunge.auditing.attempts import asked_now
from expunge.auditing.by_losses import ByLosses, as_pair, tells_classes
from expunge.auditing.by_scores import Backdoor, ByScores
from expunge.auditing.doubts import NONCE_IS_KNOWN, doubted
from expunge.auditing.evidence import solver_evidence
from expunge.auditing.given import Model, as_module, require_different, weights_of
from expunge.auditing.later import judged_later
from expunge.auditing.measured import Shown
from expunge.auditing.model_audit import ModelAudit, Panel
from expunge.core.batch import Forward
from expunge.core.losses import as_loss
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.collating import Collate
from expunge.federation.engines.local_data import Data
from expunge.unlearning.registry import Outcome

OWN = "same_start"
"""How retrained models of the trained one's start are called."""


def audit(
    before: nn.Module,
    after: Model,
    retrained: Sequence[Model],
    forgotten: Data,
    unseen: Data,
    *,
    retained: Data | None = None,
    trigger: Callable[[Tensor], Tensor] | None = None,
    target: int | None = None,
    triggered: Sequence[bool] | Tensor | None = None,
    same_start: Sequence[Model] = (),
    loss: object = "cross_entropy",
    l2: float = 0.0,
    collate: Collate | None = None,
    forward: Forward | None = None,
    nonce: str | None = None,
    record: str | Path | None = None,
    later: Mapping[str, Callable[[nn.Module], nn.Module]] | None = None,
) -> ModelAudit:
    """Judge a model that is said to have forgotten, beside models that were retrained without the data.

    Give at least five retrained models, each from a fresh initialisation with a seed of its own; ten are better: with
    fewer than five nothing is EQUIVALENT, and where more would decide, the reason says how many. Let the further ones
    begin where the trained model began, three at least, and give them as ``same_start``: without them weights of the
    trained model that are mixed into an honest one are hardly seen. Models are left as they are.

    Classifiers of one tensor of inputs are compared by their class scores. All others (language models, regressions,
    several inputs, several labels, pixels) are compared by their loss on every sample: give the ``loss`` that they were
    trained with, and ``collate`` and ``forward`` as to ``expunge.forget``.

    What a model is asked is drawn when it is fixed: which half of the unseen samples, and where else a trigger is put,
    by its digest and the nonce. Keep the nonce, and as many of the unseen samples as you can, from whoever made the
    model.

    Args:
        before: the trained model, which knows the data.
        after: the model to be judged: a module, a state dict for ``before``'s architecture, or an ``Outcome``.
        retrained: models trained without the data, given alike.
        forgotten: the samples that were to be forgotten, with the labels that they were trained with.
        unseen: samples that nobody trained on, with the forgotten labels among theirs.
        retained: samples that stay: for their membership, what forgetting cost them, and one more attack.
        trigger: stamps inputs, where the data to forget held a backdoor.
        target: the class that the trigger asks for.
        triggered: which of the forgotten samples carry the trigger; they are then compared with stamped unseen ones.
        same_start: further retrained models, from the weights that ``before`` began with, their batches drawn anew.
        loss: of the training, as ``expunge.forget`` takes it.
        l2: the training's L2 factor (weight decay), for the retained loss.
        collate: makes a batch of samples, for instance by padding.
        forward: ``forward(model, batch)`` gives the outputs, where calling the model with the inputs does not.
        nonce: any text that the maker of the model does not know; by default a random one. The same gives the same
            audit again.
        record: a JSON file that counts the audits of each request (that is, of the forgotten samples): the level is
            spent over attempts. Without it this one counts as the first.
        later: functions that train a module on and return it, by what they do: ``{"5 more rounds": go_on}``. Each gets
            a copy of every model, and must treat all alike, random numbers included. Rounds of those who stay show
            whether it lasts, epochs on the forgotten data whether it was only hidden: then it comes back sooner.

    Raises:
        DataError: samples that do not fit the models or each other.
        ModelError: a model with a NaN, in training mode, or of another task.
        RequestError: a model that is compared with itself, or a bad option.

    Example:
        >>> import torch
        >>> chance = torch.Generator().manual_seed(0)
        >>> inputs, labels = torch.randn(400, 2, generator=chance), torch.arange(400) % 2
        >>> known, others = (inputs[:100], labels[:100]), (inputs[100:], labels[100:])
        >>> before, after, first, second = (nn.Linear(2, 2) for _ in range(4))
        >>> found = audit(before, after, [first, second], forgotten=known, unseen=others)
        >>> print(found.verdict, found.reason)
        UNDECIDED 2 retrained models show no noise: at least 3 are needed, 5 are better.
    """
    trained_with = as_loss(loss, l2)
    if l2 and retained is None:
        raise RequestError("l2 belongs to the retained loss: give the retained samples, or leave it out.")
    if not isinstance(before, nn.Module):
        raise RequestError("Give the trained model itself as before: others may be state dicts for its architecture.")
    if later is not None and not (isinstance(later, Mapping) and all(map(callable, later.values()))):
        raise RequestError("later is a dict of functions that train a module on, by what they do: '5 more rounds'.")
    if not isinstance(retrained, list | tuple):
        raise RequestError("retrained is a list of models: several show how much retraining varies.")
    if not isinstance(same_start, list | tuple):
        raise RequestError("same_start is a list of models that were retrained from the trained model's own start.")
    given = {"before": before, "after": after, **_numbered("retrained", retrained), **_numbered(OWN, same_start)}
    models = {name: as_module(model, before, name) for name, model in given.items()}
    weights = {name: weights_of(module, name) for name, module in models.items()}
    require_different(weights)
    sources = {"forgotten": forgotten, "unseen": unseen} | ({} if retained is None else {"retained": retained})
    backdoor = Backdoor(trigger, target, triggered)
    sitting: Any  # by class scores or by losses: each asks its own exam alone
    if all(tells_classes(trained_with, own, collate, forward) for own in sources.values()):
        sitting = ByScores.of(models, {what: as_pair(own, what, collate) for what, own in sources.items()}, backdoor)
    elif backdoor.is_given:
        raise RequestError(
            "A trigger is looked for among class scores: of other models, give the stamped samples as forgotten alone."
        )
    else:
        sitting = ByLosses.of(models, sources, trained_with, collate, forward)
    beside = [own.digest for name, own in weights.items() if name not in ("before", "after")]
    asked = asked_now(record, sitting.request, sitting.judged(weights["after"]), nonce, sitting.setting, beside)
    drawn = asked.probes(sitting.exam, weights["after"])
    first, second, *others = (
        sitting.measured(drawn, module, weights[name], back=bool(same_start), same_start=name.startswith(OWN))
        for name, module in models.items()
    )
    evidence = sitting.evidence(trained_with)
    if isinstance(after, Outcome):
        evidence.append(solver_evidence(after.details))
    wrong = sitting.doubts(drawn, first, others) + ([NONCE_IS_KNOWN] if asked.is_known else [])
    judgement = doubted(drawn.judgement(second, first, others, asked.attempt), wrong)
    later = {} if any(own.forbids for own in wrong) else later
    trained, own, *references = (module for name, module in models.items() if not name.startswith(OWN))
    ways = _ways(later or {}, partial(sitting.measured, drawn))
    looks = judged_later(drawn, ways, own, trained, references, judgement)
    return Panel(drawn, first, others).audit(second, judgement, asked, evidence, looks)


def _numbered(name: str, models: Sequence[Model]) -> dict[str, Model]:
    return {f"{name}[{number}]": model for number, model in enumerate(models)}


def _ways(
    later: Mapping[str, Callable[[nn.Module], nn.Module]], ask: Callable[[nn.Module, Snapshot], Shown]
) -> dict[str, Callable[[nn.Module], Shown]]:
    """What trains a copy of a module on, and then asks it."""

    def way(name: str, module: nn.Module) -> Shown:
        given = f"what later[{name!r}] returned"
        found = later[name](deepcopy(module))
        if not isinstance(found, nn.Module):
            raise RequestError(f"later[{name!r}] must return the module that it trained.")
        found = as_module(found, module, given)
        if weights_of(found, given).is_same(weights_of(module, given)):
            raise RequestError(f"later[{name!r}] left a model as it was: it must train it on.")
        return ask(found, weights_of(found, given))

    return {name: partial(way, name) for name in later}
