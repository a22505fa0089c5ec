"""The experiment on real hospitals: the certificate against the optimum itself, and the demo as a newcomer runs it."""

import json

import pytest
import torch

from expunge.bench import hospitals
from expunge.bench.hospitals import BUDGET, LOGISTIC, certificate_line, certificates
from expunge.bench.results import Results, Series
from expunge.core.vectors import Snapshot
from expunge.unlearning.request import Request


def optimum(federation, leaver: str) -> torch.Tensor:
    """Where the retained loss is least, in float64 by torch alone."""
    parts = [data for name, data in federation.datasets.items() if name != leaver]
    inputs = torch.cat([own for own, _ in parts]).flatten(1).double()
    labels = torch.cat([own for _, own in parts])
    weight = torch.zeros(2, inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    exact = {"tolerance_grad": 1e-11, "tolerance_change": 0.0}  # its own stop leaves a distance as large as a bound
    solver = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe", **exact)

    def loss():
        solver.zero_grad()
        value = torch.nn.functional.cross_entropy(inputs @ weight.T + bias, labels)
        value = value + LOGISTIC.l2 / 2 * (weight.square().sum() + bias.square().sum())
        value.backward()
        return value

    solver.step(loss)
    assert max(float(weight.grad.norm()), float(bias.grad.norm())) < 1e-8
    return torch.cat([weight.detach().flatten(), bias.detach()])


@pytest.mark.parametrize("leaver", hospitals.HOSPITALS)
def test_the_certificate_bounds_the_distance_and_newton_steps_end_at_the_optimum(leaver, monkeypatch):
    federation = LOGISTIC.build()
    reached: list[Snapshot] = []
    certify = hospitals.certify
    monkeypatch.setattr(hospitals, "certify", lambda *own: reached.append(own[3]) or certify(*own))
    start = Snapshot(optimum(federation, "").float(), {})  # everybody's, with the leaver
    found = certificates(federation, start, Request.of(leaver))
    goal = optimum(federation, leaver)
    distances = [float(torch.linalg.vector_norm(own.parameters.double() - goal)) for own in reached]
    assert all(distance <= own.distance_bound for distance, own in zip(distances, found, strict=True))
    assert distances[0] > 0.1
    assert distances[-1] < 1e-5
    assert found[-1].holds
    assert not found[0].holds


def test_a_certificate_that_does_not_hold_is_told():
    far = Series("retrace", "", hospitals.STEPS, hospitals.BOUND, [0.0, 1.0], [3.0, 2.0])
    assert "retrain" in certificate_line(Results("hospitals", {}, {}, [], {}, series=[far]))
    near = Series("retrace", "", hospitals.STEPS, hospitals.BOUND, [0.0, 1.0], [BUDGET.allowed / 2, 0.0])
    assert "Newton" not in certificate_line(Results("hospitals", {}, {}, [], {}, series=[near]))


@pytest.mark.slow
def test_the_demo_says_what_a_stranger_needs(expunge, tmp_path):
    code, shown, said = expunge("demo", "hospitals", "--out", tmp_path / "demo")
    assert code == 0
    assert "budapest leaves and must be forgotten" in " ".join(said.split())
    assert "cannot be told from such a model beyond epsilon 1" in " ".join(said.split())
    assert shown.count("do nothing") == 2
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    rows = [row for row in results["rows"] if row["variant"].startswith("logistic")]
    before, after = (next(row for row in rows if row["method"] == name) for name in ("trained", "retrace"))
    retrained = [row["forget_loss"] for row in rows if row["method"] == "retrain"]
    assert len(retrained) == 5
    assert abs(after["forget_loss"] - retrained[0]) < 0.2 * abs(before["forget_loss"] - retrained[0])


def test_a_demo_that_does_not_exist_is_refused(expunge, tmp_path):
    code, _, said = expunge("demo", "pigeons", "--out", tmp_path / "new")
    assert (code, said.strip()) == (1, "error: There is no demo of 'pigeons'; there are digits, hospitals.")
    code, _, said = expunge("demo", "hospitals", "--out", tmp_path / "new", "--engine", "flower")
    assert (code, said.strip()) == (1, "error: The demo of hospitals runs with --engine local only.")
