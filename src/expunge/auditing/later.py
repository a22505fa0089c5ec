"""What becomes of a model when it is trained on: what was only hidden may come back.

Persistence: the clients that stay go on for some rounds. Relearning: the forgotten data is learnt for some epochs, and
what was only hidden comes back sooner. Each time the judged model, the trained one and every retrained one are trained
on alike, with the same schedule and the same shuffling, and then judged as they are judged at first: an honest model
goes where the retrained ones go. Both train every model once more, so both are done on request only. Measures of use
are left out: whoever learns the forgotten data alone gets worse at the rest, each model in its own way. No margin is
below the first one: what all have learnt alike differs in the last decimals only.

A later verdict can only lower the first one: what is wrong later was there all the time, while what looks right after
more training need not have been right before. Each look adds its own chance, about 2%, that an honest model is called
something else; and where the trained model itself forgets on the way, nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from expunge.auditing.judging import Judging
from expunge.auditing.measured import Shown
from expunge.auditing.tricks import owners_epoch, owners_only
from expunge.auditing.verdict import Judgement, Verdict
from expunge.core.vectors import Snapshot
from expunge.errors import ExpungeError, RequestError
from expunge.federation.engines.engine import Engine
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request

Model = TypeVar("Model")
Measured = TypeVar("Measured", bound=Shown)
Way = Callable[[Snapshot], Snapshot]
"""Trains a model on; the one that it is given stays as it is."""

WRONG = (Verdict.UNDER_FORGOTTEN, Verdict.OVER_FORGOTTEN, Verdict.DAMAGED)
"""Verdicts that say that something is wrong; of several the first of these decides."""


def judged_later(
    exam: Judging[Measured],
    ways: Mapping[str, Callable[[Model], Measured]],
    model: Model,
    trained: Model,
    retrained: Sequence[Model],
    now: Judgement,
) -> dict[str, Judgement]:
    """The verdict after each way of training on, by its name.

    Args:
        exam: what all models are asked.
        ways: each trains a copy of a model on, and measures it in this exam.
        model: the one to be judged.
        trained: the one that knows the data.
        retrained: those that never saw it.
        now: the verdict as it is, in this exam.

    Raises:
        ExpungeError: models cannot be compared after training on; the message begins with the way.
    """
    found = {}
    for name, way in ways.items():
        try:
            own, before, *others = (way(each) for each in (model, trained, *retrained))
            found[name] = exam.judgement(own, before, others, now.attempt, since=now)
        except ExpungeError as error:
            raise type(error)(f"After {name}: {error}") from error
    return found


def deciding(now: Judgement, later: Mapping[str, Judgement]) -> Judgement:
    """The judgement that counts: the first one, unless nothing is wrong with it and something is later.

    Example:
        >>> now, found = Judgement(Verdict.EQUIVALENT, "Near."), Judgement(Verdict.UNDER_FORGOTTEN, "It is back.")
        >>> told = deciding(now, {"5 more rounds": found})
        >>> print(told.verdict, told.reason)
        UNDER-FORGOTTEN After 5 more rounds: It is back.
    """
    if now.verdict not in WRONG:
        for verdict in WRONG:
            for name, found in later.items():
                if found.verdict is verdict:
                    return replace(found, reason=f"After {name}: {found.reason}", after=name)
    return now


def more_rounds(engine: Engine, plan: TrainingPlan, request: Request, rounds: int) -> Way:
    """So many rounds of those who stay, by the training's plan; the same for every model.

    Raises:
        RequestError: fewer than one round.
    """
    if rounds < 1:
        raise RequestError(f"Persistence needs at least one more round, not {rounds}.")
    parties = request.parties(engine.clients())

    def go_on(model: Snapshot) -> Snapshot:
        longer = replace(plan, rounds=rounds)
        return train(engine, model, longer, clients=parties.retained, keep=Keep(vectors=False)).model

    return go_on


def learnt_again(engine: Engine, plan: TrainingPlan, request: Request, epochs: int) -> Way:
    """So many epochs of the owners on what was to be forgotten; the same for every model.

    Args:
        engine: reaches the owners; a malicious one must not boost its updates here, or it relearns sooner.
        plan: the training's, for its batch size and learning rate.
        request: what was to be forgotten.
        epochs: a round of one epoch each.

    Raises:
        RequestError: fewer than one epoch.
    """
    if epochs < 1:
        raise RequestError(f"Relearning needs at least one epoch, not {epochs}.")
    left_out, single = owners_only(engine, request), replace(plan, rounds=1, epochs=1)

    def learn(model: Snapshot) -> Snapshot:
        for number in range(epochs):
            model = owners_epoch(engine, model, single, number, left_out)
        return model

    return learn
