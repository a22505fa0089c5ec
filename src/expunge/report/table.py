"""One row a method, what retraining itself varies by as the last row: in the terminal and as Markdown."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from expunge.bench.results import Results
from expunge.report.measures import (
    COLUMNS,
    MISSING,
    Judgement,
    judge,
    method_name,
    retrained_range,
    write_summary,
    write_value,
)

_COLOURS = {"near": "green", "between": "", "far": "red", None: ""}


@dataclass(frozen=True)
class Cell:
    """A value as text and how near to retraining it is."""

    text: str
    judgement: Judgement | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table: a name and a cell for every column."""

    name: str
    cells: tuple[Cell, ...]


def table_lines(results: Results) -> list[Line]:
    """The table's content, whatever it is then drawn with; the last line is the noise of retraining.

    Example:
        >>> from expunge.bench.results import Row
        >>> table_lines(Results("demo", {}, {}, [Row("trained", 0, asr=0.957)], {}))[0].cells[2].text
        '95.7'
    """
    return [_method_line(results, method) for method in results.methods()] + [_noise_line(results)]


def caption(results: Results, near: str = "green", far: str = "red") -> str:
    """How to read the table, in one sentence.

    Example:
        >>> caption(Results("demo", {}, {}, [], {})).startswith("Mean ± standard deviation over 0 seeds")
        True
    """
    seeds = len({row.seed for row in results.rows})
    return (
        f"Mean ± standard deviation over {seeds} seed{'' if seeds == 1 else 's'}: {near} lies in the range of"
        f" retrained models (last row) or right beside it, {far} is far outside, and a column in which doing nothing is"
        f" {near} too says nothing about forgetting."
    )


def terminal_table(results: Results) -> Table:
    """The table for a terminal.

    Example:
        >>> from expunge.bench.results import Row
        >>> terminal_table(Results("demo", {}, {}, [Row("trained", 0, asr=0.957)], {})).row_count
        2
    """
    table = Table(title=Text(results.experiment), caption=Text(caption(results)), caption_justify="left")
    table.box, table.padding, table.show_edge = SIMPLE_HEAD, 0, False
    table.add_column("method", overflow="fold")
    for column in COLUMNS:
        # As wide as the values: headers wrap between words and everything fits a terminal of 80 columns.
        width = {"number": 13, "percent": 10, "times": 6}[column.form]
        table.add_column(column.header, justify="right", overflow="fold", max_width=width)
    *methods, noise = table_lines(results)
    for line in methods:
        cells = (Text(cell.text.replace("± ", "±"), style=_COLOURS[cell.judgement]) for cell in line.cells)
        table.add_row(Text(line.name), *cells)
    table.add_section()
    ranges = (Text(cell.text if cell.text == MISSING else cell.text.replace("–", " to ")) for cell in noise.cells)
    table.add_row(Text(noise.name), *ranges, style="dim")
    return table


def markdown_table(results: Results) -> str:
    """The same table as Markdown; bold instead of green, an exclamation mark instead of red.

    Example:
        >>> from expunge.bench.results import Row
        >>> print(markdown_table(Results("demo", {}, {}, [Row("trained", 0, asr=0.957)], {})).splitlines()[2])
        | do nothing (trained) | – | – | 95.7 | – | – | – | – |
    """
    headers = ["method", *(column.header for column in COLUMNS)]
    rules = ["---", *("---:" for _ in COLUMNS)]
    lines = [headers, rules]
    lines += [[_escape(line.name), *(_mark(cell) for cell in line.cells)] for line in table_lines(results)]
    drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{drawn}\n\n{caption(results, near='**bold**', far='an exclamation mark (!)')}\n"


def _method_line(results: Results, method: str) -> Line:
    def cell(key: str, form: str) -> Cell:
        # Retraining is the yardstick: colouring it would praise it for being itself.
        judgement = None if method == "retrain" else judge(results, method, key)
        return Cell(write_summary(results.summary(method, key), form), judgement)

    return Line(method_name(method), tuple(cell(column.key, column.form) for column in COLUMNS))


def _noise_line(results: Results) -> Line:
    cells = []
    for column in COLUMNS:
        limits = None if column.side == "none" else retrained_range(results, column.key)
        if limits is None:
            cells.append(Cell(MISSING))
        else:
            low, high = (write_value(limit, column.form, scale=limits[1]) for limit in limits)
            cells.append(Cell(f"{low}–{high}"))
    return Line("retrain noise (low to high)", tuple(cells))


def _mark(cell: Cell) -> str:
    if cell.judgement == "near":
        return f"**{cell.text}**"
    return f"{cell.text} !" if cell.judgement == "far" else cell.text


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
