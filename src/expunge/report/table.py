"""One line a method, what retraining itself varies by as the last lines: the content of every table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expunge.auditing.measures import MEASURES
from expunge.bench.measuring import FAILED
from expunge.bench.rejudging import not_stored
from expunge.bench.results import Noise, Results
from expunge.report.columns import Measure, columns_for, short_columns
from expunge.report.contradictions import NOTES
from expunge.report.layout import label_of, method_name, parts, reading_order
from expunge.report.measures import MISSING, retrained_range, write_printed, write_summary, write_value
from expunge.report.printed import PRINTED_SERIES, SOURCES, beside, is_its_own
from expunge.report.verdicts import (
    Mark,
    counted,
    equivalent_of,
    evidence_on,
    mark_of,
    supported_of,
    supported_where_equivalent,
    verdicts_on,
    worst,
)

NOT_FROM_MODELS = "†"
"""Behind a verdict that was reached by stored values."""

LATER = ("kept_share", "trigger_moves")
"""Measures of the verdict that came when there were results judged by margins."""

STEP_SINCE = "0.5.2"
"""The version since which retrace is as it is; what earlier ones measured says so."""


@dataclass(frozen=True)
class Cell:
    """A value as text, for a verdict its mark, and what the paper prints in its place."""

    text: str
    mark: Mark | None = None
    paper: str | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table: a name and a cell for every column."""

    name: str
    cells: tuple[Cell, ...]
    noise: bool = False

    @property
    def mark(self) -> Mark | None:
        """That of the verdict, which is about the whole line."""
        return next((cell.mark for cell in self.cells if cell.mark is not None), None)


def table_lines(results: Results, *, short: bool = False) -> list[Line]:
    """The table's content for one variant, whatever it is then drawn with; the last lines are retraining's noise.

    `short` is for few columns (`short_columns`).

    Example:
        >>> from expunge.bench.results import Row
        >>> table_lines(Results("demo", {}, {}, [Row("trained", 0, asr=0.957)], {}))[0].cells[2].text
        '95.7'
    """
    columns = short_columns(results) if short else columns_for(results)
    lines = [
        Line(method_name(method), tuple(_cell(results, method, column) for column in columns))
        for method in reading_order(results)
    ]
    limits = {column.key: retrained_range(results, column.key) for column in columns if column.compared}
    same = _same_init(results)
    name = f"retrain noise{', fresh init' if same else ''} (low to high)"
    lines.append(_noise_line(name, columns, limits))
    if same:
        ranges = {key: (of["low"], of["high"]) for key, of in same.items()}
        lines.append(_noise_line("retrain noise, same init (low to high)", columns, ranges))
    return lines


def caption(results: Results, near: str = "green", far: str = "red") -> str:
    """How to read the table: over how many seeds, and what its marks say.

    Example:
        >>> caption(Results("demo", {}, {}, [], {}))
        'Mean ± standard deviation over 0 seeds. No line has a mark: there is no verdict without retrained models.'
    """
    counts = sorted({len({row.seed for row in part.rows}) for part in parts(results).values()})
    seeds = f"{counts[0]} seed{'s' * (counts[0] != 1)}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    marks = "No line has a mark: there is no verdict without retrained models."
    if results.experiment == "verdict":
        marks = "Behind the count of equivalent runs is the exact 95% interval of their share (Clopper-Pearson)."
    elif results.experiment == "evidence":
        marks = _of_the_equivalent(results)
    elif results.scenario.get("more_rounds"):
        marks = "No line has a mark: a verdict is reached before more rounds follow."
    elif any(row.method == "retrain" for row in results.rows) and not any(row.verdict for row in results.rows):
        marks = "No line has a mark: what is measured here has no verdict."
    elif any(row.verdict is not None for row in results.rows):
        marks = marks_mean(near, far)
    return " ".join([f"Mean ± standard deviation over {seeds}. {marks}", *judged_note(results), *version_note(results)])


def version_note(results: Results) -> list[str]:
    """That the default step was another one when this was run: a sentence, or none.

    Example:
        >>> from expunge.bench.results import Row
        >>> version_note(Results("main", {}, {"expunge": "0.1.0"}, [Row("retrace", 10)], {}))
        ['Run with expunge 0.1.0, whose retrace was an earlier one.']
    """
    ran = results.environment.get("expunge")
    versions = [str(each) for each in (ran if isinstance(ran, list) else [ran]) if each is not None]
    older = [each for each in versions if _numbers(each) < _numbers(STEP_SINCE)]
    if not older or not any(row.method.startswith("retrace") for row in results.rows):
        return []
    return [f"Run with expunge {', '.join(older)}, whose retrace was an earlier one."]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def judged_note(results: Results) -> list[str]:
    """What a verdict did not look at, where it was reached by stored values: a sentence, or none.

    Example:
        >>> from expunge.bench.results import Judged
        >>> judged_note(Results("demo", {}, {}, [], {}, judged=Judged("margins", "stored values", ["test_loss"])))
        ['† Judged from stored values. Not looked at, for that needs models that are not stored: loss on unseen data.']
    """
    if results.judged is None:
        judged = any(row.verdict is not None for row in results.rows)
        later = [name for name in not_stored(results) if name in LATER] if judged else []
        return [f"Judged before these were measures of the verdict: {_labels(later)}."] if later else []
    missing = _labels(results.judged.without)
    looked = f"Not looked at, for that needs models that are not stored: {missing}."
    return [f"{NOT_FROM_MODELS} Judged from {results.judged.source}. {looked}"]


def _labels(names: Sequence[str]) -> str:
    return ", ".join(MEASURES[name].label for name in names if name in MEASURES)


def verdict_text(results: Results, counts: Mapping[str, int]) -> str:
    """The verdicts for a cell, with a sign where stored values were judged and no model.

    Example:
        >>> verdict_text(Results("demo", {}, {}, [], {}), {"EQUIVALENT": 3})
        'equivalent'
    """
    judged = results.judged is not None and set(counts) != {FAILED}
    return counted(counts) + (f" {NOT_FROM_MODELS}" if judged else "")


def marks_mean(near: str, far: str) -> str:
    """What the marks of a table say, in a sentence.

    Example:
        >>> marks_mean("green", "red").startswith("A line's mark is the worst verdict of its runs: green")
        True
    """
    return (
        f"A line's mark is the worst verdict of its runs: {near} if that is equivalent, {far} if a run was told from"
        " retraining or gave up, no mark if it is undecided."
    )


def paper_notes(results: Results, *, contradictions: bool = True) -> list[str]:
    """Where the paper's values beside ours come from, and where it contradicts itself, in sentences.

    Example:
        >>> from expunge.bench.results import Row
        >>> paper_notes(Results("main", {}, {}, [Row("sisa", 10)], {}))[0]
        'What the paper prints is from its Table 1; seconds from Figure 1b.'
        >>> paper_notes(Results("main", {"dataset": "digits"}, {}, [Row("sisa", 10)], {}))[1]
        'That is about its own data at full size: beside a smaller run it only shows what was claimed.'
    """
    of = parts(results).values()
    with_theirs = [part for part in of if any(cell.paper for line in table_lines(part) for cell in line.cells)]
    if results.experiment not in PRINTED_SERIES and not with_theirs:
        return []
    notes = [f"What the paper prints is from its {SOURCES[results.experiment]}."]
    if not all(is_its_own(part) for part in with_theirs or of):
        notes.append("That is about its own data at full size: beside a smaller run it only shows what was claimed.")
    return [*notes, *(NOTES.get(results.experiment, ()) if contradictions else ())]


def _cell(results: Results, method: str, column: Measure) -> Cell:
    if column.key == "verdict":
        return _verdict(results, method)
    if column.key == "evidence":
        words = evidence_on(results, method)
        return Cell(supported_of(words) if words else MISSING)
    theirs = beside(results, method, column.key)
    paper = None if theirs is None else write_printed(theirs, column.form)
    return Cell(write_summary(results.summary(method, column.key), column.form), paper=paper)


def _verdict(results: Results, method: str) -> Cell:
    """The verdicts on a method; the worst gives the mark."""
    counts = verdicts_on(results, method)
    if not counts:
        return Cell(MISSING)
    # Studies of judging count: how often is the question there, and no line is praised or blamed for it.
    if results.experiment in ("verdict", "evidence"):
        return Cell(equivalent_of(counts))
    # Retraining is the yardstick: marking it would praise it for being itself.
    return Cell(verdict_text(results, counts), None if method.startswith("retrain") else mark_of(worst(counts)))


def _of_the_equivalent(results: Results) -> str:
    named = {f"{label}: " if label else "": part for label, part in parts(results).items()}
    shares = "; ".join(label + supported_where_equivalent(part) for label, part in named.items())
    return (
        "Behind a count is the exact 95% interval of its share (Clopper-Pearson). Supported of the models that are"
        f" equivalent beside retrained ones: {shares}."
    )


def _same_init(results: Results) -> Noise:
    return results.variants[label_of(results)].noise_same_init if len(results.variants) == 1 else {}


def _noise_line(
    name: str,
    columns: tuple[Measure, ...],
    limits: dict[str, tuple[float, float]] | dict[str, tuple[float, float] | None],
) -> Line:
    cells = []
    for column in columns:
        ends = limits.get(column.key)
        if ends is None:
            cells.append(Cell(MISSING))
        else:
            low, high = (write_value(end, column.form, scale=ends[1]) for end in ends)
            cells.append(Cell(f"{low}–{high}"))
    return Line(name, tuple(cells), noise=True)
