"""The README tells the truth: its code runs, its numbers are the measured ones, its rooms exist."""

import importlib.util
import re
from pathlib import Path

import torch

import expunge

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_blocks_run_one_after_another_and_forget_is_at_most_fifteen_lines(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
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


def test_generated_blocks_are_what_the_results_say():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.stale() == []
    assert build.BLOCK.search(README), "the README has lost its generated table"
    typed_by_hand = README.replace("| HF-KCU", "| 0.1 | HF-KCU")
    assert build.built(typed_by_hand) == README


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
