"""The hospitals: what ships, how it becomes numbers, whose it is, and that no statistic of anybody is in it."""

import tomllib
from pathlib import Path

import pytest
import torch

from expunge.bench.scenario import Scenario
from expunge.cli import choices
from expunge.data import Backdoor, hospitals, load
from expunge.data.hospitals import FOLDER, HOSPITALS, KINDS, MAY_MISS, MEASUREMENTS, read_hospital, split_hospital
from expunge.errors import DataError, RequestError

COUNTS = {"cleveland": (303, 139), "budapest": (294, 106), "switzerland": (123, 115), "long-beach": (200, 149)}
"""Patients and sick ones, as heart-disease.names has them."""


@pytest.mark.parametrize("name", HOSPITALS)
def test_everybody_is_there_and_as_sick_as_published(name):
    patients, sick = read_hospital(name)
    assert (len(sick), int(sick.sum())) == COUNTS[name]
    assert patients.isfinite().all()
    assert float(patients.abs().max()) < 10


def test_the_first_patient_by_hand():
    # 63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0
    patients, sick = read_hospital("cleveland")
    measured = [1.3, 1.0, 0.75, 0.26, 1.0, 0.4, -1.0, 1.3, -1.0]
    kinds = [1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 0]
    assert torch.allclose(patients[0], torch.tensor([*measured, *[0.0] * len(MAY_MISS), *kinds]))
    assert int(sick[0]) == 0


def test_what_is_missing_is_flagged_and_put_at_the_constant():
    # 32,1,1,95,0,?,0,127,0,.7,1,?,?,1: cholesterol 0, blood sugar, vessels and thallium unknown
    patient = read_hospital("switzerland")[0][0]
    flags = patient[len(MEASUREMENTS) :][: len(MAY_MISS)]
    missing = {number for number, flag in zip(MAY_MISS, flags, strict=True) if flag}
    assert missing == {4, 5, 11}
    assert all(patient[list(MEASUREMENTS).index(number)] == 0 for number in missing)
    assert patient[-len(KINDS[12]) :].sum() == 0


def test_a_hospitals_inputs_depend_on_no_other_hospital():
    alone = split_hospital("long-beach")
    dataset = load("hospitals")
    owners = dataset.owners["long-beach"]
    assert torch.equal(dataset.train_inputs[owners].flatten(1), alone[0][0])
    assert torch.equal(dataset.train_labels[owners], alone[0][1])
    whole = torch.cat([alone[0][0], alone[1][0]])
    assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, read_hospital("long-beach")[0].tolist()))


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path):
    with pytest.raises(DataError, match="install expunge again"):
        read_hospital("cleveland", tmp_path)
    (tmp_path / "processed.cleveland.data").write_text("63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n")
    with pytest.raises(DataError, match="not the published file"):
        read_hospital("cleveland", tmp_path)


def test_the_hospitals_are_the_clients():
    federation = Scenario(dataset="hospitals", model="mlp", clients=4, alpha=0.1, seed=3).build()
    assert tuple(federation.datasets) == HOSPITALS == choices.HOSPITALS
    assert len(torch.cat([labels for _, labels in federation.datasets.values()])) == 689
    assert len(federation.dataset.test_labels) == 231


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients": 5}, "its own 4 clients"),
        ({"backdoors": {"budapest": Backdoor(size=1, target=1)}}, "no backdoors"),
        ({"train_samples": 100}, "taken whole"),
        ({"shrink": 2}, "taken whole"),
    ],
)
def test_what_the_table_has_no_place_for_is_refused(changes, words):
    with pytest.raises(RequestError, match=words):
        Scenario(**{"dataset": "hospitals", "model": "mlp", "clients": 4, **changes})


def test_the_files_travel_with_the_package_and_their_authors_names():
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["expunge"]
    assert f"data/{FOLDER.name}/*" in data
    credit = (FOLDER / "README.md").read_text()
    for name in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano", "CC BY 4.0"):
        assert name in credit
    assert {file.name for file in FOLDER.glob("*.data")} == {file for file, _ in hospitals.FILES.values()}
