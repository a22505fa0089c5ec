import io
import re
from dataclasses import replace

import numpy
from rich.console import Console

from expunge.bench.results import Results, Row
from expunge.report import bench_markdown, terminal_table
from expunge.report.columns import COLUMNS
from expunge.report.pieces import table


def drawn(results, width=180):
    console = Console(width=width, file=io.StringIO())
    console.print(terminal_table(results, 160))
    return console.file.getvalue()


def expected(results, method, measure):
    values = [getattr(row, measure) for row in results.rows if row.method == method]
    return f"{100 * numpy.mean(values):.1f} ± {100 * numpy.std(values, ddof=1):.1f}"


def test_both_tables_hold_independently_computed_means(results):
    for text in (drawn(results).replace("±", "± "), bench_markdown(results)):
        for method, name in {"hf-kcu": "HF-KCU corrected", "retrain": "retrain (gold standard)"}.items():
            line = next(line for line in text.splitlines() if name in line)
            for measure in ("test_accuracy", "forget_accuracy", "asr"):
                assert expected(results, method, measure) in line
        assert "28× ± 3" in text
        assert "0.130 ± 0.013" in text


def test_terminal_table_ends_with_the_noise_and_a_caption(results):
    table = terminal_table(results, 160)
    assert table.row_count == len(results.methods()) + 1
    assert table.rows[-1].style == "dim"
    assert re.search(r"96.7 to +47.9 to +0.0 to 0.2", drawn(results))
    assert "A line's mark is the worst verdict of its runs: green" in str(table.caption)


def test_terminal_colours_are_the_verdicts(results):
    table = terminal_table(results, 160)
    styles = [[cell.style for cell in column._cells] for column in table.columns]
    lines = dict(zip(results.methods(), zip(*styles, strict=True), strict=False))
    at = [str(column.header) for column in table.columns].index("verdict")
    for method, colour in {"trained": "red", "retrace-krylov": "green", "retrain": ""}.items():
        assert lines[method][0] == lines[method][at] == colour
        assert set(lines[method][1:at] + lines[method][at + 1 :]) == {""}


def test_one_bad_run_takes_the_green_away(results):
    rows = [
        replace(row, verdict="UNDER-FORGOTTEN") if (row.method, row.seed) == ("retrace-krylov", 12) else row
        for row in results.rows
    ]
    text = bench_markdown(replace(results, rows=rows))
    line = next(line for line in text.splitlines() if "retrace, Krylov" in line)
    assert "| equivalent 2, under-forgotten 1 ! |" in line
    assert "**" not in line
    page = table(replace(results, rows=rows))
    assert re.search('<span class="far">.*equivalent 2.*under-forgotten 1</span></span></td>', page)


def test_undecided_has_no_mark(results):
    rows = [replace(row, verdict="UNDECIDED") if row.seed == 12 else row for row in results.rows]
    line = next(line for line in bench_markdown(replace(results, rows=rows)).splitlines() if "retrace, Krylov" in line)
    assert "| equivalent 2, undecided 1 |" in line


def test_without_verdicts_the_caption_says_so(results):
    rows = [replace(row, verdict=None) for row in results.rows]
    alone = [row for row in rows if row.method != "retrain"]
    for shown, why in ((rows, "what is measured here has no verdict"), (alone, "no verdict without retrained models")):
        bare = bench_markdown(replace(results, rows=shown))
        assert why in bare
        assert "!" not in bare
        assert "**" not in bare


def test_markdown_has_one_cell_a_column(results):
    lines = [line for line in bench_markdown(results).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(results.methods()) + 1
    assert {len(re.split(r"(?<!\\)\|", line)) - 2 for line in lines} == {1 + len(COLUMNS)}


def test_missing_values_are_dashes(clean):
    line = next(line for line in bench_markdown(clean).splitlines() if "retrace, Krylov" in line)
    assert line.split("|")[4].strip() == "–"


def test_odd_method_names_do_no_harm(results):
    odd = replace(results, rows=[Row("a|b [bold]x", 0, asr=0.5)])
    assert r"a\|b [bold]x" in bench_markdown(odd)
    assert "a|b [bold]x" in drawn(odd)


def test_no_rows_at_all():
    empty = Results("empty", {}, {}, [], {})
    assert terminal_table(empty).row_count == 1
    assert "retrain noise" in bench_markdown(empty)


def test_a_narrow_terminal_cuts_nothing_off(results):
    text = drawn(results, width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert all(value in text for value in ("28×", "96.5", "0.130"))
