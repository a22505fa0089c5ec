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

VOID = {"meta", "img", "br", "source"}


class Reader(HTMLParser):
    """Collects links and text, and checks that every tag is closed."""

    def __init__(self, page):
        super().__init__()
        self.links, self.text, self.open = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "srcset", "href")]
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
    assert len(links) == 4
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
        "UNDER-FORGOTTEN: HF-KCU as printed (3 of 3 runs), HF-KCU corrected (3 of 3 runs).",
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


def test_success_is_claimed_only_where_the_verdict_is_equivalent(results, failed):
    assert headline(results).mark == "near"
    assert headline(results).title == "The client is gone, as far as these measures can tell"
    assert headline(results).reached[0].startswith("retrace, Krylov: EQUIVALENT in all 3 runs.")
    found = headline(failed)
    assert found.mark == "far"
    assert found.title == "The client is still in the model"
    assert "After retrace, Krylov: 95.0%" in " ".join(found.reached)
    assert "The client is gone" not in render_report(failed)


@pytest.mark.parametrize(
    ("verdict", "mark", "title"),
    [
        ("UNDER-FORGOTTEN", "far", "The client is still in the model (1 of 3 runs)"),
        ("OVER-FORGOTTEN", "far", "More was forgotten than retraining forgets (1 of 3 runs)"),
        ("DAMAGED", "far", "The model was damaged (1 of 3 runs)"),
        ("FAILED", "far", "The method gave up, and the client is still in the model (1 of 3 runs)"),
        ("UNDECIDED", "open", "These numbers cannot show whether the client is gone (1 of 3 runs)"),
        ("a new one", "far", "a new one (1 of 3 runs)"),
    ],
)
def test_the_worst_run_is_the_headline(results, verdict, mark, title):
    rows = [
        replace(row, verdict=verdict) if (row.method, row.seed) == ("retrace-krylov", 11) else row
        for row in results.rows
    ]
    found = headline(replace(results, rows=rows))
    assert (found.mark, found.title) == (mark, title)
    assert found.reached[0].startswith(f"retrace, Krylov: {verdict} in 1 of 3 runs, EQUIVALENT in 2.")
    assert any(
        sentence.startswith(verdict) and "retrace, Krylov (1 of 3 runs)" in sentence for sentence in found.missed
    )
    assert f'<section class="card result {mark}">' in render_report(replace(results, rows=rows))


def test_numbers_do_not_judge_beside_the_verdict(results):
    """The backdoor is back in the numbers, and the verdict is still the verdict."""
    found = headline(changed(results, "retrace-krylov", asr=0.9, test_accuracy=0.1, kl_forget=9.0))
    assert (found.mark, found.title) == (headline(results).mark, headline(results).title)
    assert found.missed == headline(results).missed


def test_without_a_verdict_nothing_is_said_but_how_to_get_one(results):
    found = headline(replace(results, rows=[replace(row, verdict=None) for row in results.rows]))
    assert found.mark == "open"
    assert found.title == "Whether the client is gone cannot be said yet"
    assert "After retrace, Krylov: 0.3%; retraining from scratch: 0.1%." in found.reached
    assert found.missed == [sentence for sentence in found.missed if "expunge audit RUN" in sentence] != []


def test_dearer_than_retraining_is_told(results):
    dear = changed(results, "retrace-krylov", speedup_in_gradients=0.5, speedup=None)
    assert headline(dear).reached[-1] == "Cost: 2.0 times more sample-gradients than retraining."


def test_without_backdoor_the_forgotten_data_speaks(clean):
    found = headline(clean)
    assert found.reached[1] == "Before: 99.9% of the client's data got the client's label."
    Reader(render_report(clean))


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


def test_methods_with_the_same_verdict_share_a_sentence():
    missed = headline(bench().part("strong backdoor")).missed
    assert [sentence.partition(":")[0] for sentence in missed] == ["UNDER-FORGOTTEN", "DAMAGED"]
    assert "FedOSD (3 of 3 runs)" in missed[0]
    assert "FedEraser" not in missed[0]
    assert "FedEraser (3 of 3 runs)" in missed[1]
    assert not any(
        name in sentence for sentence in missed for name in ("same init", "do nothing", "retrace, Krylov + recovery")
    )


def test_a_section_and_a_link_for_every_variant():
    page = render_report(bench())
    reader = Reader(page)
    assert [link for link in reader.links if link.startswith("#")] == ["#clean-client", "#strong-backdoor"]
    assert 'id="strong-backdoor"' in page
    assert len([link for link in reader.links if link.startswith("data:")]) == 16
    text = " ".join(reader.text)
    assert "paper: 71.76" in text
    assert "retrain noise, same init (low to high)" in text
    assert "Its Table 8 gives 1170 s" in text


def test_a_page_of_curves_alone():
    reader = Reader(render_report(convergence()))
    assert len(reader.links) == 2
    assert "What does not work" not in " ".join(reader.text)


def test_an_empty_experiment_still_gives_a_page():
    assert "No unlearning method was run." in render_report(Results("empty", {}, {}, [], {}))


def test_date_and_digests_are_shown_where_they_are_known(results):
    digest = "0123456789abcdef" * 4
    rows = [replace(row, digest=digest if row.method == "retrain" else None) for row in results.rows]
    page = render_report(replace(results, rows=rows, date="2026-11-16T12:00:00+00:00"))
    assert "<dt>measured</dt><dd>2026-11-16T12:00:00+00:00</dd>" in page
    assert page.count(f'<td data-label="model"><code title="{digest}">0123456789ab</code></td>') == 15
    bare = render_report(results)
    assert "measured</dt>" not in bare
    assert 'data-label="model"' not in bare


def test_unwritable_path_is_an_error_of_ours(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write the report"):
        write_report(results, tmp_path / "file" / "report.html")
