"""The pieces of a page: its frame, tables, lists of definitions, every single run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.columns import columns_for
from expunge.report.layout import method_name
from expunge.report.measures import MISSING, write_value
from expunge.report.stylesheet import STYLE
from expunge.report.table import Cell, caption, table_lines

MOST_COLUMNS = 10
"""A table of more columns than these does not fit a screen of ordinary width."""
_SIDEWAYS = "This table is wider than most screens: scroll it sideways; the first column stays."


@dataclass(frozen=True)
class HtmlLine:
    """A line of a table: its name as text, its cells as HTML."""

    name: str
    cells: Sequence[str]
    noise: bool = False


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
    headers = ["method", *(column.header for column in columns_for(results))]
    lines = [HtmlLine(line.name, [_drawn(cell) for cell in line.cells], line.noise) for line in table_lines(results)]
    note = caption(results, near="green with a tick", far="red with a cross")
    return f'{html_table(headers, lines, card=True)}<p class="note">{escape(note)}</p>'


def _drawn(cell: Cell) -> str:
    mean, plus_minus, spread = escape(cell.text).partition(" ± ")
    mean = ", ".join(f'<span class="whole">{part}</span>' for part in mean.split(", "))
    below = f"<small>± {spread}</small>" if plus_minus else ""
    below += f"<small>paper: {escape(cell.paper)}</small>" if cell.paper else ""
    return f'<span class="{cell.mark or ""}">{mean}</span>{below}'


def html_table(headers: Sequence[str], lines: Iterable[HtmlLine], *, card: bool = False) -> str:
    """A table whose cells are HTML already; too wide a one is scrolled, and says so; on a phone each line is a card.

    Example:
        >>> '<td data-label="seconds">3</td>' in html_table(["method", "seconds"], [HtmlLine("sisa", ["3"])])
        True
    """
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "".join(_html_line(line, headers[1:]) for line in lines)
    hint = f'<p class="hint">{_SIDEWAYS}</p>' if len(headers) > MOST_COLUMNS else ""
    return (
        f'{hint}<div class="{"card " * card}wide" role="region" aria-label="table" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _html_line(line: HtmlLine, headers: Sequence[str]) -> str:
    cells = "".join(
        f'<td data-label="{escape(header)}">{cell}</td>' for header, cell in zip(headers, line.cells, strict=True)
    )
    kind = ' class="noise"' if line.noise else ""
    return f'<tr{kind}><th scope="row">{escape(line.name)}</th>{cells}</tr>'


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
    variant = ["variant"] if results.variants else []
    model = ["model"] if any(row.digest for row in results.rows) else []
    words = ["verdict", *(["evidence"] if any(row.evidence for row in results.rows) else [])]
    headers = ["method", "seed", *variant, *(column.header for column in columns), *words, *model]
    lines = []
    for row in results.rows:
        values = ((getattr(row, column.key), column.form) for column in columns)
        cells = [str(row.seed), *([escape(row.variant or MISSING)] if variant else [])]
        cells += [MISSING if value is None else write_value(value, form) for value, form in values]
        cells += [escape(getattr(row, word) or MISSING) for word in words]
        cells += [_short_digest(row.digest)] if model else []
        lines.append(HtmlLine(method_name(row.method), cells))
    seeds = ", ".join(str(seed) for seed in sorted({row.seed for row in results.rows})) or "none"
    return (
        f'<p class="note">{len(results.rows)} runs, seeds {seeds}.</p><details><summary>Every single run</summary>'
        f"{html_table(headers, lines)}</details>"
    )


def _short_digest(digest: str | None) -> str:
    """The beginning of a model's SHA-256, which is enough to tell models apart; all of it under the pointer."""
    return f'<code title="{escape(digest)}">{escape(digest[:12])}</code>' if digest else MISSING
