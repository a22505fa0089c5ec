"""The gate before anything is destroyed: a verdict beside retrained models, or what can be said without them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from expunge.auditing.attempts import RECORD
from expunge.auditing.audit import audit
from expunge.auditing.measured import shares_start
from expunge.auditing.statement import evidence
from expunge.auditing.verdict import from_own_start
from expunge.auditing.words import left
from expunge.core.batch import alike, joined
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.local_data import Data, LocalData
from expunge.federation.keeping.files import write_whole
from expunge.ledger.federation import Federation
from expunge.ledger.gate import opens
from expunge.unlearning.request import Request

SHORT = 3
"""Short trainings without the data, where nobody is retrained; each of a fifth of the rounds."""

ATTEMPTS = "attempts"
"""A folder in the workplace that counts the audits of requests; it has a lock of its own."""

Tell = Callable[[str, int, int], None]
Weights = Mapping[str, Tensor]


class Judge:
    """Looks at a new model beside the old one.

    Args:
        federation: whose models they are.
        request: what was to be forgotten.
        workplace: where attempts are counted until the request is over.
        tell: told how far the trainings for it are.
    """

    def __init__(self, federation: Federation, request: Request, workplace: Path, tell: Tell) -> None:
        self._federation, self._request, self._tell = federation, request, tell
        self._record = workplace / ATTEMPTS / RECORD

    def judge(self, before: Snapshot, after: Snapshot, retrains: int, file: Path) -> dict[str, Any] | None:
        """What is found, for the log; None where nothing can be asked.

        Args:
            before: the old model.
            after: the new one.
            retrains: models to retrain for a verdict; 0 for what can be said without.
            file: where all of it goes.
        """
        federation = self._federation
        if federation.unseen is None:
            return None
        forgotten = self._forgotten()
        if retrains and (forgotten is None or federation.clients is None):
            raise RequestError("To retrain, the clients' data and that of the leaver must be in the federation file.")
        models = (federation.module(before), federation.module(after))
        read = {"loss": federation.loss, "collate": federation.collate, "forward": federation.forward}
        asked: Any = {**read, "trigger": federation.trigger, "target": federation.target}
        if retrains and forgotten is not None:
            fresh, own = self._references(before, retrains)
            found = audit(*models, fresh, forgotten, federation.unseen(), same_start=own, record=self._record, **asked)
            whole = found.as_dict()
            told = {"by": "verdict", "word": found.verdict.value, "power": whole["power"], "level": whole["level"]}
            told |= {"attempt": whole["attempt"], "retrained": retrains, "sentence": found.reason}
            told |= {"margins": [_margin(own) for own in found.findings]}
        else:
            can_train = forgotten is not None and federation.clients is not None
            short = self._trainings(SHORT, max(1, federation.plan.rounds // 5)) if can_train else []
            said = evidence(*models, federation.unseen(), forgotten=forgotten, short=short, **asked)
            whole = said.as_dict()
            told = {"by": "evidence", "word": said.word.value, "sentence": said.sentence, "margins": []}
        text = json.dumps(whole, indent=1) + "\n"
        write_whole(file, text, private=True)
        return {**told, "passed": opens(told["word"]), "file": hashlib.sha256(text.encode()).hexdigest()}

    def _references(self, before: Snapshot, count: int) -> tuple[list[Weights], list[Weights]]:
        """Fresh retrained models, and a few more of the training's own start.

        Of a model that was trained elsewhere and put into the store that is not known: the plan may have another one.
        Then there are none, which the audit's limits speak of.
        """
        rounds, more = self._federation.plan.rounds, from_own_start(count)
        fresh = self._trained(range(count), count + more, rounds)
        sharing = self._trained(range(count, count + more), count + more, rounds, start=self._federation.plan.seed)
        if not shares_start(before, sharing, fresh):
            sharing = []
        return [self._weights(own) for own in fresh], [self._weights(own) for own in sharing]

    def _trainings(self, count: int, rounds: int) -> list[Weights]:
        return [self._weights(model) for model in self._trained(range(count), count, rounds)]

    def _trained(self, numbers: range, count: int, rounds: int, start: int | None = None) -> list[Snapshot]:
        models = []
        for number in numbers:
            self._tell("training for the audit", number, count)
            seed = 1000 + number + self._federation.plan.seed  # from other weights than the training's own
            models.append(self._federation.trained(seed, self._request, rounds, start).model)
        self._tell("training for the audit", numbers.stop, count)
        return models

    def _weights(self, model: Snapshot) -> Weights:
        return self._federation.module(model).state_dict()

    def _forgotten(self) -> Data | None:
        """The samples to be forgotten, where they can still be had."""
        parts = []
        for name in (*self._request.clients, *self._request.samples):
            source = self._source(name)
            if source is None:
                return None
            data = LocalData(source, name, self._federation.collate)
            parts.append(data.take(self._request.samples.get(name, range(len(data)))))
        if all(alike(parts[0], own) for own in parts[1:]):
            return joined(parts)
        raise DataError("These clients' samples do not go into one batch: ask for each in a request of its own.")

    def _source(self, name: str) -> Data | None:
        if self._federation.forgotten is not None:
            return self._federation.forgotten(name)
        return self._federation.data().get(name) if self._federation.clients is not None else None


def _margin(found: Any) -> dict[str, Any]:
    """One measure: how much is left of what there was to forget, and how much would pass."""
    share = left(found)
    numbers = {} if share is None else {"left": _short(share.share), "margin": _short(share.margin)}
    return {"measure": found.measure.name, "outcome": str(found.outcome), **numbers}


def _short(number: float) -> float:
    return float(f"{number:.3g}")
