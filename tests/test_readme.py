"""The README tells the truth: its code runs, its numbers are the measured ones, its rooms exist."""

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import expunge
from expunge.bench.results import Results

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_blocks_run_one_after_another_and_forget_is_at_most_fifteen_lines(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3  # the last one is about Flower, and has a test there
    assert len(blocks[1].strip().splitlines()) <= 15
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(blocks[0], names)
        before = [p.detach().clone() for p in names["model"].parameters()]
        exec(blocks[1], names)
    assert any(not torch.equal(p, q) for p, q in zip(names["model"].parameters(), before, strict=True))
    assert names["outcome"].succeeded
    assert names["memory"].clients == ("bob", "cyd", "dee")
    assert "sample_gradients" in capsys.readouterr().out


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
def test_a_number_typed_by_hand_is_found(copy, claim):
    build = build_script()
    (copy / "docs" / "more.md").write_text(f"# Title\n\n{claim}\n")
    (problem,) = build.problems(copy)
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


def test_a_room_imports_only_rooms_above_it():
    order = ["errors", "core", "data", "models", "federation", "unlearning", "audit", "bench", "report"]
    package = Path(expunge.__file__).parent
    for room in order[1:]:
        below = order[order.index(room) + 1 :]
        for file in (package / room).glob("*.py"):
            imported = re.findall(r"^from expunge\.(\w+)", file.read_text(), re.MULTILINE)
            assert not set(imported) & set(below), f"{file.name} in {room} imports from a room below it"
