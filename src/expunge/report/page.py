"""The page a person looks at: one HTML file that needs nothing else."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from expunge.bench.results import Results
from expunge.report.columns import columns_for
from expunge.report.headline import chosen_method, headline
from expunge.report.layout import file_label, method_name, parts, scenario_line
from expunge.report.pictures import figure
from expunge.report.pieces import definitions, document, runs, table, write_page
from expunge.report.plots import OF_PARTS, figures
from expunge.report.table import paper_notes

_FEW_COLUMNS = 8
_OTHER_NOTES = {
    "retrain": "A model trained again from the start without the forgotten data: the gold standard, and what we save.",
    "retrain noise": "Retraining twice with other seeds gives two different models. Nothing can be asked to be closer"
    " to retraining than retraining is to itself, so this range is the yardstick.",
    "± spread": "The sample standard deviation over all runs of a method, seeds and retrained models alike.",
}


def write_report(
    results: Results,
    path: str | Path,
    *,
    title: str = "Is the client gone?",
    reading: str | None = None,
    drawn: Mapping[str, Figure] | None = None,
) -> Path:
    """Write the page: for each variant the result, what does not work, table and pictures; then how to read them.

    Args:
        results: What was measured; every number on the page comes from it.
        path: The HTML file to write; its folder is made if need be.
        title: The page's title.
        reading: A paragraph of the author's own, shown under the title.
        drawn: The pictures (`plots.figures`) where they are drawn already.

    Raises:
        RequestError: the path cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> write_report(Results("demo", {}, {}, [], {}), Path(folder.name) / "report.html").name
        'report.html'
        >>> folder.cleanup()
    """
    return write_page(render_report(results, title=title, reading=reading, drawn=drawn), path)


def render_report(
    results: Results,
    *,
    title: str = "Is the client gone?",
    reading: str | None = None,
    drawn: Mapping[str, Figure] | None = None,
) -> str:
    """The page as text; see `write_report`.

    Example:
        >>> "&lt;b&gt;" in render_report(Results("demo", {}, {}, [], {}), title="<b>")
        True
    """
    of, pictures = parts(results), figures(results) if drawn is None else drawn
    several = len(of) > 1
    named = len(results.variants) > 1
    own = {label: {f"{name}-{file_label(label)}" if named else name: name for name in OF_PARTS} for label in of}
    of_parts = {name for names in own.values() for name in names}
    subtitle = ": ".join(filter(None, (results.experiment, str(results.scenario.get("title", "")))))
    sections = [
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        f'<p class="reading">{escape(reading)}</p>' if reading else "",
        _index(of) if several else "",
        *(figure(name, picture) for name, picture in pictures.items() if name not in of_parts),
        *(
            _part(
                label if several else "",
                part,
                {n: pictures[file] for file, n in own[label].items() if file in pictures},
            )
            for label, part in of.items()
            if part.rows or not part.series
        ),
        *(f'<p class="note">{escape(note)}</p>' for note in paper_notes(results)),
        "<h2>How to read this</h2>",
        definitions({column.header: column.meaning for column in columns_for(results)} | _OTHER_NOTES),
        "<h2>What was run</h2>",
        '<div class="pair">',
        *(
            f'<div class="card"><h2>Scenario {escape(label) if several else ""}</h2>'
            f"{definitions(part.scenario, small=True)}</div>"
            for label, part in of.items()
        ),
        f'<div class="card"><h2>Environment</h2>{definitions(_environment(results), small=True)}</div></div>',
        runs(results),
    ]
    return document(title, sections, broad=len(columns_for(results)) > _FEW_COLUMNS)


def _environment(results: Results) -> dict[str, Any]:
    return ({"measured": results.date} if results.date else {}) | results.environment


def _index(of: Mapping[str, Results]) -> str:
    """What came out for each variant, in a line, with a link to it."""
    lines = "".join(
        f'<li><a href="#{file_label(label)}">{escape(label)}</a>: {escape(_in_short(part))}</li>'
        for label, part in of.items()
    )
    return f'<ul class="index">{lines}</ul>'


def _in_short(results: Results) -> str:
    method = chosen_method(results)
    return headline(results).title + (f" ({method_name(method)})" if method else "")


def _part(label: str, results: Results, drawn: Mapping[str, Figure]) -> str:
    """One variant: result first, then table and pictures."""
    line = scenario_line(results) if label else ""
    return "\n".join(
        [
            f'<section id="{file_label(label) or "result"}">',
            f'<h2 class="variant">{escape(label)}</h2><p class="note">{escape(line)}</p>' if label else "",
            _result(results),
            "<h2>The numbers</h2>",
            table(results),
            "<h2>At a glance</h2>",
            *(figure(name, picture, line) for name, picture in drawn.items()),
            "</section>",
        ]
    )


def _result(results: Results) -> str:
    found = headline(results)
    reached = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.reached)
    missed = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.missed)
    missed = f"<ul>{missed}</ul>" if missed else "<p>No run of any method was told from retraining.</p>"
    return (
        f'<div class="cards"><section class="card result {found.mark}">'
        f"<h2>{escape(found.title)}</h2>{reached}</section>"
        f'<section class="card missed"><h2>What does not work</h2>{missed}</section></div>'
    )
