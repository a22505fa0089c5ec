import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from expunge.bench.results import Results, Row
from expunge.errors import RequestError
from expunge.report.headline import chosen_method, headline
from expunge.report.page import render_report, write_report
from report.bench_cases import bench, convergence

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Collects links and text, and checks that every tag is closed."""

    def __init__(self, page):
        super().__init__()
        self.links, self.text, self.open = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def changed(results, method, **values):
    return replace(results, rows=[replace(row, **values) if row.method == method else row for row in results.rows])


def test_page_needs_nothing_else(results, tmp_path):
    page = write_report(results, tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    links = Reader(page).links
    assert len(links) == 2
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "://" not in page
    assert "@import" not in page
    assert "url(" not in page
    for link in links:
        drawing = base64.b64decode(link.split(",")[1]).decode()
        assert not re.search(r'(src|href)="(?!#)', drawing)


def test_page_says_it_in_numbers(results):
    text = " ".join(Reader(render_report(results, reading="Our own words.")).text)
    for part in (
        "Before: 95.7% of triggered images went to the attacker's class.",
        "After retrace, Krylov: 0.3%; retraining from scratch: 0.1%.",
        "28 times fewer sample-gradients than retraining",
        "HF-KCU as printed hardly changes anything",
        "Our own words.",
        "dirichlet",
        "seeds 10, 11, 12",
        "27 runs",
        "prefers-color-scheme: dark",
    ):
        assert part in text


def test_everything_is_escaped(results):
    evil = "<script>alert('&')</script>"
    row = Row(evil, 0, asr=0.5, verdict=evil)
    odd = Results(evil, {evil: evil, "list": [evil]}, {evil: evil}, [*results.rows, row], results.noise)
    page = render_report(odd, title=evil, reading=evil)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    Reader(page)


def test_success_is_claimed_only_where_it_is(results, failed):
    assert headline(results).verdict == "gone"
    found = headline(failed)
    assert found.verdict == "remains"
    assert "still in the model" in found.title
    assert "After retrace, Krylov: 95.0%" in " ".join(found.reached)
    assert any("misses retraining in backdoor success: 95.0%" in sentence for sentence in found.missed)
    assert "The client is gone" not in render_report(failed)


def test_half_way_is_partly(results):
    assert headline(changed(results, "retrace-krylov", asr=0.2)).verdict == "partly"


def test_one_bad_run_is_told(results):
    rows = [
        replace(row, asr=0.045 if row.seed == 10 else 0.0) if row.method == "retrace-krylov" else row
        for row in results.rows
    ]
    found = headline(replace(results, rows=rows))
    assert found.title == "The client is gone on average, but not in every run"
    assert any("worst run: 4.5%" in sentence for sentence in found.missed)


def test_lost_accuracy_is_told(results):
    found = headline(changed(results, "retrace-krylov", test_accuracy=0.90))
    assert "accuracy on new data was lost" in found.title
    assert any("accuracy on new data: 90.0% against 96.7 to 97.7%" in sentence for sentence in found.missed)


def test_dearer_than_retraining_is_told(results):
    dear = changed(results, "retrace-krylov", speedup_in_gradients=0.5, speedup=None)
    assert headline(dear).reached[-1] == "Cost: 2.0 times more sample-gradients than retraining."


def test_without_backdoor_the_forgotten_data_speaks(clean):
    found = headline(clean)
    assert found.reached[0] == "Before: 99.9% of the client's data got the client's label."
    assert found.verdict == "gone"
    Reader(render_report(clean))


def test_nothing_is_claimed_where_doing_nothing_passes(results):
    same = {"asr": 0.0, "forget_accuracy": 0.48, "kl_forget": 0.15}
    found = headline(changed(results, "trained", **same))
    assert found.verdict == "unknown"
    assert "nothing can be shown" in found.missed[0]


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (["trained", "retrain"], None),
        (["hf-kcu", "retrace-krylov", "retrace-krylov+recovery"], "retrace-krylov"),
        (["retrace-krylov", "retrace+recovery", "retrace"], "retrace"),
        (["hf-kcu-paper", "hf-kcu"], "hf-kcu"),
        (["trained", "fine-tuning"], "fine-tuning"),
    ],
)
def test_the_method_spoken_of(methods, expected):
    assert chosen_method(Results("x", {}, {}, [Row(method, 0) for method in methods], {})) == expected


def test_many_methods_of_which_the_same_is_said_share_a_sentence():
    missed = headline(bench().part("strong backdoor")).missed
    together = next(sentence for sentence in missed if sentence.startswith("These do not remove the client"))
    assert "(backdoor success 96.4% before)" in together
    assert "FedOSD (20.1%)" in together
    assert "FedEraser" not in together
    assert not any(name in sentence for sentence in missed for name in ("same init", "do nothing"))


def test_a_section_and_a_link_for_every_variant():
    page = render_report(bench())
    reader = Reader(page)
    assert [link for link in reader.links if link.startswith("#")] == ["#clean-client", "#strong-backdoor"]
    assert 'id="strong-backdoor"' in page
    assert len([link for link in reader.links if link.startswith("data:")]) == 8
    text = " ".join(reader.text)
    assert "paper: 71.76" in text
    assert "retrain noise, same init (low to high)" in text
    assert "Its Table 8 gives 1170 s" in text


def test_a_page_of_curves_alone():
    reader = Reader(render_report(convergence()))
    assert len(reader.links) == 1
    assert "What does not work" not in " ".join(reader.text)


def test_an_empty_experiment_still_gives_a_page():
    assert "No unlearning method was run." in render_report(Results("empty", {}, {}, [], {}))


def test_unwritable_path_is_an_error_of_ours(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write the report"):
        write_report(results, tmp_path / "file" / "report.html")
