"""What is installed on request may be missing: forgetting and auditing run without it, the rest says so in a sentence.

Each program runs in a process of its own, in which the extras cannot be found.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "expunge.flower" not in block
]
EXTRAS = ("sklearn", "matplotlib", "pandas", "flwr", "cryptography", "fastapi", "uvicorn", "peft", "tokenizers")
BARE = """
import sys

MISSING = {!r}


class WithoutExtras:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in MISSING else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [WithoutExtras(finder) for finder in sys.meta_path]
"""
EVERY_MODULE = """
import importlib, pkgutil, expunge

rooms = ["core", "data", "models", "federation", "unlearning", "auditing", "ledger", "bench", "cli"]
found = []
for room in rooms:
    package = importlib.import_module(f"expunge.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"expunge.{room}.", onerror=lambda name: None):
        if not module.name.startswith(("expunge.federation.engines.flower", "expunge.ledger.web")):
            importlib.import_module(module.name)
            found.append(module.name)
import expunge.forgetting
print(len(found))
"""
COMMANDS = """
from expunge.cli import main

for words in {!r}:
    sys.argv = ["expunge", *words.split()]
    try:
        main()
    except SystemExit as left:
        if left.code:
            raise
"""


def without(missing, program, **options):
    code = BARE.format(missing) + program
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


def test_the_snippets_of_the_readme_run():
    assert len(SNIPPETS) >= 2
    done = without(EXTRAS, "\n".join(SNIPPETS))
    assert done.returncode == 0, done.stderr
    assert "sample_gradients" in done.stdout
    assert re.search(r"^(EQUIVALENT|UNDER-FORGOTTEN|OVER-FORGOTTEN|DAMAGED|UNDECIDED) ", done.stdout, re.MULTILINE)


def test_forgetting_and_auditing_import_nothing_of_an_extra():
    done = without(EXTRAS, EVERY_MODULE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


@pytest.mark.parametrize(
    ("program", "said"),
    {
        "import expunge.flower": "Flower is not installed: pip install 'expunge[flower]'.",
        "import expunge.ledger.web.serving": "served by FastAPI: pip install 'expunge[serve]'.",
        "from expunge.extras import require\nrequire('uvicorn')": "served by uvicorn: pip install 'expunge[serve]'.",
        "from expunge.data.tokens import Tokens\nTokens(['a'], 300)": "by tokenizers: pip install 'expunge[text]'.",
        "from expunge.data import load\nload('digits')": "scikit-learn: pip install 'expunge[bench]'.",
    }.items(),
)
def test_a_missing_extra_is_a_sentence_of_ours_and_an_import_error(program, said):
    body = "\n    ".join(program.splitlines())
    checked = f"from expunge import ExpungeError\ntry:\n    {body}\nexcept ImportError as problem:\n    print(problem)"
    done = without(EXTRAS, checked + "\n    assert isinstance(problem, ExpungeError)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(said)


@pytest.mark.parametrize("command", ["train --out run", "demo --out run", "bench main --scale smoke --out run"])
def test_the_command_line_says_it_in_one_line_before_any_work(tmp_path, command):
    done = without(EXTRAS, COMMANDS.format([command]), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: The digits come with scikit-learn: pip install 'expunge[bench]'.\n"
    assert not list(tmp_path.iterdir())


def test_a_ledger_needs_its_extra_and_says_so_before_anything_is_written(tmp_path):
    done = without(EXTRAS, COMMANDS.format(["init"]), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: Receipts are signed by cryptography: pip install 'expunge[ledger]'.\n"
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_are_tables_and_numbers_but_no_pictures(tmp_path):
    commands = [
        "train --out run --rounds 1 --clients 3 --epochs 1 --model softmax",
        "forget run --client client-0",
        "show run",
        "audit run --retrains 0",
    ]
    done = without(["matplotlib"], COMMANDS.format(commands), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: Plots need matplotlib: pip install 'expunge[bench]'.\n") == 2
    assert "do nothing" in done.stdout
    assert "UNDECIDED" in done.stdout
    left = {path.name for path in (tmp_path / "run" / "without-client-0").iterdir() if path.is_file()}
    assert left == {"results.json", "rows.csv", "table.md", "audit.json"}
