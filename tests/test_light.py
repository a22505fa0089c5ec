"""Light to start: what is imported before a command runs, and what it costs."""

import importlib
import inspect
import json
import os
import pkgutil
import resource
import statistics
import subprocess
import sys

import pytest

import expunge
from expunge.auditing.verdict import RETRAINS
from expunge.bench import demo
from expunge.bench.experiments import EXPERIMENTS
from expunge.bench.run_book import RunBook
from expunge.bench.scales import SCALES
from expunge.bench.scenario import Scenario
from expunge.cli import choices
from expunge.cli.completion import client_names
from expunge.data import DATASETS
from expunge.models import MODELS
from expunge.unlearning.registry import methods

HEAVY = {"torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "safetensors", "flwr"}
PROGRAM = """
import atexit, sys
atexit.register(lambda: print("\\nMODULES", *sorted({name.split(".")[0] for name in sys.modules})))
sys.argv = ["expunge", *sys.argv[1:]]
from expunge.cli import main
main()
"""
COMMANDS = tuple(
    [name] for name in ["demo", "train", "forget", "show", "audit", "methods", "bench", "init", "status", "serve"]
)
GROUPS = (["request"], ["receipt"])
LIGHT = {
    "version": ["--version"],
    **{" ".join([*words, "help"]): [*words, "--help"] for words in ([], *COMMANDS, *GROUPS)},
}
LIGHT |= {f"request {name} help": ["request", name, "--help"] for name in ("add", "run", "close")}
LIGHT |= {"receipt verify help": ["receipt", "verify", "--help"]}


def start(*arguments, **variables):
    """Run the entry point in a process of its own: what it said, the packages that it imported, and its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80", **variables},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said, _, modules = done.stdout.rpartition("\nMODULES")
    return said, set(modules.split()), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def complete(*words):
    """What tab completion in bash offers for the last of the words."""
    variables = {"_EXPUNGE_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
    return start(**variables, COMP_WORDS=" ".join(["expunge", *map(str, words)]))


@pytest.fixture
def run(tmp_path):
    """A run folder as far as completion reads it; its second client has left."""
    book = RunBook(Scenario(clients=3), schedule=None, departed=("client-1",))
    (tmp_path / "run.json").write_text(json.dumps(book.as_dict()))
    return tmp_path


@pytest.mark.parametrize("arguments", LIGHT.values(), ids=LIGHT)
def test_help_and_version_import_nothing_heavy(arguments):
    said, modules, _ = start(*arguments)
    assert "expunge" in said
    assert "typer" in modules
    assert not modules & HEAVY
    assert max(len(line) for line in said.splitlines()) <= 80


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["forget", "--help"]], ids=" ".join)
def test_starting_takes_less_than_a_third_of_a_second_of_cpu(arguments):
    assert statistics.median(start(*arguments)[2] for _ in range(5)) < 0.3


def test_completion_is_as_quick(run):
    assert statistics.median(complete("forget", run, "--client", "cl")[2] for _ in range(5)) < 0.3


def test_the_list_of_commands_is_not_cut_short():
    said = start("--help")[0]
    listed = said.split("Commands:")[1].strip().split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == [words[0] for words in (*COMMANDS, *GROUPS)]
    assert not [line for line in listed if "..." in line]


def test_completion_offers_the_clients_of_the_run(run):
    said, modules, _ = complete("forget", run, "--client", "cl")
    assert said.split() == ["client-0", "client-2"]
    assert not modules & HEAVY
    assert complete("forget", run, "--client", "client-2")[0].split() == ["client-2"]
    assert complete("forget", run / "nowhere", "--client", "cl")[0].split() == []
    assert complete("forget", "--client", "cl")[0].split() == []


@pytest.mark.parametrize("content", ["[1]", "", '{"scenario": 3}', "[" * 100_000])
def test_a_run_that_cannot_be_read_offers_nobody(run, content):
    (run / "run.json").write_text(content)
    assert client_names(run) == []


def test_completion_offers_methods(run):
    said, modules, _ = complete("forget", run, "--method", "fed")
    assert said.split() == ["fed-eraser", "fed-osd"]
    assert not modules & HEAVY


def test_completion_knows_the_clients_as_the_run_does(run):
    assert client_names(run) == [name for name in Scenario(clients=3).names if name != "client-1"]


def test_choices_are_those_of_the_library():
    assert choices.DATASETS == DATASETS
    assert choices.DEMO_SEEDS == demo.SEEDS
    assert tuple(EXPERIMENTS) == choices.EXPERIMENTS
    assert list(choices.METHODS) == sorted(methods())
    assert choices.MODELS == MODELS
    assert choices.RETRAINS == RETRAINS
    assert choices.SCALES == SCALES


def test_import_expunge_imports_nothing_heavy():
    program = "import expunge, sys; print(*sys.modules); expunge.forget; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert not {name.split(".")[0] for name in before} & HEAVY
    assert len(before) < 150
    assert "torch" in after


def test_a_site_of_flower_imports_neither_the_ledgers_work_nor_scipy():
    """Flower starts a ClientApp anew for every message."""
    program = "import expunge.flower, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "flwr" in found
    assert not found & {"scipy", "expunge.ledger.work", "expunge.auditing.audit"}


@pytest.mark.parametrize("name", expunge.__all__)
def test_every_public_name_is_found_and_stays(name):
    assert name in dir(expunge)
    found = getattr(expunge, name)
    assert found.__name__ == name
    assert getattr(expunge, name) is found


def test_no_module_takes_the_place_of_a_public_name():
    """Importing a module puts it into its package: one called like a function would replace it."""
    assert not {module.name for module in pkgutil.iter_modules(expunge.__path__)} & set(expunge.__all__)
    audit, forget = expunge.audit, expunge.forget
    for module in pkgutil.walk_packages(expunge.__path__, "expunge."):
        importlib.import_module(module.name)
    assert inspect.isfunction(audit)
    assert expunge.audit is audit
    assert expunge.forget is forget


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'expunge' has no attribute 'remember'"):
        expunge.remember  # noqa: B018
