"""Everything that a person or a machine may want of results, in one folder."""

from __future__ import annotations

from pathlib import Path

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.csv import write_csv
from expunge.report.markdown import bench_markdown
from expunge.report.page import write_report
from expunge.report.plots import save_plots


def publish(results: Results, folder: Path) -> Path:
    """Write results.json, rows.csv, table.md, the pictures and report.html; returns the report's path."""
    results.save(folder / "results.json")
    results = Results.load(folder / "results.json")  # everything else is made from the file, rounding included
    write_csv(results, folder / "rows.csv")
    try:
        (folder / "table.md").write_text(bench_markdown(results), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"Cannot write the table to {folder}: {error.strerror or error}.") from error
    save_plots(results, folder)
    return write_report(results, folder / "report.html")
