"""The audit of somebody's own models: the verdict that benchmark federations get, from plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from expunge.auditing.attempts import asked_now, model_digest, samples_digest, setting_digest
from expunge.auditing.doubts import NONCE_IS_KNOWN, doubted, doubts
from expunge.auditing.evidence import Evidence, gradient_evidence, retained_loss_evidence, solver_evidence
from expunge.auditing.exam import Exam, Samples, Trigger
from expunge.auditing.given import (
    BATCH,
    TRIED,
    Model,
    answers_of,
    as_module,
    count_classes,
    is_alike,
    on_the_way_to,
    read_samples,
    require_alone,
    require_different,
    weights_of,
)
from expunge.auditing.later import judged_later
from expunge.auditing.measured import Measured
from expunge.auditing.model_audit import ModelAudit, Panel
from expunge.auditing.sample_doubts import require_stamping, require_unseen
from expunge.auditing.statement import statement
from expunge.auditing.way_back import OnTheWay
from expunge.core.batch import Batch, run
from expunge.core.losses import CrossEntropy, Loss, as_loss, objective
from expunge.errors import DataError, RequestError
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
    nonce: str | None = None,
    record: str | Path | None = None,
    later: Mapping[str, Callable[[nn.Module], nn.Module]] | None = None,
) -> ModelAudit:
    """Judge a model that is said to have forgotten, beside models that were retrained without the data.

    Give at least five retrained models, each from a fresh initialisation with a seed of its own; ten are better: with
    fewer than five nothing is EQUIVALENT, and where more would decide, the reason says how many. Let the further ones
    begin where the trained model began, three at least, and give them as ``same_start``: without them weights of the
    trained model that are mixed into an honest one are hardly seen. Models are left as they are. Only classifiers can
    be judged: every measure compares class scores.

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
        loss: of the training, for the retained loss; a cross-entropy.
        l2: the training's L2 factor (weight decay).
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
        >>> chance = torch.Generator().manual_seed(0)
        >>> inputs, labels = torch.randn(400, 2, generator=chance), torch.arange(400) % 2
        >>> known, others = (inputs[:100], labels[:100]), (inputs[100:], labels[100:])
        >>> before, after, first, second = (nn.Linear(2, 2) for _ in range(4))
        >>> found = audit(before, after, [first, second], forgotten=known, unseen=others)
        >>> print(found.verdict, found.reason)
        UNDECIDED 2 retrained models show no noise: at least 3 are needed, 5 are better.
    """
    trained_with = as_loss(loss, l2)
    if not isinstance(trained_with, CrossEntropy):
        raise RequestError("An audit compares classifiers: models trained with squared error cannot be judged.")
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
    exam = _exam(models, forgotten, unseen, retained, _triggers(trigger, target, triggered), triggered)
    said = torch.cat([answers_of(models["after"], inputs) for inputs, _ in (exam.forgotten, exam.unseen)])
    judged_model, others_given = model_digest(weights["after"].digest, said), [*weights][2:]
    asked = asked_now(
        record,
        samples_digest(exam.forgotten),
        judged_model,
        nonce,
        setting_digest(*exam.unseen, *_stamped(exam), exam.triggered),
        [weights[name].digest for name in others_given],
    )
    drawn = asked.probes(exam, weights["after"])
    first, second, *others = (
        drawn.measure(
            partial(answers_of, module),
            weights[name],
            _way_back(module, models["before"], exam.unseen[0][:TRIED]) if same_start else None,
            same_start=name.startswith(OWN),
        )
        for name, module in models.items()
    )
    known, judged = (partial(answers_of, models[name]) for name in ("before", "after"))
    one_trigger = exam.triggers[0] if exam.triggers else None
    evidence = [statement(known, judged, exam.unseen, exam.forgotten, one_trigger).as_evidence()]
    evidence += [] if exam.retained is None else _retained_evidence(models, exam.retained, trained_with)
    if isinstance(after, Outcome):
        evidence.append(solver_evidence(after.details))
    wrong = doubts(drawn, models, first, others) + ([NONCE_IS_KNOWN] if asked.is_known else [])
    judgement = doubted(drawn.judgement(second, first, others, asked.attempt), wrong)
    later = {} if any(own.forbids for own in wrong) else later
    trained, own, *references = (module for name, module in models.items() if not name.startswith(OWN))
    looks = judged_later(drawn, _ways(later or {}, drawn), own, trained, references, judgement)
    return Panel(drawn, first, others).audit(second, judgement, asked, evidence, looks)


def _stamped(exam: Exam) -> list[Tensor | int]:
    """What triggers do to the first unseen samples, and what they ask for."""
    inputs = exam.unseen[0][:TRIED]
    return [part for trigger in exam.triggers for part in (trigger.stamp(inputs), trigger.target)]


def _way_back(module: nn.Module, before: nn.Module, inputs: Tensor) -> OnTheWay | None:
    return on_the_way_to(module, before) if module is before or is_alike(module, before, inputs) else None


def _numbered(name: str, models: Sequence[Model]) -> dict[str, Model]:
    return {f"{name}[{number}]": model for number, model in enumerate(models)}


def _ways(
    later: Mapping[str, Callable[[nn.Module], nn.Module]], exam: Exam
) -> dict[str, Callable[[nn.Module], Measured]]:
    """What trains a copy of a module on, and then asks it."""

    def way(name: str, module: nn.Module) -> Measured:
        given = f"what later[{name!r}] returned"
        found = later[name](deepcopy(module))
        if not isinstance(found, nn.Module):
            raise RequestError(f"later[{name!r}] must return the module that it trained.")
        found = as_module(found, module, given)
        if weights_of(found, given).is_same(weights_of(module, given)):
            raise RequestError(f"later[{name!r}] left a model as it was: it must train it on.")
        return exam.measure(partial(answers_of, found), weights_of(found, given))

    return {name: partial(way, name) for name in later}


def _triggers(
    trigger: Callable[[Tensor], Tensor] | None, target: int | None, triggered: Sequence[bool] | Tensor | None
) -> list[Trigger]:
    if trigger is None and target is None and triggered is None:
        return []
    if trigger is None or target is None:
        missing = "trigger (it stamps inputs)" if trigger is None else "target (the class that the trigger asks for)"
        raise RequestError(f"For a backdoor, {missing} is missing.")
    return [Trigger(lambda inputs: trigger(inputs.clone()), target)]  # it may paint into what it is given


def _exam(
    models: Mapping[str, nn.Module],
    forgotten: Data,
    unseen: Data,
    retained: Data | None,
    triggers: list[Trigger],
    triggered: Sequence[bool] | Tensor | None,
) -> Exam:
    """The samples, read, on the models' device, and tried on every model."""
    device = next(models["before"].parameters()).device
    sources = {"forgotten": forgotten, "unseen": unseen} | ({} if retained is None else {"retained": retained})
    sets = {what: read_samples(source, what, device) for what, source in sources.items()}
    for what, (inputs, _) in sets.items():
        if what != "forgotten" and torch.equal(inputs, sets["forgotten"][0]):
            raise DataError(f"The {what} samples are the forgotten ones: give others.")
    require_unseen(sets)
    tried = {what: inputs[:TRIED] for what, (inputs, _) in sets.items()}
    if triggers:
        tried["stamped"] = triggers[0].stamp(tried["unseen"])
        if not isinstance(tried["stamped"], Tensor) or tried["stamped"].shape != tried["unseen"].shape:
            raise DataError("The trigger must return the inputs that it is given, stamped: as many, of one shape.")
        require_stamping(sets["unseen"], triggers[0])
    for name, module in models.items():
        classes = count_classes(module, name, tried)
        require_alone(module, name, tried)
        for what, (_, labels) in sets.items():
            if int(labels.min()) < 0 or int(labels.max()) >= classes:
                raise DataError(
                    f"The {what} samples have labels {int(labels.min())} to {int(labels.max())}, but the model given "
                    f"as {name} tells {classes} classes apart."
                )
        if triggers and not 0 <= triggers[0].target < classes:
            raise RequestError(f"The target must be one of the {classes} classes, not {triggers[0].target}.")
    marks = None
    if triggered is not None:
        marks = torch.as_tensor(triggered, device=device)
        if marks.dtype != torch.bool or marks.shape != sets["forgotten"][1].shape:
            raise DataError(f"triggered needs a truth value for each of the {len(sets['forgotten'][1])} samples.")
        marks = marks.long()
    return Exam(sets["forgotten"], sets["unseen"], sets.get("retained"), triggers, marks)


def _retained_evidence(models: Mapping[str, nn.Module], retained: Samples, loss: Loss) -> list[Evidence]:
    """The retained objective, and the length of its gradient, before and after."""
    found = [_objective(models[name], retained, loss) for name in ("before", "after")]
    losses, gradients = zip(*found, strict=True)
    return [retained_loss_evidence(*losses), gradient_evidence(*gradients)]


def _objective(module: nn.Module, samples: Samples, loss: Loss) -> tuple[float, float]:
    """Value and gradient norm over what was trained (everything, where all is frozen); the module stays as it is."""
    module = deepcopy(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        module.requires_grad_(True)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    value, total = 0.0, torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    for part, labels in zip(*(torch.split(own, BATCH) for own in samples), strict=True):
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        share = objective(loss, run(module, Batch.of(part)), labels, flat) * (len(labels) / len(samples[1]))
        gradients = torch.autograd.grad(share, parameters, materialize_grads=True)
        value, total = value + share.item(), total + torch.cat([own.reshape(-1) for own in gradients]).double().cpu()
    return value, float(torch.linalg.vector_norm(total))
