"""The README tells the truth: its code runs, its numbers are the measured ones, its rooms exist."""

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import expunge
from expunge.bench.results import Results, Row, Series, Variant
from expunge.report.mixing import known_curves

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_blocks_run_one_after_another(capsys):
    training, forgetting, auditing = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([*forgetting.strip().splitlines(), *auditing.strip().splitlines()]) <= 10
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(training, names)
        assert names["memory"].clients == ("ada", "bob", "cyd", "dee")
        before = [p.detach().clone() for p in names["model"].parameters()]
        exec(forgetting, names)
        assert names["outcome"].succeeded
        assert names["outcome"].method == "retrace"
        assert names["memory"].clients == ("bob", "cyd", "dee")
        assert "sample_gradients" in capsys.readouterr().out
        exec(auditing, names)
    assert any(not torch.equal(p, q) for p, q in zip(names["model"].parameters(), before, strict=True))
    assert capsys.readouterr().out.startswith("EQUIVALENT")


def test_the_code_of_the_page_on_models_runs():
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL):
            exec(block, names)
    assert names["outcome"].succeeded
    assert names["outcome"].method == "hf-kcu"


def build_script():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


@pytest.fixture
def copy(tmp_path):
    """The documents, their pictures and their results, to spoil."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.fixture
def small(tmp_path):
    """A page and the results of two attacks, whose values are known here."""
    noise = {"asr": {"low": 0.01, "high": 0.0325, "mean": 0.02}}
    rows = [
        Row("trained", 1, asr=0.9, verdict="UNDER-FORGOTTEN", variant="strong"),
        Row("trained", 2, asr=1.0, verdict="UNDER-FORGOTTEN", variant="strong"),
        *(Row("retrain", seed, asr=0.02, kl_forget=0.2, variant="strong") for seed in (1, 1, 2, 2)),
        Row("mine, of two words", 1, asr=0.021, kl_forget=0.25, verdict="EQUIVALENT", variant="strong"),
        Row("mine, of two words", 2, asr=0.041, kl_forget=0.35, verdict="UNDECIDED", variant="strong"),
        Row("trained", 1, asr=0.3, variant="weak"),
    ]
    variants = {"weak": Variant({}, {}, {}), "strong": Variant({}, noise, {})}
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "two").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Nothing measured\n")
    Results("backdoor", {}, {}, rows, {}, variants).save(tmp_path / "results" / "two" / "results.json")
    return tmp_path


def spoil(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_tables_pictures_and_prose_are_what_the_results_say():
    build = build_script()
    assert build.problems() == []
    assert build.BLOCK.search(README), "the README has lost its generated table"
    assert build.REFERENCE.search(README), "the README has lost its picture"


def test_a_stale_table_is_found_and_mended(copy):
    build = build_script()
    spoil(copy / "README.md", "| HF-KCU", "| 0.1 | HF-KCU")
    assert build.problems(copy) == ["README.md has a table that is not what its results say."]
    assert build.built((copy / "README.md").read_text(), copy) == README


def test_a_stale_picture_is_found_and_made_again(copy):
    build = build_script()
    results = Results.load(copy / "results/demo/results.json")
    replace(results, rows=results.rows[1:]).save(copy / "results/demo/results.json")
    found = build.problems(copy)
    assert "docs/images/demo/forgetting.png was not made from results/demo/results.json as it is now." in found
    build.write(copy)
    assert build.problems(copy) == []


def test_a_picture_without_results_and_one_that_is_missing_are_found(copy):
    build = build_script()
    (copy / "docs" / "more.md").write_text("![a](images/demo/cost.png) ![b](images/nobody/cost.png)\n")
    assert build.problems(copy) == [
        "docs/images/demo/cost.png is referred to but does not exist.",
        "docs/images/nobody/cost.png has no results: there is no results/nobody/results.json.",
    ]


def test_a_table_without_results_is_found(copy):
    build = build_script()
    spoil(copy / "README.md", "from results/demo/", "from results/nobody/")
    assert build.problems(copy)[0] == "README.md has a table from results/nobody/results.json, which does not exist."


def test_a_block_may_ask_for_a_brief_or_a_short_table_or_for_nearness(small):
    build = build_script()
    shutil.copytree(ROOT / "results/backdoor", small / "results/backdoor")
    source = "results/backdoor/results.json"
    asked = {
        "brief": "| method | accuracy on new data (%) | backdoor success (%) | verdict | times less work |",
        "short": "| method | accuracy on new data (%) |",
        "nearness": "| variant | method | verdict |",
    }
    for view, first in asked.items():
        empty = f"<!-- generated by docs/build.py from {source} ({view}): begin -->\n<!-- generated: end -->\n"
        (small / "docs" / "more.md").write_text(empty)
        assert build.problems(small) == ["docs/more.md has a table that is not what its results say."]
        filled = build.built(empty, small)
        assert first in filled
        assert "rounds |" not in filled
        (small / "docs" / "more.md").write_text(filled)
        assert build.problems(small) == []


def test_a_block_may_ask_for_what_dropped(small):
    build = build_script()
    source = "results/verdicts-0.1.0.json"
    (small / source).write_text('{"two": {"strong": {"mine, of two words": {"1": "DAMAGED", "2": "EQUIVALENT"}}}}')
    empty = f"<!-- generated by docs/build.py from {source} (dropped): begin -->\n<!-- generated: end -->\n"
    (small / "docs" / "more.md").write_text(empty)
    assert build.problems(small) == ["docs/more.md has a table that is not what its results say."]
    assert "| two | – | – | 1 of 2 | undecided |" in build.built(empty, small)
    (small / source).unlink()
    assert build.problems(small) == [f"docs/more.md has a table from {source}, which does not exist."]


def test_a_block_may_ask_for_some_variants(small):
    build = build_script()
    shutil.copytree(ROOT / "results/backdoor", small / "results/backdoor")
    source = "results/backdoor/results.json"
    block = f"<!-- generated by docs/build.py from {source} (short: {{}}): begin -->\n<!-- generated: end -->"
    filled = build.built(block.format("mnist, s"), small)
    assert "#### mnist" not in filled  # one variant needs no heading
    assert "*mnist, 10 clients" in filled
    assert "fashion-mnist" not in filled
    assert "#### mnist, strong" in build.built(block.format("mnist"), small)
    (small / "docs" / "more.md").write_text(block.format("imagenet"))
    assert build.problems(small) == [
        f"docs/more.md has a table of variants of {source} that begin with 'imagenet': there are none."
    ]


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        ("two/strong; trained; asr", "95.0%"),
        ("two/weak; trained; asr", "30.0%"),
        ("two/strong; trained; asr; spread", "7.1%"),
        ("two/strong; trained; asr; low", "90.0%"),
        ("two/strong; trained; asr; high", "100.0%"),
        ("two/strong; mine, of two words; asr; range", "2.1–4.1%"),
        ("two/strong; mine, of two words; kl_forget", "0.300"),
        ("two/strong; mine, of two words / retrain; kl_forget", "1.5×"),
        ("two/strong; noise; asr; range", "1.0–3.2%"),
        ("two/strong; noise; asr; high", "3.2%"),
        ("two/strong; mine, of two words; verdict; equivalent", "1 of 2"),
    ],
)
def test_a_sentence_may_ask_for_a_value_and_a_stale_one_is_found(small, asked, value):
    build = build_script()
    sentence = f"It was <!--= {asked} -->{{}}<!--=--> in the end.\n"
    page = small / "docs" / "more.md"
    page.write_text(sentence.format("99.9%"))
    assert build.problems(small) == ["docs/more.md has a value that is not what its results say."]
    page.write_text(build.built(page.read_text(), small))
    assert page.read_text() == sentence.format(value)
    assert build.problems(small) == []  # no number typed by hand either


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("<!--= nobody/strong; trained; asr -->1<!--=-->", "results/nobody/results.json"),
        ("<!--= two; trained; asr -->1<!--=-->", "has variants; name one of weak, strong"),
        ("<!--= two/stronger; trained; asr -->1<!--=-->", "no variant 'stronger'"),
        ("<!--= two/strong; nobody; asr -->1<!--=-->", "not measured for 'nobody'; there are trained, retrain"),
        ("<!--= two/strong; trained; asrs -->1<!--=-->", "called 'asrs'"),
        ("<!--= two/strong; trained; asr; middle -->1<!--=-->", "statistic 'middle'"),
        ("<!--= two/strong; noise; asr; mean -->1<!--=-->", "Of noise there is no mean"),
        ("<!--= two/weak; noise; asr; low -->1<!--=-->", "too few retrained models"),
        ("<!--= two/strong; trained / nobody; asr -->1<!--=-->", "not measured for 'nobody'"),
        ("<!--= two/strong; trained / retrain; asr; low -->1<!--=-->", "ratio of two means only"),
        ("<!--= two/strong; trained; verdict; gone -->1<!--=-->", "no verdict 'gone'"),
        ("<!--= two/strong; retrain; verdict; equivalent -->1<!--=-->", "no verdict on 'retrain'"),
        ("<!--= two/strong; trained -->1<!--=-->", "METHOD; MEASURE; STATISTIC"),
        ("<!--= two/strong; trained; asr -->1 and no end", "not written as one"),
        ("<!--= two -->1<!--=-->", "not written as one"),
    ],
)
def test_a_value_that_cannot_be_had_is_said(small, asked, why):
    build = build_script()
    (small / "docs" / "more.md").write_text(f"It was {asked}.\n")
    found = build.problems(small)
    assert found
    assert all(problem.startswith("docs/more.md") for problem in found)
    assert why in found[0]
    with pytest.raises(SystemExit, match=r"docs/more\.md"):
        build.write(small)


def test_a_block_that_asks_for_something_else_is_found(small):
    build = build_script()
    block = "<!-- generated by docs/build.py from {}: begin -->\n<!-- generated: end -->\n"
    (small / "docs" / "more.md").write_text(block.format("results/two/results.json (shorter)"))
    known = "(brief), (short), (nearness), (persistence), (response), (scaling), (dropped)"
    assert build.problems(small) == [
        f"docs/more.md has a table (shorter) of results/two/results.json: there are {known}."
    ]
    with pytest.raises(SystemExit, match="shorter"):
        build.write(small)


def test_the_curve_that_audits_show_is_the_studys(small):
    build = build_script()
    file = small / build.MIXING
    file.parent.mkdir(parents=True)
    assert build.problems(small) == []
    x, y = [0.0, 10.0, 20.0], [0.9, 0.5, 0.0]
    names = ("percent of trained weights", "mixtures: share called EQUIVALENT")
    curves = [Series("fresh start", "digits", *names, x, y), Series("other", "digits", "epochs", "share", x, y)]
    (small / build.STUDY).parent.mkdir()
    Results("verdict", {}, {}, [], {}, series=curves).save(small / build.STUDY)
    assert [found for found in build.problems(small) if "mixing.json is not what" in found]
    build.write(small)
    assert build.problems(small) == []
    assert known_curves(file) == curves[:1]
    (small / build.STUDY).unlink()
    build.write(small)
    assert not file.exists()


def test_the_papers_contradictions_come_from_the_package(small):
    build = build_script()
    begin, end = (
        "<!-- generated by docs/build.py from expunge.report.contradictions: begin -->",
        "<!-- generated: end -->",
    )
    (small / "docs" / "more.md").write_text(f"{begin}\n{end}\n")
    assert build.problems(small) == ["docs/more.md has a table that is not what its results say."]
    build.write(small)
    assert "- Its text says that HF-KCU stays within 0.60" in (small / "docs" / "more.md").read_text()
    assert build.problems(small) == []
    assert begin in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize(
    "claim",
    [
        "It reaches 97.3 in the end.",
        "Accuracy falls by 3%.",
        "It is 40 times faster.",
        "It is 40× faster.",
        "It is forty times faster.",
        "A 40x speedup.",
        "It needs 10,000 samples.",
    ],
)
def test_a_number_typed_by_hand_is_found(small, claim):
    build = build_script()
    (small / "docs" / "more.md").write_text(f"# Title\n\n{claim}\n")
    (problem,) = build.problems(small)
    assert problem.startswith("docs/more.md has a number typed by hand")


@pytest.mark.parametrize(
    "line",
    [
        "Python 3.11 or newer, torch 2.13.0, release 0.1.0, Apache-2.0.",
        "GDPR Art. 17; Section 4.2; Table 1; [CIFAR](https://example.org/v1.2); see[^1].",
        "[^1]: Journal 3.14, pages 10.5.\n    Second line with 2.5 in it.",
        "Say `--alpha 0.5` for 3x3 patches.",
        "```console\n$ expunge train --alpha 0.5\n```",
        "### 2.1 Method",
    ],
)
def test_what_is_no_measurement_may_be_written(line):
    assert build_script().typed_numbers(f"{line}\n") == []


def test_the_plan_of_the_house_names_the_rooms_that_exist():
    package = Path(expunge.__file__).parent
    rooms = {path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    plan = README.split("```text")[1].split("```")[0]
    assert set(re.findall(r"^  (\w+)/", plan, re.MULTILINE)) == rooms


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]


def links(page):
    """The files that a page leads to."""
    found = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [(page.parent / link).resolve() for link in found if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [str(link) for link in links(page) if not link.exists()] == []


def test_the_readme_leads_to_every_page():
    assert set(ROOT.glob("docs/*.md")) <= set(links(ROOT / "README.md"))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/method.md"])
def test_the_files_that_a_page_names_exist(page):
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`([\w/]+\.py)`", prose))
    assert len(named) >= 5
    files = [str(file) for folder in ("src", "docs", "tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
