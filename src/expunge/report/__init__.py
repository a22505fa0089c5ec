"""What a person looks at: tables, pictures and one HTML page, all made from a results file."""

from expunge.report.audit_terminal import terminal_audit
from expunge.report.csv import read_csv, write_csv
from expunge.report.markdown import bench_markdown
from expunge.report.nearness_markdown import nearness_markdown
from expunge.report.printed import printed
from expunge.report.publish import publish, publish_audit
from expunge.report.terminal import terminal_table, terminal_tables

__all__ = [
    "bench_markdown",
    "nearness_markdown",
    "printed",
    "publish",
    "publish_audit",
    "read_csv",
    "terminal_audit",
    "terminal_table",
    "terminal_tables",
    "write_csv",
]
