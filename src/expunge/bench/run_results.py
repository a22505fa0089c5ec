"""Measure what was tried in a run."""

from __future__ import annotations

import dataclasses
from typing import Any

from expunge.auditing.exam import Measured
from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.results import Results, Row, environment, utc_now
from expunge.bench.run_folder import RunFolder
from expunge.bench.scenario import Federation


def run_results(folder: RunFolder, name: str, federation: Federation) -> Results:
    """Measure everything that was tried for one request, named by its folder."""
    request = folder.requests()[name]
    evaluation = Evaluation(federation, request)
    before = evaluation.measure(folder.trained(federation).model)
    tried = [(own, evaluation.measure(own.model)) for own in folder.tried(name, federation)]
    references = [measured for own, measured in tried if own.method == "retrain"]
    costs = [own.cost for own, _ in tried if own.method == "retrain"]

    def row(method: str, measured: Measured, *more: Any) -> Row:
        judged = bool(references) and method != "retrain"  # the yardstick is not judged by itself
        verdict = evaluation.judgement(measured, before, references).verdict.value if judged else None
        return dataclasses.replace(evaluation.row(method, measured, before, references, *more), verdict=verdict)

    rows = [row("trained", before)]
    in_order = sorted(tried, key=lambda pair: pair[0].method != "retrain")
    rows += [row(own.method, measured, own.cost, costs) for own, measured in in_order]
    noise = noise_ranges([retrain_noise(references)]) if references else {}
    described = {
        "forgotten": [*request.clients, *request.samples],
        "request": name,
        "departed": list(folder.departed),
        "warnings": list(dict.fromkeys(warning for own, _ in tried for warning in own.warnings)),
    }
    scenario = {**folder.scenario.as_dict(), **described}
    return Results(f"{folder.path.name}/{name}", scenario, environment(), rows, noise, date=utc_now())
