import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from expunge.bench.results import Results, Row
from expunge.errors import DataError, RequestError
from expunge.report import bench_markdown, read_csv, terminal_tables, write_csv
from expunge.report.columns import columns_for
from expunge.report.inline import inline_value
from report.bench_cases import METHODS, adversary, bench, convergence, sequential


def tables(text):
    """Each Markdown table as a dictionary: the name of a line to its cells by header."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        headers, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines())
        found.append({line[0]: dict(zip(headers, line, strict=True)) for line in lines})
    return found


def test_a_table_for_every_variant_with_do_nothing_first_and_both_noises_last():
    text = bench_markdown(bench())
    assert re.findall(r"^#### (.*)$", text, re.MULTILINE) == ["clean client", "strong backdoor"]
    assert len(tables(text)) == 2
    for table in tables(text):
        names = list(table)
        assert names[:3] == ["do nothing (trained)", "retrain (gold standard)", "retrain, same start"]
        assert names[-2:] == ["retrain noise, fresh init (low to high)", "retrain noise, same init (low to high)"]
        assert len(names) == len(METHODS) - 1 + 2
    assert "cifar10, 10 clients, cnn, 20 rounds of 5 epochs; client-3 leaves; seeds 10, 11, 12." in text


def test_the_papers_value_stands_beside_ours():
    clean, _ = tables(bench_markdown(bench()))
    assert re.fullmatch(r"62\.\d ± 0\.\d \(paper: 71\.76\)", clean["do nothing (trained)"]["accuracy on new data (%)"])
    assert clean["FedEraser"]["times faster"].endswith("(paper: 5×)")
    assert clean["HF-KCU as printed"]["causal faithfulness"] == "– (paper: 0.38)"
    assert "paper" not in clean["FedOSD"]["accuracy on new data (%)"]
    assert "from its Table 1; seconds from Figure 1b." in bench_markdown(bench())


def test_the_study_of_the_verdict_counts_with_exact_intervals():
    verdicts = ["EQUIVALENT"] * 3 + ["UNDECIDED"] * 2 + ["UNDER-FORGOTTEN"] * 55
    rows = [Row("patched", seed, test_accuracy=0.9, verdict=verdict) for seed, verdict in enumerate(verdicts)]
    (table,) = tables(text := bench_markdown(Results("verdict", {}, {}, rows, {})))
    # 3 of 60: scipy.stats.binomtest(3, 60).proportion_ci("exact") is 1.04% to 13.92%
    assert table["patched"]["verdict"] == "equivalent 3 of 60 (1.0–13.9%), under-forgotten 55, undecided 2"
    assert "exact 95% interval" in text
    assert "mark" not in text


def test_the_study_of_the_evidence_counts_its_words_and_how_many_of_the_equivalent_it_supports():
    words = ["SUPPORTED"] * 3 + ["NO EVIDENCE"] * 2 + ["NOT SUPPORTED"] * 55
    rows = [Row("fine-tuning", seed, verdict="UNDER-FORGOTTEN", evidence=word) for seed, word in enumerate(words)]
    honest = ["SUPPORTED"] * 8 + ["NO EVIDENCE"] * 2
    rows += [Row("retrain", seed, verdict="EQUIVALENT", evidence=word) for seed, word in enumerate(honest)]
    results = Results("evidence", {}, {}, rows, {})
    (table,) = tables(text := bench_markdown(results))
    said = "supported 3 of 60 (1.0–13.9%), not supported 55, no evidence 2"
    assert table["fine-tuning"]["evidence without retraining"] == said
    # 8 of 10: scipy.stats.binomtest(8, 10).proportion_ci("exact") is 44.4% to 97.5%
    assert "equivalent beside retrained ones: 8 of 10 (44.4–97.5%)." in text
    assert inline_value(results, "retrain; evidence; supported") == "8 of 10"
    with pytest.raises(RequestError, match="no evidence 'EQUIVALENT'; choose one of SUPPORTED"):
        inline_value(results, "retrain; evidence; EQUIVALENT")


def test_both_noises_are_the_variants_own():
    _, strong = tables(bench_markdown(bench()))
    assert strong["retrain noise, fresh init (low to high)"]["backdoor success (%)"] == "1.7–3.4"
    assert strong["retrain noise, same init (low to high)"]["backdoor success (%)"] == "1.7–2.2"


def test_marked_by_the_variants_own_verdicts():
    clean, strong = tables(bench_markdown(bench()))
    assert strong["do nothing (trained)"]["verdict"] == "under-forgotten !"
    assert strong["retrace, Krylov + recovery"]["verdict"] == "**equivalent**"
    assert strong["retrain, same start"]["verdict"] == "equivalent"
    assert clean["retrace, Krylov + recovery"]["verdict"] == "undecided"
    assert not any(
        re.search(r"[*!]", text) for line in strong.values() for key, text in line.items() if key != "verdict"
    )


@pytest.mark.parametrize(
    ("experiment", "shown", "hidden"),
    [
        ("main", {"mia_success", "causal_faithfulness", "seconds", "stored_bytes"}, {"parameter_gap"}),
        ("wallclock", {"seconds", "speedup", "verdict"}, {"mia_auc", "bytes"}),
        ("functional", {"kl", "mia_success", "parameter_gap"}, {"test_accuracy", "agreement"}),
        ("components", {"test_accuracy", "parameter_gap", "mia_success"}, {"speedup"}),
        ("samples", {"rounds", "bytes", "training_overhead"}, {"seconds"}),
    ],
)
def test_columns_of_an_experiment(experiment, shown, hidden):
    keys = {column.key for column in columns_for(bench(experiment))}
    assert shown <= keys
    assert not hidden & keys


def test_a_column_nobody_measured_is_left_out_of_a_part():
    clean, strong = tables(bench_markdown(bench()))
    assert "backdoor success (%)" not in clean["SISA"]
    assert "backdoor success (%)" in strong["SISA"]


def test_a_short_table_has_few_columns_and_speed_only_where_the_paper_has_it():
    clean, strong = tables(bench_markdown(bench(), short=True))
    forgetting = ["accuracy on new data (%)", "accuracy on forgotten data (%)"]
    price = ["distance to retrained (KL)", "privacy leak (AUC)", "verdict", "times less work", "times faster"]
    assert list(clean["SISA"]) == ["method", *forgetting, *price]
    assert list(strong["SISA"]) == ["method", *forgetting, "backdoor success (%)", *price]
    assert clean["FedEraser"]["times faster"].endswith("(paper: 5×)")
    (first, *_) = tables(bench_markdown(bench("samples"), short=True))
    assert "times faster" not in first["SISA"]
    assert "rounds" not in first["SISA"]


def test_a_short_page_leaves_contradictions_to_their_own_list():
    long, short = bench_markdown(bench()), bench_markdown(bench(), short=True)
    assert "Figure 1a has other points" in long
    assert "Figure 1a has other points" not in short
    assert "from its Table 1; seconds from Figure 1b." in short


def test_where_the_paper_has_curves_a_short_page_has_nothing_else():
    curves = replace(bench("convergence", ("a client leaves",)), series=convergence().series)
    assert len(tables(bench_markdown(curves))) == 3
    ours, _ = tables(bench_markdown(curves, short=True))
    assert "HF-KCU corrected (client-1 leaves)" in ours


def test_curves_become_tables_with_the_papers_own_after_them():
    ours, theirs = tables(bench_markdown(convergence()))
    assert ours["HF-KCU corrected (client-1 leaves)"]["4"] == "0.41"
    assert theirs["paper: HF-KCU (client 1)"]["50"] == "3.4e-07"
    accuracy = tables(bench_markdown(sequential()))[0]
    assert re.fullmatch(r"\d\d\.\d", accuracy["fine-tuning"]["10"])


def test_curves_without_a_variant_of_their_own_are_not_lost():
    found = tables(bench_markdown(adversary()))
    assert found[-1]["bound with CG"]["0.9"] == "99"


def test_terminal_tables_fit_a_hundred_columns():
    console = Console(width=100, file=io.StringIO())
    shown = terminal_tables(bench())
    assert [str(table.title) for table in shown] == ["main: clean client", "main: strong backdoor"]
    for table in shown:
        console.print(table)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "(71.76)" in text
    assert "In brackets: what the paper prints." in " ".join(text.split())


def test_rows_survive_a_spreadsheet(tmp_path):
    results = bench()
    odd = Row('a, "b"\nc', 3, asr=1 / 3, verdict="gone; really", variant="x, y", digest="0a,1b")
    results = replace(results, rows=[*results.rows, odd])
    file = write_csv(results, tmp_path / "new" / "rows.csv")
    assert read_csv(file) == results.rows
    assert file.read_text().splitlines()[0].startswith("method,seed,test_accuracy,")


def test_a_bad_spreadsheet_is_an_error_of_ours(tmp_path):
    (tmp_path / "rows.csv").write_text("method,seed\nsisa,1\n")
    with pytest.raises(DataError, match="columns"):
        read_csv(tmp_path / "rows.csv")
    with pytest.raises(DataError, match="Cannot read"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write rows"):
        write_csv(Results("x", {}, {}, [], {}), tmp_path / "file" / "rows.csv")


def test_a_narrow_terminal_shows_the_most_telling_columns_and_names_the_others():
    table = terminal_tables(bench("backdoor"), width=80)[-1]
    headers = [str(column.header) for column in table.columns]
    assert headers == [
        "method",
        "accuracy on new data (%)",
        "backdoor success (%)",
        "verdict",
        "times less work",
    ]
    assert "distance to retrained (KL)" in str(table.caption)
    assert len(terminal_tables(bench("backdoor"), width=200)[-1].columns) > len(headers)
    clean = [str(column.header) for column in terminal_tables(bench("backdoor"), width=80)[0].columns]
    assert "backdoor success (%)" not in clean
    assert "accuracy on forgotten data (%)" in clean
