"""One line a method, what retraining itself varies by as the last lines: the content of every table."""

from collections import Counter
from dataclasses import dataclass

from expunge.bench.results import Noise, Results
from expunge.report.columns import Measure, columns_for, short_columns
from expunge.report.contradictions import NOTES
from expunge.report.layout import label_of, method_name, parts, reading_order
from expunge.report.measures import (
    FEWEST_RETRAINS,
    MISSING,
    Judgement,
    judge,
    retrained_range,
    write_printed,
    write_summary,
    write_value,
)
from expunge.report.printed import PRINTED_SERIES, SOURCES, beside, is_its_own


@dataclass(frozen=True)
class Cell:
    """A value as text, how near to retraining it is, and what the paper prints in its place."""

    text: str
    judgement: Judgement | None = None
    paper: str | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table: a name and a cell for every column."""

    name: str
    cells: tuple[Cell, ...]
    noise: bool = False


_NEARNESS: dict[str, Judgement] = {"EQUIVALENT": "near", "UNDECIDED": "between"}
"""How a verdict is marked; all others are far."""


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
    limits = {column.key: retrained_range(results, column.key) for column in columns if column.side != "none"}
    same = _same_init(results)
    name = f"retrain noise{', fresh init' if same else ''} (low to high)"
    lines.append(_noise_line(name, columns, limits))
    if same:
        ranges = {key: (of["low"], of["high"]) for key, of in same.items()}
        lines.append(_noise_line("retrain noise, same init (low to high)", columns, ranges))
    return lines


def caption(results: Results, near: str = "green", far: str = "red") -> str:
    """How to read the table, in one sentence; in two where a variant has too few retrained models to be judged by.

    Example:
        >>> caption(Results("demo", {}, {}, [], {})).startswith("Mean ± standard deviation over 0 seeds")
        True
    """
    of = parts(results).values()
    counts = sorted({len({row.seed for row in part.rows}) for part in of})
    seeds = f"{counts[0]} seed{'s' * (counts[0] != 1)}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    few = any(0 < len(part.values("retrain", "test_accuracy")) < FEWEST_RETRAINS for part in of)
    which = ", fresh init" if any(part.noise_same_init for part in results.variants.values()) else ""
    return (
        f"Mean ± standard deviation over {seeds}: {near} lies in the range of"
        f" retrained models (retrain noise{which}; rates are compared within a seed) or right beside it, {far} is far"
        " outside, and a column in which"
        f" doing nothing is {near} too says nothing about forgetting."
        + (f" Beside fewer than {FEWEST_RETRAINS} retrained models nothing is marked or judged." if few else "")
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
    # Retraining is the yardstick: colouring it would praise it for being itself.
    judgement = None if method.startswith("retrain") else judge(results, method, column.key)
    theirs = beside(results, method, column.key)
    paper = None if theirs is None else write_printed(theirs, column.form)
    return Cell(write_summary(results.summary(method, column.key), column.form), judgement, paper)


def _verdict(results: Results, method: str) -> Cell:
    """The verdict on a method, and how often each where they differ; the most frequent one gives the colour."""
    verdicts = [row.verdict for row in results.rows if row.method == method and row.verdict is not None]
    if not verdicts:
        return Cell(MISSING)
    counts = Counter(verdicts).most_common()
    judgement = _NEARNESS.get(counts[0][0], "far")
    text = counts[0][0].lower()
    if len(counts) > 1:
        text = ", ".join(f"{verdict.lower()} {count}" for verdict, count in counts)
    return Cell(text, None if method.startswith("retrain") else judgement)


def _same_init(results: Results) -> Noise:
    return results.variants[label_of(results)].noise_same_init if len(results.variants) == 1 else {}


def _noise_line(
    name: str,
    columns: tuple[Measure, ...],
    limits: dict[str, tuple[float, float]] | dict[str, tuple[float, float] | None],
) -> Line:
    cells = []
    for column in columns:
        ends = None if column.side == "none" else limits.get(column.key)
        if ends is None:
            cells.append(Cell(MISSING))
        else:
            low, high = (write_value(end, column.form, scale=ends[1]) for end in ends)
            cells.append(Cell(f"{low}–{high}"))
    return Line(name, tuple(cells), noise=True)
