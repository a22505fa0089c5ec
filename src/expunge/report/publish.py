"""Everything that a person or a machine may want of results, in one folder."""

from __future__ import annotations

import json
from pathlib import Path

from expunge.bench.auditing import Audit
from expunge.bench.results import Results, plain
from expunge.errors import RequestError
from expunge.extras import missing
from expunge.federation.keeping.files import write_whole
from expunge.report.csv import write_csv
from expunge.report.markdown import bench_markdown


def publish(results: Results, folder: Path) -> Path:
    """Write results.json, rows.csv, table.md, the pictures and report.html; returns what to look at.

    That is the report; without matplotlib, an extra, there are no pictures and no report, and it is the table.
    """
    results.save(folder / "results.json")
    results = Results.load(folder / "results.json")  # everything else is made from the file, rounding included
    write_csv(results, folder / "rows.csv")
    try:
        (folder / "table.md").write_text(bench_markdown(results), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"Cannot write the table to {folder}: {error.strerror or error}.") from error
    if missing("matplotlib"):
        return folder / "table.md"
    from expunge.report.page import write_report
    from expunge.report.plots import figures, save_figures

    drawn = figures(results)
    save_figures(drawn, results, folder)
    return write_report(results, folder / "report.html", drawn=drawn)


def publish_audit(audit: Audit, folder: Path) -> Path:
    """Write audit.json, the audit's pictures and audit.html; returns what to look at.

    That is the page; without matplotlib, an extra, there are only the numbers.

    Raises:
        DataError: a value is NaN or infinite.
        RequestError: the folder cannot be written.
    """
    content = plain(audit.as_dict(), "the audit")
    write_whole(folder / "audit.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    if missing("matplotlib"):
        return folder / "audit.json"
    from expunge.report.audit_page import write_audit
    from expunge.report.audit_plots import audit_figures
    from expunge.report.plots import save_figures

    drawn = audit_figures(audit)
    save_figures(drawn, audit.results, folder)
    return write_audit(audit, folder / "audit.html", drawn)
