"""Somebody's own classifiers as they sit an audit's exam: read and tried, asked for class scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from expunge.auditing.attempts import model_digest, samples_digest, setting_digest
from expunge.auditing.doubts import Doubt, doubts
from expunge.auditing.evidence import Evidence
from expunge.auditing.exam import Exam, Trigger
from expunge.auditing.given import (
    TRIED,
    answers_of,
    count_classes,
    is_alike,
    on_the_way_to,
    read_samples,
    require_alone,
)
from expunge.auditing.measured import Measured
from expunge.auditing.retained_evidence import retained_evidence
from expunge.auditing.sample_doubts import require_stamping, require_unseen
from expunge.auditing.statement import statement
from expunge.core.losses import Loss
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.local_data import Data, LocalData


@dataclass(frozen=True, eq=False)
class Backdoor:
    """What is known of a backdoor in the data to forget, as a user gives it; nothing where there was none.

    Attributes:
        trigger: stamps inputs.
        target: the class that the trigger asks for.
        triggered: which of the forgotten samples carry it.
    """

    trigger: Callable[[Tensor], Tensor] | None = None
    target: int | None = None
    triggered: Sequence[bool] | Tensor | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything is known."""
        return self.trigger is not None or self.target is not None or self.triggered is not None

    @property
    def triggers(self) -> list[Trigger]:
        """One, or none; refused where half of it is missing."""
        if not self.is_given:
            return []
        trigger, target = self.trigger, self.target
        if trigger is None or target is None:
            missing = (
                "trigger (it stamps inputs)" if trigger is None else "target (the class that the trigger asks for)"
            )
            raise RequestError(f"For a backdoor, {missing} is missing.")
        return [Trigger(lambda inputs: trigger(inputs.clone()), target)]  # it may paint into what it is given


@dataclass(frozen=True, eq=False)
class ByScores:
    """Classifiers, by name, and their exam.

    Attributes:
        models: all modules.
        exam: what they are asked.
    """

    models: Mapping[str, nn.Module]
    exam: Exam

    @classmethod
    def of(cls, models: Mapping[str, nn.Module], sources: Mapping[str, Data], backdoor: Backdoor) -> ByScores:
        """The samples, read, on the models' device, and tried on every model."""
        triggers = backdoor.triggers
        device = next(models["before"].parameters()).device
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
                        f"The {what} samples have labels {int(labels.min())} to {int(labels.max())}, but the model "
                        f"given as {name} tells {classes} classes apart."
                    )
            if triggers and not 0 <= triggers[0].target < classes:
                raise RequestError(f"The target must be one of the {classes} classes, not {triggers[0].target}.")
        marks = None
        if backdoor.triggered is not None:
            marks = torch.as_tensor(backdoor.triggered, device=device)
            if marks.dtype != torch.bool or marks.shape != sets["forgotten"][1].shape:
                raise DataError(f"triggered needs a truth value for each of the {len(sets['forgotten'][1])} samples.")
            marks = marks.long()
        return cls(models, Exam(sets["forgotten"], sets["unseen"], sets.get("retained"), triggers, marks))

    @property
    def request(self) -> str:
        """What names the request in a record."""
        return samples_digest(self.exam.forgotten)

    @property
    def setting(self) -> str:
        """What names that from which a nonce draws questions."""
        exam, inputs = self.exam, self.exam.unseen[0][:TRIED]
        stamped = [part for trigger in exam.triggers for part in (trigger.stamp(inputs), trigger.target)]
        return setting_digest(*exam.unseen, *stamped, exam.triggered)

    def judged(self, weights: Snapshot) -> str:
        """What names the judged model in a record."""
        said = [answers_of(self.models["after"], inputs) for inputs, _ in (self.exam.forgotten, self.exam.unseen)]
        return model_digest(weights.digest, torch.cat(said))

    def doubts(self, exam: Exam, trained: Measured, others: Sequence[Measured]) -> list[Doubt]:
        """What looks wrong with what was given."""
        return doubts(exam, self.models, trained, others)

    def measured(
        self, exam: Exam, module: nn.Module, weights: Snapshot, *, back: bool = False, same_start: bool = False
    ) -> Measured:
        """One module in an exam like this one; and on the way back to the trained one, where that is asked for."""
        before = self.models["before"]
        back = back and (module is before or is_alike(module, before, self.exam.unseen[0][:TRIED]))
        way = on_the_way_to(module, before) if back else None
        return exam.measure(partial(answers_of, module), weights, way, same_start=same_start)

    def evidence(self, loss: Loss) -> list[Evidence]:
        """What can be said without retrained models."""
        known, judged = (partial(answers_of, self.models[name]) for name in ("before", "after"))
        exam = self.exam
        one_trigger = exam.triggers[0] if exam.triggers else None
        found = [statement(known, judged, exam.unseen, exam.forgotten, one_trigger).as_evidence()]
        if exam.retained is None:
            return found
        return found + retained_evidence(self.models, LocalData(exam.retained, "retained"), loss)
