"""The smallest table that still says what came out: for a page that a newcomer reads first."""

from expunge.bench.results import Results
from expunge.report.columns import columns_for
from expunge.report.layout import method_name, parts, scenario_line
from expunge.report.markdown import MARKS, drawn_table, escaped, marked
from expunge.report.table import caption, table_lines

_METHODS = ("trained", "retrain", "hf-kcu-paper", "hf-kcu", "retrace")
_MEASURES = ("test_accuracy", "asr", "verdict", "speedup_in_gradients")


def brief_markdown(results: Results) -> str:
    """Doing nothing, retraining and one line for each of our three algorithms, in five columns.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("trained", 0, asr=0.957), Row("sisa", 0, asr=0.1), Row("retrace", 0, asr=0.01)]
        >>> [line.split(" | ")[0] for line in brief_markdown(Results("demo", {}, {}, rows, {})).splitlines()[2:4]]
        ['| do nothing (trained)', '| retrace']
    """
    blocks = []
    for label, part in parts(results).items():
        heading = [f"#### {label}"] if len(results.variants) > 1 else []
        blocks += [*heading, *([f"*{line}*"] if (line := scenario_line(part)) else []), _rows(part)]
    return "\n\n".join([*blocks, caption(results, *MARKS)]) + "\n"


def _rows(results: Results) -> str:
    columns = columns_for(results)
    shown = [index for index, column in enumerate(columns) if column.key in _MEASURES]
    by_name = {line.name: line for line in table_lines(results)}
    names = [name for name in map(method_name, _METHODS) if name in by_name]
    headers = ["method", *(columns[index].header for index in shown)]
    lines = [[escaped(name), *(marked(by_name[name].cells[index]) for index in shown)] for name in names]
    return drawn_table(headers, lines)
