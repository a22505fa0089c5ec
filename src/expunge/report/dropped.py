"""What became of verdicts that were reached by another rule: how many EQUIVALENT ones dropped, and to what."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from expunge.auditing.verdict import RETRAINS, Verdict
from expunge.bench.rejudging import REFERENCE, Verdicts, judgement_of
from expunge.bench.results import Results, Row
from expunge.errors import RequestError
from expunge.report.layout import NO_METHODS, method_name
from expunge.report.markdown import drawn_table, escaped
from expunge.report.measures import MISSING
from expunge.report.verdicts import counted

DEFAULT = "retrace"
_EQUIVALENT = Verdict.EQUIVALENT.value
_WRONG = (Verdict.UNDER_FORGOTTEN.value, Verdict.OVER_FORGOTTEN.value, Verdict.DAMAGED.value)


@dataclass(frozen=True)
class Run:
    """One method with one seed: what it was called, and what it is called now beside so many retrained models.

    Of the default's that dropped, ``outside`` is the measure that lies farthest outside its margin, if one does.
    """

    experiment: str
    variant: str
    method: str
    seed: int
    before: str
    now: str
    retrained: int
    outside: str = ""


def runs(before: Mapping[str, Verdicts], now: Mapping[str, Results]) -> list[Run]:
    """Every run of a method that had a verdict and has one now.

    Example:
        >>> from expunge.bench.results import Row
        >>> results = Results("demo", {}, {}, [Row("sisa", 10, verdict="UNDECIDED")], {})
        >>> found = runs({"demo": {"": {"sisa": {"10": "EQUIVALENT"}}}}, {"demo": results})
        >>> [(run.method, run.before, run.now) for run in found]
        [('sisa', 'EQUIVALENT', 'UNDECIDED')]
    """
    found = []
    for name, results in now.items():
        retrained = Counter((row.variant, row.seed) for row in results.rows if row.method == REFERENCE)
        for row in results.rows:
            old = before.get(name, {}).get(row.variant or "", {}).get(row.method, {}).get(str(row.seed))
            if old is not None and row.verdict is not None and row.method not in NO_METHODS:
                beside = retrained[row.variant, row.seed]
                run = Run(name, row.variant or "", row.method, row.seed, old, row.verdict, beside)
                found.append(replace(run, outside=_outside(row, results)) if _dropped(run) else run)
    return found


def _dropped(run: Run) -> bool:
    return run.before == _EQUIVALENT != run.now


def _outside(row: Row, results: Results) -> str:
    """The measure that lies farthest outside its margin, of those that can tell; whether or not beyond doubt."""
    if row.method != DEFAULT:
        return ""
    try:
        findings = judgement_of(row, results).findings
    except RequestError:  # without the models beside it no margin is known
        return ""
    found = [one for one in findings if one.usable and one.excess > one.margin]
    return max(found, key=lambda one: one.excess / one.margin).measure.label if found else ""


def dropped_markdown(before: Mapping[str, Verdicts], now: Mapping[str, Results]) -> str:
    """A table with a line an experiment, then in sentences why so many dropped, what is wrong now, and what rose."""
    found = runs(before, now)
    headers = ["experiment", f"{DEFAULT}: equivalent before", "what these are now", "others: equivalent before"]
    lines = [
        [escaped(name), *_line([run for run in found if run.experiment == name])]
        for name in dict.fromkeys(run.experiment for run in found)
    ]
    table = drawn_table([*headers, "what these are now"], [*lines, ["**all**", *_line(found)]])
    sentences = [_too_few(found), _why(found), _wrong(found), _risen(found), _measured_again(now, found)]
    return "\n\n".join([table, *filter(None, sentences)]) + "\n"


def _line(found: list[Run]) -> list[str]:
    cells = []
    for own in ([run for run in found if run.method == DEFAULT], [run for run in found if run.method != DEFAULT]):
        were = [run for run in own if run.before == _EQUIVALENT]
        cells += [f"{len(were)} of {len(own)}" if own else MISSING]
        cells += [counted(Counter(run.now for run in were)) if were else MISSING]
    return cells


def _too_few(found: list[Run]) -> str:
    dropped = [run for run in found if _dropped(run)]
    few = sum(run.retrained < RETRAINS for run in dropped)
    return (
        f"{len(dropped)} of {sum(run.before == _EQUIVALENT for run in found)} dropped. {few} of these have fewer than "
        f"{RETRAINS} retrained models beside them, with which nothing is EQUIVALENT any more."
    )


def _why(found: list[Run]) -> str:
    dropped = [run for run in found if _dropped(run) and run.method == DEFAULT]
    measures = Counter(run.outside for run in dropped if run.outside)
    if not measures:
        return ""
    listed = ", ".join(f"{label} ({count})" for label, count in measures.most_common())
    return (
        f"Of the {len(dropped)} of {method_name(DEFAULT)} that dropped, {measures.total()} lie outside a margin that"
        f" can tell, whether or not beyond doubt; the farthest is: {listed}."
    )


def _wrong(found: list[Run]) -> str:
    """The default's runs that are outside a margin beyond doubt."""
    wrong = [run for run in found if run.method == DEFAULT and run.now in _WRONG]
    named = _named(wrong, lambda run: run.now)
    return f"Outside a margin beyond doubt {method_name(DEFAULT)} is now in these runs: {named}." if wrong else ""


def _risen(found: list[Run]) -> str:
    risen = [run for run in found if run.now == _EQUIVALENT != run.before]
    named = _named(risen, lambda run: f"{method_name(run.method)}, {run.before} before")
    return f"The other way round, EQUIVALENT now and not before: {named}." if risen else ""


def _named(found: Iterable[Run], group: Callable[[Run], str]) -> str:
    groups: dict[str, list[str]] = {}
    for run in found:
        where = f"{run.experiment}, {run.variant}" if run.variant else run.experiment
        groups.setdefault(group(run), []).append(f"{where}, seed {run.seed}")
    return "; ".join(f"**{what}** ({'; '.join(where)})" for what, where in groups.items())


def _measured_again(now: Mapping[str, Results], found: list[Run]) -> str:
    """Which experiments were measured again in place of judged by stored values."""
    again = [name for name in dict.fromkeys(run.experiment for run in found) if now[name].judged is None]
    return f"Measured again with all measures, not judged by stored values: {', '.join(again)}." if again else ""
