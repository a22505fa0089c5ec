"""What is left of a pull by curvature: on a quadratic what is measured is what the response tells, to rounding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from expunge.bench.cells import RetrainedCell, TrainedCell
from expunge.bench.response import LEFT, LENGTH, MEASURED, PREDICTED, by_curvature, response, responses
from expunge.bench.runner import cells, make_all, missing_cells
from expunge.bench.scales import scale_of
from expunge.bench.store import Store
from expunge.bench.workers import one_by_one
from expunge.core.kronecker import Block, Factors, KroneckerCurvature
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.recipe import SGD, FedAvg, FedAvgM, Recipe
from expunge.unlearning.pulls import recorded
from unlearning.by_rounds import Federation, parameters

ROUNDS, FEATURES = 12, 6
RULES = {
    "SGD": Recipe(),
    "weight decay": Recipe(SGD(weight_decay=0.05)),
    "FedAvg at half the rate": Recipe(server=FedAvg(0.5)),
    "FedAvgM": Recipe(server=FedAvgM(0.3, 0.9)),
}


def quadratic(recipe=RULES["SGD"], *, steps=1, alike=False):
    """Ada has the inputs of all who stay and other targets, so every round pulls alike, and the response is exact.

    Those who stay differ in their inputs; with several local steps they must not (``alike``), for then a mean of
    their powers is no power of their mean.
    """
    source = torch.Generator().manual_seed(3)
    scales = torch.logspace(1, -1.5, FEATURES, dtype=torch.float64)

    def normal(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    first = normal(30, FEATURES) * scales
    stay = {"bob": first, "cyd": first if alike else normal(20, FEATURES) * scales.flip(0)}
    clients = {"ada": torch.cat([*stay.values()]), **stay}
    data = {name: (inputs, inputs @ normal(FEATURES, 1) + normal(len(inputs), 1)) for name, inputs in clients.items()}
    return Federation(data, recipe, rate=0.004, steps=steps)


def curvature_of(federation, *names):
    """The exact Gauss-Newton matrix of least squares on these clients: nothing is drawn."""
    rows = torch.cat(
        [torch.cat([x, torch.ones(len(x), 1).double()], dim=1) for x, _ in map(federation.clients.get, names)]
    )
    side = FEATURES + 1
    triangle = (rows.T @ rows / len(rows))[tuple(torch.triu_indices(side, side))]
    values = torch.cat([triangle, torch.tensor([1.0, 0.0], dtype=torch.float64)])
    layout = Layout.of(nn.Linear(FEATURES, 1))
    return KroneckerCurvature(Factors(values, (Block("", side, 1, True),)), layout)


def trained(federation):
    model, memory = federation.trained(ROUNDS)
    return parameters(model), recorded(ServerState(Snapshot.of(model), memory=memory), ["ada"])


def bins(federation, gone=("ada",), sign=1.0, stay=("bob", "cyd")):
    end, pull = trained(federation)
    retrained, _ = federation.without(*gone).trained(ROUNDS)
    return by_curvature(curvature_of(federation, *stay), pull, sign * (end - parameters(retrained)))


def off(found):
    """The largest error of a prediction."""
    return max(abs(each.measured - each.predicted) for each in found)


@pytest.mark.parametrize("rule", RULES)
def test_on_a_quadratic_what_is_measured_is_what_is_predicted(rule):
    found = bins(quadratic(RULES[rule]))
    assert off(found) < 1e-6
    assert sum(each.length for each in found) == pytest.approx(1.0, abs=1e-3)
    assert max(each.predicted for each in found) - min(each.predicted for each in found) > 0.3  # flat ones and curved
    assert [each.curvature for each in found] == sorted(each.curvature for each in found)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(SGD(0.9)), Recipe(SGD(0.9, nesterov=True))])
def test_several_local_steps_of_clients_that_curve_alike(recipe):
    assert off(bins(quadratic(recipe, steps=5, alike=True))) < 1e-6


def test_what_is_wrong_is_seen():
    federation = quadratic()
    assert off(bins(federation, sign=-1.0)) > 0.5
    assert off(bins(federation, gone=("ada", "cyd"))) > 0.1  # somebody who stays was not there when it was retrained
    assert off(bins(federation, stay=("bob",))) > 0.1  # nor asked for curvature
    assert off(bins(federation, stay=("ada", "bob"))) > 0.01  # whoever leaves was asked


def test_the_prediction_is_the_formula_of_plain_averaging_along_one_direction():
    federation = quadratic()
    _, pull = trained(federation)
    curvature = curvature_of(federation, "bob", "cyd")
    rows = torch.cat(
        [torch.cat([x, torch.ones(len(x), 1).double()], dim=1) for x, _ in map(federation.clients.get, ("bob", "cyd"))]
    )
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    one = replace(pull, vectors=vectors[:, -1].expand(len(pull.vectors), -1) / len(pull.vectors))
    (found,) = by_curvature(curvature, one, torch.zeros(FEATURES + 1).double())
    kept = 1 - federation.rate * float(values[-1])
    assert found.predicted == pytest.approx((1 - kept**ROUNDS) / (ROUNDS * (1 - kept)), abs=1e-9)
    assert (found.measured, found.length) == (0.0, pytest.approx(1.0))
    cut_off = 1 / (federation.rate * ROUNDS)
    assert found.curvature / 10**0.25 <= float(values[-1]) / cut_off <= found.curvature * 10**0.25


def test_without_rates_and_steps_nothing_is_told():
    _, pull = trained(quadratic())
    with pytest.raises(RequestError, match="record rates and steps"):
        by_curvature(curvature_of(quadratic(), "bob", "cyd"), replace(pull, response=None), pull.total)


def test_a_setting_is_measured_by_its_own_start_and_batches(tmp_path):
    store = Store(tmp_path / "bench")
    setting = response(scale_of("smoke"))[2].with_seed(10)
    assert setting.label == "SGD, strong backdoor"
    with one_by_one() as pool:
        make_all(missing_cells(cells(setting), store), store, pool, None)
    curves = {(curve.method, curve.y_name): curve for curve in responses(setting, {}, store)}
    assert set(curves) == {(MEASURED, LEFT), (PREDICTED, LEFT), (MEASURED, LENGTH)}
    state = store.kept(TrainedCell(setting.scenario)).state
    (gone,) = setting.forgets
    same = store.kept(RetrainedCell(setting.scenario, gone, 0, fresh=False)).state.model.parameters
    pull = recorded(state, gone.clients).total
    whole = float((state.model.parameters - same) @ pull / (pull @ pull))
    lengths = curves[MEASURED, LENGTH].y
    mean = sum(y * length for y, length in zip(curves[MEASURED, LEFT].y, lengths, strict=True))
    assert mean == pytest.approx(whole, abs=0.01)
    assert sum(lengths) == pytest.approx(1.0, abs=0.01)
