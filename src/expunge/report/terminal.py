"""The table for a terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from expunge.bench.results import Results
from expunge.report.columns import Measure, columns_for
from expunge.report.layout import label_of, parts
from expunge.report.measures import MISSING
from expunge.report.table import Cell, caption, table_lines

_COLOURS = {"near": "green", "open": "", "far": "red", None: ""}
_WIDTHS = {"number": 13, "percent": 10, "times": 8, "seconds": 8, "megabytes": 8, "count": 6, "verdict": 17}
_METHOD_WIDTH = 31
_FIRST = ("verdict", "test_accuracy", "asr", "speedup_in_gradients", "forget_accuracy", "kl_forget", "speedup")
"""The columns that a narrow terminal shows before all others; the files have them all."""


def terminal_tables(results: Results, width: int = 100) -> list[Table]:
    """A table for each variant that has rows, for a terminal of this width.

    Example:
        >>> from expunge.bench.results import Row
        >>> len(terminal_tables(Results("demo", {}, {}, [Row("trained", 0, asr=0.957)], {})))
        1
    """
    return [terminal_table(part, width) for part in parts(results).values() if part.rows]


def terminal_table(results: Results, width: int = 100) -> Table:
    """The table of one variant, with as many columns as fit; those in which nothing was measured are left out.

    Example:
        >>> from expunge.bench.results import Row
        >>> terminal_table(Results("demo", {}, {}, [Row("trained", 0, asr=0.957)], {})).row_count
        2
    """
    columns = columns_for(results)
    lines = table_lines(results)
    told = [column for number, column in enumerate(columns) if any(_is_told(line.cells[number]) for line in lines)]
    shown = _fitting(told, width)
    note = caption(results)
    if any(cell.paper for line in lines for cell in line.cells):
        note += " In brackets: what the paper prints."
    if left := [column.header for column in told if column not in shown]:
        note += f" In the report: {', '.join(left)}."
    title = ": ".join(part for part in (results.experiment, label_of(results)) if part)
    table = Table(title=Text(title), caption=Text(note), caption_justify="left")
    table.box, table.padding, table.show_edge = SIMPLE_HEAD, 0, False
    table.add_column("method", overflow="fold")
    for column in shown:
        # As wide as the values: headers wrap between words and everything fits a terminal of 80 columns.
        table.add_column(column.header, justify="right", overflow="fold", max_width=_WIDTHS[column.form])
    for number, line in enumerate(lines):
        if line.noise and not lines[number - 1].noise:
            table.add_section()
        cells = (cell for cell, column in zip(line.cells, columns, strict=True) if column in shown)
        drawn = (_range(cell) if line.noise else _value(cell) for cell in cells)
        table.add_row(Text(line.name, style=_COLOURS[line.mark]), *drawn, style="dim" if line.noise else None)
    return table


def _is_told(cell: Cell) -> bool:
    return cell.text != MISSING or cell.paper is not None


def _fitting(columns: Sequence[Measure], width: int) -> list[Measure]:
    """The columns that fit beside the method's name, the most telling first chosen, in their order."""
    rank = {key: place for place, key in enumerate(_FIRST)}
    room, chosen = width - _METHOD_WIDTH, []
    for column in sorted(columns, key=lambda column: rank.get(column.key, len(rank))):
        room -= _WIDTHS[column.form] + 1
        if room < 0:
            break
        chosen.append(column)
    return [column for column in columns if column in chosen]


def _value(cell: Cell) -> Text:
    text = Text(cell.text.replace("± ", "±"), style=_COLOURS[cell.mark])
    return text.append(f"\n({cell.paper})", style="dim not bold default") if cell.paper else text


def _range(cell: Cell) -> Text:
    return Text(cell.text if cell.text == MISSING else cell.text.replace("–", " to "))
