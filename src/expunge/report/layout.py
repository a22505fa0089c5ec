"""How an experiment is laid out for a reader: one part a variant, the methods in one order, names of people's words."""

import re
from typing import Any

from expunge.auditing.measures import LEAST
from expunge.bench.results import Results

RECOVERY = "+recovery"
BFLOAT16 = "-bf16"
"""How the names of models end that are trained in bfloat16."""
_MOST_LEAVERS = 6
NO_METHODS = ("trained", "do-nothing", "retrain", "retrain-same-start", "retrain-same-init", "trained-sisa")
"""Rows that are there to compare with: models in which nothing was forgotten, and models retrained."""
_NAMES = {
    "trained": "do nothing (trained)",
    "do-nothing": "do nothing",
    "retrain": "retrain (gold standard)",
    "retrain-same-start": "retrain, same start",
    "retrain-same-init": "retrain, same init",  # in results of 0.2.0: the same initial weights, other batches
    "trained-sisa": "SISA before forgetting",
    "gradient-ascent": "gradient ascent",
    "projected-gradient-ascent": "projected gradient ascent",
    "fed-eraser": "FedEraser",
    "sisa": "SISA",
    "fine-tuning-same-budget": "fine-tuning, same budget",
    "not": "NoT",
    "fed-osd": "FedOSD",
    "unfiltered": "unfiltered trajectory",
    "cg": "conjugate gradient",
    "cg+nystrom": "conjugate gradient, Nyström preconditioner",
    "hf-kcu-paper": "HF-KCU as printed",
    "hf-kcu": "HF-KCU corrected",
    "retrace-krylov": "retrace, Krylov",
}


def method_name(method: str) -> str:
    """A method's name for people; an unknown one stays as it is.

    Example:
        >>> method_name("retrace-krylov+recovery")
        'retrace, Krylov + recovery'
    """
    base = method.removesuffix(RECOVERY)
    return _NAMES.get(base, base) + (" + recovery" if base != method else "")


def reading_order(results: Results) -> list[str]:
    """The methods with doing nothing and retraining first; doing nothing once, by whichever name.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("sisa", 0), Row("retrain", 0), Row("do-nothing", 0), Row("trained", 0)]
        >>> reading_order(Results("main", {}, {}, rows, {}))
        ['trained', 'retrain', 'sisa']
    """
    present = results.methods()
    first = [method for method in NO_METHODS if method in present]
    if "trained" in first and "do-nothing" in first:
        first.remove("do-nothing")
    return first + [method for method in present if method not in NO_METHODS]


def parts(results: Results) -> dict[str, Results]:
    """Each variant's own results by its label; an experiment without variants is one part without a label.

    Example:
        >>> list(parts(Results("demo", {}, {}, [], {})))
        ['']
    """
    return {label: results.part(label) for label in results.variants} or {"": results}


def label_of(results: Results) -> str:
    """The label of a part, "" where it has none.

    Example:
        >>> label_of(Results("demo", {}, {}, [], {}))
        ''
    """
    return next(iter(results.variants)) if len(results.variants) == 1 else ""


def file_label(label: str) -> str:
    """A variant's label as a part of a file's name.

    Example:
        >>> file_label("lambda=0.1"), file_label("CIFAR10 / ViT-Lite")
        ('lambda-0.1', 'cifar10-vit-lite')
    """
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")


def scenario_line(results: Results) -> str:
    """What was done in a part, in one line; empty where its scenario does not say.

    Example:
        >>> scenario = {"dataset": "digits", "clients": 10, "model": "digits-net", "forgotten": ["client-3"]}
        >>> scenario_line(Results("demo", scenario, {}, [], {}))
        'digits, 10 clients, digits-net; client-3 leaves.'
    """
    scenario = results.scenario
    if not all(key in scenario for key in ("dataset", "clients", "model")):
        return ""
    line = f"{scenario['dataset']}, {scenario['clients']} clients, {scenario['model']}"
    if str(scenario["model"]).endswith(BFLOAT16):
        line += " (trained in bfloat16)"
    if plan := scenario.get("plan"):
        line += f", {plan['rounds']} rounds of {plan['epochs']} epoch{'s' * (plan['epochs'] != 1)}"
    line += "".join(f"; {sentence}" for sentence in _departures(scenario))
    if seeds := scenario.get("seeds") or sorted({row.seed for row in results.rows}):
        line += f"; seed{'s' * (len(seeds) > 1)} {_listed(seeds)}"
    if retrains := scenario.get("retrains_per_seed"):
        line += f", {retrains} retrained model{'s' * (retrains > 1)}{' each' * (len(seeds) > 1)}"
        if retrains < LEAST:
            line += " (too few for a verdict)"
    return line + "."


def _listed(seeds: list[int]) -> str:
    """Seeds by name; many in a row by their ends."""
    if len(seeds) > 5 and seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _departures(scenario: dict[str, Any]) -> list[str]:
    """Who leaves, or whose samples, and who is poisoned."""
    steps = scenario.get("steps") or [{"clients": scenario.get("forgotten", []), "shares": {}, "triggered": []}]
    whole = [name for step in steps for name in step["clients"]]
    some = [name for step in steps for name in (*step["shares"], *step["triggered"])]
    poisoned = list(scenario.get("backdoors") or {})
    if others := [name for name in scenario.get("forgotten", []) if name not in (*whole, *some)]:
        return _one_per_seed(len(whole), len(some), len(poisoned), [*dict.fromkeys((*whole, *some, *others))])
    if whole and whole == poisoned:
        return [f"{_few(whole)} {'is' if len(whole) == 1 else 'are'} poisoned and leave{'s' * (len(whole) == 1)}"]
    said = [f"{_few(whole)} leave{'s' * (len(whole) == 1)}"] if whole else []
    said += [f"samples of {_few(some)} leave"] if some else []
    if len(scenario.get("attackers", poisoned)) > len(poisoned):
        return [*said, f"poisoned: {len(poisoned)} of them, others for other seeds"]
    return said + ([f"poisoned: {_few(poisoned)}"] if poisoned else [])


def _one_per_seed(whole: int, some: int, poisoned: int, names: list[str]) -> list[str]:
    """The same where every seed has other leavers: a scenario records the first seed's, and everybody's names."""
    listed = ", ".join(names) if len(names) <= _MOST_LEAVERS else f"{names[0]}, {names[1]}, ..."
    if whole == 1 and not some:
        alone = f"{listed} leave, one per seed"
        if poisoned <= 1:
            return [alone + ", poisoned" * poisoned]
        return [alone, f"poisoned: the leaver and {poisoned - 1} more"]
    what = f"{whole} clients leave" if whole else f"samples of {'one client' if some == 1 else f'{some} clients'} leave"
    said = f"{what}, {'another' if whole + some == 1 else 'others'} for each seed (of {listed})"
    return [said, f"poisoned: {poisoned} of them"] if poisoned else [said]


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} clients"
