"""The plan of the house: a room imports only rooms above it, and nothing imports itself through others."""

from pathlib import Path

import pytest

import expunge
from import_graph import cycles, graph, reached

ROOMS = (
    {"errors", "version"},
    {"extras"},
    {"core"},
    {"data", "models"},
    {"federation"},
    {"progress"},  # bars for what a federation's engine tells; forgetting shows them
    {"unlearning"},
    {"auditing"},
    {"forgetting"},
    {"ledger"},
    {"bench"},
    {"report"},
    {"flower"},
    {"cli"},
)
"""From the top down. Nobody imports the package itself: it stands below them all, and offers what they have."""

LEVEL = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
HOUSE = graph(Path(expunge.__file__).parents[1])
OURS = {name: {other for other in others if other in HOUSE} for name, others in HOUSE.items()}
PLACES = {
    "sklearn": {"data", "report"},
    "matplotlib": {"report"},
    "flwr": {"flower", "federation"},
    "typer": {"cli"},
    "fastapi": {"ledger"},
    "uvicorn": {"cli"},
    "cryptography": {"ledger"},
    "pandas": set(),
}
"""Where an outside package may be imported."""


def room(module):
    return module.split(".")[1] if "." in module else ""


def test_every_module_is_in_a_room_of_the_plan():
    assert len(HOUSE) > 150
    assert {room(module) for module in HOUSE} == {"", *LEVEL}


def test_a_room_imports_only_rooms_above_it():
    wrong = [
        f"{module} imports {other}"
        for module, others in OURS.items()
        for other in sorted(others)
        if module != "expunge"
        and room(other) != room(module)
        and (other == "expunge" or LEVEL[room(other)] >= LEVEL[room(module)])
    ]
    assert not wrong


def test_no_module_imports_itself_through_others():
    assert cycles(OURS) == []


@pytest.mark.parametrize("package", PLACES)
def test_outside_packages_stay_in_their_rooms(package):
    users = {module for module, others in HOUSE.items() if package in others}
    assert {room(module) for module in users} <= PLACES[package]
    if package == "flwr":
        assert all(user == "expunge.flower" or user.startswith("expunge.federation.engines.flower.") for user in users)


def test_algorithm_1_as_printed_knows_nothing_of_retrace():
    methods = {name: others for name, others in OURS.items() if name.startswith("expunge.unlearning.")}
    known = reached("expunge.unlearning.hf_kcu_paper", methods)
    assert "expunge.unlearning.registry" in known
    assert not [name for name in known if "retrace" in name]


WAYS = {
    "at the top": "import house.b",
    "from a package": "from house import b",
    "a name of it": "from house.b import thing",
    "inside a function": "def f():\n    from house.b import thing",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.b import thing",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_graph_sees_every_way_to_import(tmp_path, way):
    files = {"__init__": "", "a": way, "b": "from house.c import other\nimport flwr.app", "c": "import house.a"}
    (tmp_path / "house").mkdir()
    for name, text in files.items():
        (tmp_path / "house" / f"{name}.py").write_text(text)
    found = graph(tmp_path)
    assert "house.b" in found["house.a"]
    assert "flwr" in found["house.b"]
    assert cycles(found) == ["house.a", "house.b", "house.c"]
    assert reached("house.c", found) >= {"house.a", "house.b", "flwr"}
