"""The page a person looks at: one HTML file that needs nothing else."""

import base64
import io
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.headline import headline
from expunge.report.measures import COLUMNS, MISSING, method_name, write_value
from expunge.report.plots import cost_plot, forgetting_plot, save_figure
from expunge.report.stylesheet import STYLE
from expunge.report.table import Cell, Line, caption, table_lines

_OTHER_NOTES = {
    "retrain": "A model trained again from the start without the client: the gold standard, and what we save.",
    "retrain noise": "Retraining twice with other seeds gives two different models. Nothing can be asked to be closer"
    " to retraining than retraining is to itself, so this range is the yardstick.",
    "± spread": "The sample standard deviation over all runs of a method, seeds and retrained models alike.",
}


def write_report(
    results: Results, path: str | Path, *, title: str = "Is the client gone?", reading: str | None = None
) -> Path:
    """Write the page: result first, what does not work beside it, then table, pictures, how to read them, setting.

    Args:
        results: What was measured; every number on the page comes from it.
        path: The HTML file to write; its folder is made if need be.
        title: The page's title.
        reading: A paragraph of the author's own, shown under the result.

    Raises:
        RequestError: the path cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> write_report(Results("demo", {}, {}, [], {}), Path(folder.name) / "report.html").name
        'report.html'
        >>> folder.cleanup()
    """
    target = Path(path)
    page = render_report(results, title=title, reading=reading)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"Cannot write the report to {target}: {error.strerror or error}.") from error
    return target


def render_report(results: Results, *, title: str = "Is the client gone?", reading: str | None = None) -> str:
    """The page as text; see `write_report`.

    Example:
        >>> "&lt;b&gt;" in render_report(Results("demo", {}, {}, [], {}), title="<b>")
        True
    """
    parts = [
        f"<header><h1>{escape(title)}</h1><p>{escape(results.experiment)}</p></header>",
        _result(results),
        f'<p class="reading">{escape(reading)}</p>' if reading else "",
        "<h2>The numbers</h2>",
        _table(results),
        "<h2>At a glance</h2>",
        _figure(
            forgetting_plot(results),
            "Success of the backdoor, accuracy on the forgotten and on new data, for each method",
            "Forgotten means: the mark lies on the blue band, where models trained without the client lie. The last"
            " panel does not start at zero.",
        ),
        _figure(
            cost_plot(results),
            "Distance to the retrained model against cost, for each method",
            "Best is far right and down in the band: cheap, and as close to retraining as retraining is to itself."
            " Thin vertical lines show the range over runs.",
            kind="narrow",
        ),
        "<h2>How to read this</h2>",
        _definitions({column.header: column.meaning for column in COLUMNS} | _OTHER_NOTES),
        "<h2>What was run</h2>",
        '<div class="pair"><div class="card"><h2>Scenario</h2>' + _definitions(results.scenario, small=True) + "</div>",
        '<div class="card"><h2>Environment</h2>' + _definitions(results.environment, small=True) + "</div></div>",
        _runs(results),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _result(results: Results) -> str:
    found = headline(results)
    reached = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.reached)
    missed = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.missed)
    missed = f"<ul>{missed}</ul>" if missed else "<p>Nothing in these numbers lies outside the retrained range.</p>"
    return (
        f'<div class="cards"><section class="card result {found.verdict}">'
        f"<h2>{escape(found.title)}</h2>{reached}</section>"
        f'<section class="card missed"><h2>What does not work</h2>{missed}</section></div>'
    )


def _table(results: Results) -> str:
    headers = "".join(f'<th scope="col">{escape(column.header)}</th>' for column in COLUMNS)
    *methods, noise = table_lines(results)
    lines = "".join(_table_line(line) for line in methods) + _table_line(noise, "noise")
    note = caption(results, near="green with a tick", far="red with a cross")
    return (
        f'<div class="card wide"><table><thead><tr><th scope="col">method</th>{headers}</tr></thead>'
        f'<tbody>{lines}</tbody></table></div><p class="note">{escape(note)}</p>'
    )


def _table_line(line: Line, kind: str = "") -> str:
    def drawn(cell: Cell) -> str:
        mean, plus_minus, spread = escape(cell.text).partition(" ± ")
        below = f"<small>± {spread}</small>" if plus_minus else ""
        return f'<td><span class="{cell.judgement or ""}">{mean}</span>{below}</td>'

    cells = "".join(drawn(cell) for cell in line.cells)
    return f'<tr class="{kind}"><th scope="row">{escape(line.name)}</th>{cells}</tr>'


def _figure(figure: Figure, description: str, note: str, kind: str = "") -> str:
    drawing = io.BytesIO()
    save_figure(figure, drawing, format="svg", metadata={"Date": None})
    source = base64.b64encode(drawing.getvalue()).decode("ascii")
    return (
        f'<figure class="{kind}"><img alt="{escape(description)}" src="data:image/svg+xml;base64,{source}">'
        f"<figcaption>{escape(note)}</figcaption></figure>"
    )


def _definitions(content: Mapping[str, Any], small: bool = False) -> str:
    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str).replace('"', "")

    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(written(v))}</dd>" for k, v in content.items())
    return f'<dl class="{"small" if small else ""}">{items or "<dd>not recorded</dd>"}</dl>'


def _runs(results: Results) -> str:
    """Every single run, folded away, so that no mean hides one."""
    headers = "".join(f"<th>{escape(column.header)}</th>" for column in COLUMNS)
    lines = []
    for row in results.rows:
        values = ((getattr(row, column.key), column.form) for column in COLUMNS)
        cells = "".join(f"<td>{MISSING if value is None else write_value(value, form)}</td>" for value, form in values)
        name = f"<th>{escape(method_name(row.method))}</th><td>{row.seed}</td>"
        lines.append(f"<tr>{name}{cells}<td>{escape(row.verdict or MISSING)}</td></tr>")
    seeds = ", ".join(str(seed) for seed in sorted({row.seed for row in results.rows})) or "none"
    return (
        f'<p class="note">{len(results.rows)} runs, seeds {seeds}.</p><details><summary>Every single run</summary>'
        f'<div class="wide"><table><thead><tr><th>method</th><th>seed</th>{headers}<th>verdict</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )
