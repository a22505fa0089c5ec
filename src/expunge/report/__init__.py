"""What a person looks at: tables, pictures and one HTML page, all made from a results file."""

from expunge.report.audit_terminal import terminal_audit
from expunge.report.cost import cost_plot
from expunge.report.csv import read_csv, write_csv
from expunge.report.forgetting import forgetting_plot
from expunge.report.lines import series_plot, variants_plot
from expunge.report.markdown import bench_markdown
from expunge.report.nearness_markdown import nearness_markdown
from expunge.report.page import write_report
from expunge.report.pareto import pareto_plot, seconds_plot
from expunge.report.plots import save_plots
from expunge.report.printed import printed
from expunge.report.publish import publish, publish_audit
from expunge.report.terminal import terminal_table, terminal_tables

__all__ = [
    "bench_markdown",
    "cost_plot",
    "forgetting_plot",
    "nearness_markdown",
    "pareto_plot",
    "printed",
    "publish",
    "publish_audit",
    "read_csv",
    "save_plots",
    "seconds_plot",
    "series_plot",
    "terminal_audit",
    "terminal_table",
    "terminal_tables",
    "variants_plot",
    "write_csv",
    "write_report",
]
