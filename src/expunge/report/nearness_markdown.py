"""The table that a sceptic wants, as Markdown: how far from retrained, how far there was to go, which goals fail."""

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.goals import GOALS, WORK, Attack
from expunge.report.layout import method_name
from expunge.report.markdown import drawn_table, escaped
from expunge.report.measures import MISSING, write_value
from expunge.report.nearness import METHODS, Gap, Nearness, Status, nearness

_SHORT = {
    "test_accuracy": "new data",
    "forget_accuracy": "forgotten data",
    "asr": "backdoor",
    "kl_forget": "distance",
    "mia_auc": "privacy",
    WORK: "work",
}
_UNITS = {"mia_auc": " (AUC off)", "kl_forget": " (KL)", WORK: " (times less)"}
_ATTACKS: dict[Attack, str] = {
    "weak": "a client that poisoned its data",
    "strong": "a client that boosted its poisoned updates",
    "clean": "a clean client",
}
_STATUSES: tuple[Status, ...] = ("missed", "cannot tell", "met")


def nearness_markdown(results: Results) -> str:
    """How near the default comes to retraining: the goals it misses first, a line a variant, how to read it.

    Raises:
        RequestError: the default method was not run.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", 10, forget_accuracy=value) for value in (0.60, 0.61, 0.62)]
        >>> rows += [Row("trained", 10, forget_accuracy=0.71), Row("retrace", 10, forget_accuracy=0.63)]
        >>> text = nearness_markdown(Results("main", {}, {}, rows, {}))
        >>> "**+2.0** (trained +10.0)" in text and "**1 missed** (work)" in text
        True
    """
    found = nearness(results)
    if not found:
        raise RequestError(f"{results.experiment} has no rows of {' or '.join(METHODS)}: there is no nearness to show.")
    shown = [measure for measure in _SHORT if measure == WORK or any(measure in each.gaps for each in found)]
    several = len({each.variant for each in found}) > 1
    headers = [*(["variant"] * several), "method", "goals", *map(_header, shown), "verdict"]
    lines = [
        [
            *([escaped(each.variant)] * several),
            method_name(each.method),
            _goals(each),
            *(_cell(each, measure) for measure in shown),
            ", ".join(f"{verdict.lower()} {count}" for verdict, count in each.verdicts.items()) or MISSING,
        ]
        for each in found
    ]
    return "\n\n".join([_tally(found), drawn_table(headers, lines, words=2 + several), _reading(found)]) + "\n"


def _tally(found: list[Nearness]) -> str:
    """How many goals are missed, in a sentence; those that cannot be told are not among the met ones."""
    counts = {status: sum(len(each.measures(status)) for each in found) for status in _STATUSES}
    untold = f", {counts['cannot tell']} cannot be told" if counts["cannot tell"] else ""
    verbs = {status: "is" if counts[status] == 1 else "are" for status in _STATUSES}
    missed = f"{counts['missed']} of {sum(counts.values())} goals {verbs['missed']} missed"
    return f"**{missed}**{untold}, {counts['met']} {verbs['met']} met."


def _goals(each: Nearness) -> str:
    named = {status: [_SHORT[measure] for measure in each.measures(status)] for status in _STATUSES}
    said = [f"**{len(named['missed'])} missed** ({', '.join(named['missed'])})"] if named["missed"] else []
    if untold := named["cannot tell"]:
        said.append(f"{len(untold)} cannot tell ({', '.join(untold)})")
    return "; ".join([*said, *([f"{len(named['met'])} met"] if named["met"] else [])])


def _header(measure: str) -> str:
    return _SHORT[measure] + _UNITS.get(measure, " (points off)")


def _cell(each: Nearness, measure: str) -> str:
    status = each.statuses.get(measure)
    if measure == WORK:
        return MISSING if each.work is None else _marked(f"{write_value(each.work, 'times')}×", status)
    gap = each.gaps.get(measure)
    if gap is None:
        return MISSING
    if measure == "kl_forget":
        return f"{_marked(write_value(gap.own.size, 'number'), status)} ({_beside_distance(gap)})"
    digits = 3 if measure == "mia_auc" else 2 if status == "missed" and gap.own.size < 0.1 else 1
    unit = 1 if measure == "mia_auc" else 100
    own = f"{unit * gap.own.mean:+.{digits}f}"
    if each.seeds > 1:
        own += f" ± {unit * gap.own.spread:.{digits}f}"
    trained = f"{unit * gap.trained.mean:+.{3 if unit == 1 else 1}f}"
    return f"{_marked(own, status)} (trained {trained})".replace("-", "−")


def _beside_distance(gap: Gap) -> str:
    trained = f"trained {write_value(gap.trained.size, 'number')}"
    if gap.trained.size > 0:
        trained = f"{100 * gap.own.size / gap.trained.size:.1f}% of {trained}"
    if gap.retrained is None:
        return trained
    low, high = (write_value(end, "number") for end in gap.retrained)
    return f"retrained {low}–{high}; {trained}"


def _marked(text: str, status: Status | None) -> str:
    return {"met": f"**{text}**", "missed": f"{text} !", "cannot tell": f"{text} ?"}.get(status or "", text)


def _reading(found: list[Nearness]) -> str:
    attacks = [attack for attack in GOALS if any(each.attack == attack for each in found)]
    goals = "; ".join(
        f"for {_ATTACKS[attack]}: " + ", ".join(f"{_SHORT[goal.measure]} {goal.words()}" for goal in GOALS[attack])
        for attack in attacks
    )
    return (
        "Mean over seeds of the difference to the retrained models of the same seed ± its standard deviation. In"
        " brackets the trained model's, which is how far there was to go, and for the distance"
        " (KL) the range of each retrained model's distance to the others. **Bold** meets its goal, an exclamation mark"
        " (!) misses it, and a question mark (?) says that it cannot be told: doing nothing lies among the retrained"
        f" models, too, or there are fewer than three of them. Goals {goals}."
    )
