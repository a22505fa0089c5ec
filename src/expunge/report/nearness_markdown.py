"""The table that a sceptic wants, as Markdown: the verdicts, how far from retrained, how far there was to go."""

from collections import Counter

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.layout import method_name
from expunge.report.markdown import MARKS, drawn_table, escaped, marked
from expunge.report.measures import MISSING, write_value
from expunge.report.nearness import METHODS, WORK, Gap, Nearness, nearness
from expunge.report.table import Cell, judged_note, marks_mean, verdict_text
from expunge.report.verdicts import in_words, mark_of, worst

_SHORT = {
    "test_accuracy": "new data",
    "forget_accuracy": "forgotten data",
    "forget_loss": "loss on forgotten data",
    "asr": "backdoor",
    "kl_forget": "distance",
    "mia_auc": "privacy",
    WORK: "work",
}
_UNITS = {"forget_loss": " (off)", "mia_auc": " (AUC off)", "kl_forget": " (KL)", WORK: " (times less)"}


def nearness_markdown(results: Results) -> str:
    """How near the default comes to retraining: all verdicts in a sentence, a line a variant, how to read it.

    Raises:
        RequestError: the default method was not run.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", 10, forget_accuracy=value) for value in (0.60, 0.61, 0.62)]
        >>> rows += [Row("trained", 10, forget_accuracy=0.71)]
        >>> rows += [Row("retrace", 10, forget_accuracy=0.63, verdict="EQUIVALENT")]
        >>> text = nearness_markdown(Results("main", {}, {}, rows, {}))
        >>> "| retrace | **equivalent** | +2.0 (trained +10.0) |" in text
        True
    """
    found = nearness(results)
    if not found:
        raise RequestError(f"{results.experiment} has no rows of {' or '.join(METHODS)}: there is no nearness to show.")
    shown = [measure for measure in _SHORT if measure == WORK or any(measure in each.gaps for each in found)]
    several = len({each.variant for each in found}) > 1
    headers = [*(["variant"] * several), "method", "verdict", *map(_header, shown)]
    lines = [
        [
            *([escaped(each.variant)] * several),
            method_name(each.method),
            _verdict(results, each),
            *(_cell(each, measure) for measure in shown),
        ]
        for each in found
    ]
    return "\n\n".join([_tally(found), drawn_table(headers, lines, words=2 + several), _reading(results)]) + "\n"


def _tally(found: list[Nearness]) -> str:
    counts: Counter[str] = Counter()
    for each in found:
        counts.update(each.verdicts)
    return f"**{in_words(counts)}.**" if counts else "There are no verdicts."


def _verdict(results: Results, each: Nearness) -> str:
    if not each.verdicts:
        return MISSING
    return marked(Cell(verdict_text(results, each.verdicts), mark_of(worst(each.verdicts))))


def _header(measure: str) -> str:
    return _SHORT[measure] + _UNITS.get(measure, " (points off)")


def _cell(each: Nearness, measure: str) -> str:
    if measure == WORK:
        return MISSING if each.work is None else f"{write_value(each.work, 'times')}×"
    gap = each.gaps.get(measure)
    if gap is None:
        return MISSING
    if measure == "kl_forget":
        return f"{write_value(gap.own.mean, 'number')} ({_beside_distance(gap)})"
    unit, digits = {"mia_auc": (1, 3), "forget_loss": (1, 2)}.get(measure, (100, 1))
    own = f"{unit * gap.own.mean:+.{digits}f}"
    if each.seeds > 1:
        own += f" ± {unit * gap.own.spread:.{digits}f}"
    return f"{own} (trained {unit * gap.trained.mean:+.{digits}f})".replace("-", "−")


def _beside_distance(gap: Gap) -> str:
    trained = f"trained {write_value(gap.trained.mean, 'number')}"
    if gap.trained.mean > 0:
        trained = f"{100 * gap.own.mean / gap.trained.mean:.1f}% of {trained}"
    if gap.retrained is None:
        return trained
    low, high = (write_value(end, "number") for end in gap.retrained)
    return f"retrained {low}–{high}; {trained}"


def _reading(results: Results) -> str:
    text = (
        "Mean over seeds of the difference to the retrained models of the same seed ± its standard deviation. In"
        " brackets the trained model's, which is how far there was to go, and for the distance"
        f" (KL) the range of each retrained model's distance to the others. {marks_mean(*MARKS)}"
    )
    return " ".join([text, *judged_note(results)])
