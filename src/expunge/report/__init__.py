"""What a person looks at: a table, two pictures and one HTML page, all made from a results file."""

from expunge.report.page import write_report
from expunge.report.plots import cost_plot, forgetting_plot, save_plots
from expunge.report.table import markdown_table, terminal_table

__all__ = ["cost_plot", "forgetting_plot", "markdown_table", "save_plots", "terminal_table", "write_report"]
