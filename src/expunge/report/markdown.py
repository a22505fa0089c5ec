"""The tables of an experiment as Markdown: bold instead of green, an exclamation mark instead of red."""

from collections.abc import Sequence

from expunge.bench.results import Results, Series
from expunge.report.columns import columns_for, short_columns
from expunge.report.curves import Curve, curves, panels
from expunge.report.layout import method_name, parts, scenario_line
from expunge.report.measures import MISSING, write_value
from expunge.report.printed import PRINTED_SERIES
from expunge.report.table import Cell, caption, paper_notes, table_lines

_MOST_POINTS = 11
MARKS = ("**bold**", "an exclamation mark (!)")
"""How near and far are marked in Markdown."""


def bench_markdown(results: Results, *, short: bool = False) -> str:
    """Everything a document shows of an experiment: a table a variant, tables of the curves, how to read them.

    `short` is for a page that people read: few columns, only the curves where the paper has curves, and nothing on
    where the paper contradicts itself.

    Example:
        >>> from expunge.bench.results import Row
        >>> text = bench_markdown(Results("main", {}, {}, [Row("trained", 10, test_accuracy=0.657)], {}))
        >>> "65.7 (paper: 71.76)" in text
        True
    """
    blocks = []
    only_curves = short and results.experiment in PRINTED_SERIES
    for label, part in parts(results).items():
        heading = [f"#### {label}"] if len(results.variants) > 1 else []
        line = scenario_line(part)
        tables = [_rows(part, short)] if (part.rows or not part.series) and not only_curves else []
        tables += [_curves(part.series, panel) for panel in panels(part.series)]
        blocks += [*heading, *([f"*{line}*"] if line else []), *tables]
    others = [curve for curve in results.series if results.variants and curve.variant not in results.variants]
    blocks += [_curves(others, panel) for panel in panels(others)]
    if (results.rows or not results.series) and not only_curves:
        blocks.append(caption(results, *MARKS))
    theirs = PRINTED_SERIES.get(results.experiment, ())
    blocks += [_curves(theirs, panel, "paper: ") for panel in panels(theirs)]
    if notes := paper_notes(results, contradictions=not short):
        blocks.append(" ".join(notes))
    return "\n\n".join(blocks) + "\n"


def _rows(results: Results, short: bool) -> str:
    headers = ["method", *(column.header for column in (short_columns if short else columns_for)(results))]
    lines = table_lines(results, short=short)
    return drawn_table(headers, [[escaped(line.name), *map(marked, line.cells)] for line in lines])


def _curves(series: Sequence[Series], panel: str, before: str = "") -> str:
    """The curves of one panel: a line a method, a column a point, at most eleven of them."""
    drawn = curves([curve for curve in series if curve.y_name == panel])
    points = sorted({x for curve in drawn for x in curve.x})
    step = -(-(len(points) - 1) // (_MOST_POINTS - 1)) or 1
    shown = sorted({*points[::step], points[-1]})
    x_name = next(curve.x_name for curve in series if curve.y_name == panel)
    unit = " (%)" if all(curve.is_rate for curve in drawn) else ""
    headers = [f"{panel}{unit} by {x_name}", *(f"{x:g}" for x in shown)]
    several = len({curve.variant for curve in drawn}) > 1
    names = [method_name(curve.method) + (f" ({curve.variant})" if several else "") for curve in drawn]
    lines = [[escaped(before + name), *_points(curve, shown)] for name, curve in zip(names, drawn, strict=True)]
    return drawn_table(headers, lines)


def _points(curve: Curve, shown: list[float]) -> list[str]:
    known = dict(zip(curve.x, curve.mean, strict=True))
    return [_point(known[x], curve.is_rate) if x in known else MISSING for x in shown]


def _point(value: float, is_rate: bool) -> str:
    return write_value(value, "percent") if is_rate else f"{value:.3g}"


def drawn_table(headers: list[str], lines: list[list[str]], words: int = 1) -> str:
    """A Markdown table; its first columns, as many as are `words`, stand to the left, the others to the right.

    Example:
        >>> print(drawn_table(["method", "seconds"], [["sisa", "3"]]))
        | method | seconds |
        | --- | ---: |
        | sisa | 3 |
    """
    rules = ["---"] * words + ["---:"] * (len(headers) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headers, rules, *lines])


def marked(cell: Cell) -> str:
    """A cell's text with its mark, and what the paper prints behind it.

    Example:
        >>> marked(Cell("damaged", "far")), marked(Cell("95.7", paper="84.2"))
        ('damaged !', '95.7 (paper: 84.2)')
    """
    text = {"near": f"**{cell.text}**", "far": f"{cell.text} !"}.get(cell.mark or "", cell.text)
    return f"{text} (paper: {cell.paper})" if cell.paper else text


def escaped(text: str) -> str:
    r"""Text that cannot break out of its cell.

    Example:
        >>> print(escaped("a|b"))
        a\|b
    """
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
