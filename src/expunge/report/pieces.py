"""The pieces of a page: its frame, table, picture, list of definitions, every single run."""

import base64
import io
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.columns import columns_for
from expunge.report.layout import method_name
from expunge.report.measures import MISSING, write_value
from expunge.report.plots import save_figure
from expunge.report.stylesheet import STYLE
from expunge.report.table import Cell, Line, caption, table_lines

_FIGURES = {
    "forgetting": (
        "Success of the backdoor, accuracy on the forgotten and on new data, for each method",
        "Forgotten means: the mark lies on the blue band, where models trained without the forgotten data lie."
        " The last panel does not start at zero.",
    ),
    "cost": (
        "Distance to the retrained model against cost, for each method",
        "Best is far right and down in the band: cheap, and as close to retraining as retraining is to itself."
        " Thin vertical lines show the range over runs.",
    ),
    "pareto": (
        "Accuracy on new data against speed, for each method, with the paper's points",
        "Doing nothing is the dashed line: accuracy on new data alone does not show that anything was forgotten.",
    ),
    "seconds": ("Seconds that each method takes", "Machines differ: compare ratios, not seconds."),
    "variants": (
        "Accuracy, backdoor success and cost by variant, a line for each method",
        "The blue band is the range of models retrained without the forgotten data; bars show the spread over runs.",
    ),
    "series": ("Curves, a line for each method", "Shades reach from the lowest to the highest run."),
    "audit-scores": (
        "Scores of a membership attack, a row for each model",
        "Forgotten means: the two shapes of a row are apart no more than they are in the retrained model's row. Each"
        " row has its own height.",
    ),
    "audit-roc": (
        "Share of the forgotten samples found against false alarms, both on logarithmic axes, a line for each model",
        "Forgotten means: the method's line lies where the retrained model's does. Far left, a few samples decide.",
    ),
    "audit-verdict": (
        "Every measure of the model beside the interval of a further retrained model",
        "Left is a smaller value, right a larger one, in widths of the measure's own interval; arrows lie further out."
        " Above the broken line: the forgotten data.",
    ),
}


def document(title: str, sections: Iterable[str], broad: bool = False) -> str:
    """A whole page of its sections; empty ones are left out.

    Example:
        >>> "<title>A &amp; B</title>" in document("A & B", ["<p>text</p>"])
        True
    """
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    body = "\n".join(section for section in sections if section)
    main = f'<main class="{"broad" if broad else ""}">\n{body}\n</main>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{main}</body></html>\n'


def write_page(page: str, path: str | Path) -> Path:
    """Write a page, or say in one line why that cannot be."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"Cannot write the report to {target}: {error.strerror or error}.") from error
    return target


def table(results: Results) -> str:
    """The numbers of one variant.

    Example:
        >>> "retrain noise" in table(Results("demo", {}, {}, [], {}))
        True
    """
    headers = "".join(f'<th scope="col">{escape(column.header)}</th>' for column in columns_for(results))
    lines = "".join(_table_line(line) for line in table_lines(results))
    note = caption(results, near="green with a tick", far="red with a cross")
    return (
        f'<div class="card wide"><table><thead><tr><th scope="col">method</th>{headers}</tr></thead>'
        f'<tbody>{lines}</tbody></table></div><p class="note">{escape(note)}</p>'
    )


def _table_line(line: Line) -> str:
    def drawn(cell: Cell) -> str:
        mean, plus_minus, spread = escape(cell.text).partition(" ± ")
        below = f"<small>± {spread}</small>" if plus_minus else ""
        below += f"<small>paper: {escape(cell.paper)}</small>" if cell.paper else ""
        return f'<td><span class="{cell.mark or ""}">{mean}</span>{below}</td>'

    cells = "".join(drawn(cell) for cell in line.cells)
    return f'<tr class="{"noise" if line.noise else ""}"><th scope="row">{escape(line.name)}</th>{cells}</tr>'


def figure(name: str, drawn: Figure, of: str = "") -> str:
    """A picture inside the page, with what it shows in words, and of what."""
    description, note = _FIGURES[name]
    drawing = io.BytesIO()
    save_figure(drawn, drawing, format="svg", metadata={"Date": None})
    source = base64.b64encode(drawing.getvalue()).decode("ascii")
    kind = "full" if drawn.get_figwidth() > 12 else "" if drawn.get_figwidth() > 10 else "narrow"
    return (
        f'<figure class="{kind}"><img alt="{escape(description)}" src="data:image/svg+xml;base64,{source}">'
        f"<figcaption>{escape(f'{note} {of}'.strip())}</figcaption></figure>"
    )


def definitions(content: Mapping[str, Any], small: bool = False) -> str:
    """Names and what they mean or are.

    Example:
        >>> definitions({"clients": 5})
        '<dl class=""><dt>clients</dt><dd>5</dd></dl>'
    """

    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str).replace('"', "")

    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(written(v))}</dd>" for k, v in content.items())
    return f'<dl class="{"small" if small else ""}">{items or "<dd>not recorded</dd>"}</dl>'


def runs(results: Results) -> str:
    """Every single run, folded away, so that no mean hides one.

    Example:
        >>> "0 runs" in runs(Results("demo", {}, {}, [], {}))
        True
    """
    columns = [column for column in columns_for(results) if column.form != "verdict"]
    headers = "".join(f"<th>{escape(column.header)}</th>" for column in columns)
    variant = "<th>variant</th>" if results.variants else ""
    lines = []
    for row in results.rows:
        values = ((getattr(row, column.key), column.form) for column in columns)
        cells = "".join(f"<td>{MISSING if value is None else write_value(value, form)}</td>" for value, form in values)
        name = f"<th>{escape(method_name(row.method))}</th><td>{row.seed}</td>"
        name += f"<td>{escape(row.variant or MISSING)}</td>" if results.variants else ""
        lines.append(f"<tr>{name}{cells}<td>{escape(row.verdict or MISSING)}</td></tr>")
    seeds = ", ".join(str(seed) for seed in sorted({row.seed for row in results.rows})) or "none"
    return (
        f'<p class="note">{len(results.rows)} runs, seeds {seeds}.</p><details><summary>Every single run</summary>'
        f'<div class="wide"><table><thead><tr><th>method</th><th>seed</th>{variant}{headers}<th>verdict</th></tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )
