"""The response beside trainings that are really run: the same quadratic with and without a pull."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from expunge.core.vectors import Layout
from expunge.errors import RequestError
from expunge.federation.training.recipe import (
    SGD,
    Adam,
    AdamW,
    AdaptiveServer,
    ClientRule,
    FedAdam,
    FedAvg,
    FedAvgM,
    Measured,
    Recipe,
    second_moments,
)
from expunge.federation.training.response import GRID, Response
from expunge.federation.training.works import Round, Work, spread

LINEAR = (
    SGD(),
    SGD(weight_decay=0.05),
    SGD(momentum=0.9),
    SGD(momentum=0.6, dampening=0.3, weight_decay=0.02),
    SGD(momentum=0.8, nesterov=True),
    SGD(proximal_mu=0.4),
    SGD(momentum=0.5, nesterov=True, proximal_mu=0.2, weight_decay=0.01),
)
SERVERS = (FedAvg(), FedAvg(learning_rate=0.6), FedAvgM(0.4, 0.8), FedAvgM(1.0, 0.0))


def local_round(rule: SGD, start: Tensor, matrix: Tensor, middle: Tensor, rate: float, steps: int) -> Tensor:
    """What torch's own optimiser makes of the model in one round on ``1/2 (x - middle)' matrix (x - middle)``."""
    weight = nn.Parameter(start.clone())
    optimiser = torch.optim.SGD(
        [weight],
        lr=rate,
        momentum=rule.momentum,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        weight_decay=rule.weight_decay,
    )
    for _ in range(steps):
        optimiser.zero_grad()
        apart = weight - middle
        value = apart @ matrix @ apart / 2 + rule.proximal_mu / 2 * (weight - start).square().sum()
        value.backward()
        optimiser.step()
    return weight.detach() - start


def trained(recipe: Recipe, start: Tensor, rounds: list[list[tuple[float, Tensor, Tensor, float, int]]]) -> Tensor:
    """A federation by hand: each round a list of (weight, curvature, middle, rate, steps)."""
    model, momentum, server = start.clone(), torch.zeros_like(start), recipe.server
    for clients in rounds:
        assert isinstance(recipe.client, SGD)
        total = sum(client[0] for client in clients)
        mean = sum(w / total * local_round(recipe.client, model, *rest) for w, *rest in clients)
        if isinstance(server, FedAvgM):
            momentum = server.momentum * momentum + mean
            model = model + server.learning_rate * momentum
        else:
            model = model + server.learning_rate * mean
    return model


@settings(max_examples=40, deadline=None)
@given(
    rule=st.sampled_from(LINEAR),
    server=st.sampled_from(SERVERS),
    seed=st.integers(0, 10_000),
    rounds=st.integers(1, 6),
)
def test_the_response_is_what_training_without_the_leaver_ends_at(
    rule: SGD, server: FedAvg | FedAvgM, seed: int, rounds: int
) -> None:
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    basis = normal(4, 4)
    shared = basis @ basis.T / 8  # those who stay share their curvature
    stay = [(shared, normal(4)) for _ in range(3)]
    gone = normal(4, 4)
    leaver = (gone @ gone.T / 8, normal(4) * 3)
    recipe, start = Recipe(rule, server), normal(4)
    both, without, pulls, works = [], [], [], []
    model, momentum = start.clone(), torch.zeros(4, dtype=torch.float64)
    for number in range(rounds):
        rates = (0.1 * torch.rand(4, generator=chance, dtype=torch.float64) + 0.02).tolist()
        steps = torch.randint(1, 6, (4,), generator=chance).tolist()
        weights = (torch.rand(4, generator=chance, dtype=torch.float64) + 0.2).tolist()
        present = [True, number % 2 == 0, seed % 3 != 0]
        staying = [(weights[i], *stay[i], rates[i], steps[i]) for i in range(3) if present[i]]
        everybody = [*staying, (weights[3], *leaver, rates[3], steps[3])]
        both.append(everybody)
        without.append(staying)
        works.append(Round(tuple(Work(w, rate, n) for w, _, _, rate, n in staying)))
        # the pull of this round: the mean update minus that of those who stay, from the same model
        means = []
        for clients in (everybody, staying):
            total = sum(c[0] for c in clients)
            means.append(sum(c[0] / total * local_round(rule, model, *c[1:]) for c in clients))
        pulls.append(means[0] - means[1])
        if isinstance(server, FedAvgM):
            momentum = server.momentum * momentum + means[0]
            model = model + server.learning_rate * momentum
        else:
            model = model + server.learning_rate * means[0]
    values, vectors = torch.linalg.eigh(shared)
    rows = torch.eye(rounds, dtype=torch.float64)
    left, _ = Response(recipe, tuple(works)).left(values, rows)
    predicted = sum(vectors @ (left[t] * (vectors.T @ pulls[t])) for t in range(rounds))
    true = trained(recipe, start, both) - trained(recipe, start, without)
    assert torch.allclose(predicted, true, rtol=0, atol=1e-10 * max(1.0, float(true.norm())))


@pytest.mark.parametrize("rule", [Adam(), AdamW(weight_decay=0.1), Adam(weight_decay=0.2, proximal_mu=0.3)])
def test_adam_with_its_moments_held_is_a_recursion(rule: Adam) -> None:
    curvature, rate, moment = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64), 0.02, 0.7
    for steps in (1, 2, 7):
        ends = []
        for start in (torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)):
            x, mean = start.clone(), torch.zeros(3, dtype=torch.float64)
            for number in range(1, steps + 1):
                gradient = curvature * (x - 5.0) + rule.proximal_mu * (x - start)
                if rule.decoupled:
                    x = x * (1 - rate * rule.weight_decay)
                else:
                    gradient = gradient + rule.weight_decay * x
                mean = rule.betas[0] * mean + (1 - rule.betas[0]) * gradient
                x = x - rate * mean / (1 - rule.betas[0] ** number) / (moment + rule.eps)
            ends.append(x)
        assert torch.allclose(rule.left(curvature, rate, steps, moment), ends[0] - ends[1], atol=1e-12)


def test_second_moments_are_those_of_torch() -> None:
    model = nn.Linear(3, 2).double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for _ in range(3):
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            squares[name] = 0.999 * squares[name] + 0.001 * parameter.grad.square()
        optimiser.step()
    expected = [math.sqrt(float(square.mean()) / (1 - 0.999**3)) for square in squares.values()]
    assert second_moments(optimiser) == pytest.approx(expected, rel=1e-9)


def test_an_optimiser_without_second_moments_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimiser = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimiser.step()
    with pytest.raises(RequestError, match="describe its recursion"):
        second_moments(optimiser)


def test_of_an_even_pull_plain_sgd_leaves_the_mean_of_the_powers() -> None:
    response, even = Response(Recipe(), (Round((Work(1.0, 0.1, 3),)),) * 4), torch.full((1, 4), 0.25)
    for curvature in (0.0, 0.5, 2.0, 9.0):
        contraction = (1 - 0.1 * curvature) ** 3
        by_hand = sum(contraction**t for t in range(4)) / 4
        found = response.left(torch.tensor([curvature], dtype=torch.float64), even)[0]
        assert found.item() == pytest.approx(by_hand)
    far = response.left(torch.tensor([100.0], dtype=torch.float64), even)[0]
    assert far.item() == pytest.approx(0.25)  # only the last round's pull is left


ROUNDS = tuple(Round((Work(2.0, 0.1, 3 + n), Work(1.0, 0.05, 8))) for n in range(4))
PLAIN = sum((2.0 * 0.1 * (3 + n) + 1.0 * 0.05 * 8) / 3.0 for n in range(4))
"""Rate x steps, by weight, over all rounds."""


@pytest.mark.parametrize(
    ("server", "gain"), [(FedAvg(), 1.0), (FedAvg(0.5), 0.5), (FedAvgM(0.3, 0.9), 3.0), (FedAvgM(1.0, 0.0), 1.0)]
)
def test_how_far_a_training_goes_times_the_servers_gain(server: FedAvg | FedAvgM, gain: float) -> None:
    assert Response(Recipe(server=server), ROUNDS).travel() == pytest.approx(gain * PLAIN, rel=1e-5)
    repair = Round((Work(1.0, 0.2, 2),), plain=True)  # its mean was added as it is
    with_repair = Response(Recipe(server=server), (*ROUNDS, repair, Round(()))).travel()
    assert with_repair == pytest.approx(gain * PLAIN + 0.4, rel=1e-5)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.5, False), (0.8, True)])
def test_how_far_momentum_goes(momentum: float, nesterov: bool) -> None:
    """A constant gradient's steps are rate x (1 + beta + beta^2 + ...); Nesterov looks one term further."""
    response = Response(Recipe(SGD(momentum, nesterov=nesterov)), (Round((Work(1.0, 0.1, 5),)),) * 3)
    first = 2 if nesterov else 1
    steps = sum((1 - momentum ** (number + first)) / (1 - momentum) for number in range(5))
    assert response.travel() == pytest.approx(3 * 0.1 * steps, rel=1e-5)


def test_how_far_adam_goes_depends_on_the_layers_moments() -> None:
    work = Work(1.0, 0.01, 4, moments=(0.5, 2.0))
    response = Response(Recipe(Adam(eps=0.0)), (Round((work,)),) * 2, Layout.of(nn.Linear(3, 2)))
    assert response.travel(["weight"]) == pytest.approx(2 * 0.01 * 4 / 0.5, rel=1e-5)
    assert response.travel(["bias"]) == pytest.approx(2 * 0.01 * 4 / 2.0, rel=1e-5)


def test_where_nobody_who_stays_has_trained_there_is_no_way() -> None:
    with pytest.raises(RequestError, match="Nobody who stays has trained"):
        Response(Recipe(), (Round(()),) * 3).travel()
    with pytest.raises(RequestError, match=r"FedAdam.*hf-kcu"):
        Response(Recipe(server=FedAdam), ROUNDS).travel()


def test_moments_belong_to_their_layer() -> None:
    layout = Layout.of(nn.Linear(3, 2))
    work = Work(1.0, 0.1, 1, moments=(0.5, 2.0))
    response = Response(Recipe(Adam(eps=0.0)), (Round((work,)),) * 2, layout)
    one, row = torch.ones(1, dtype=torch.float64), torch.tensor([[1.0, 0.0]])
    assert float(response.left(one, row, ["weight"])[0]) == pytest.approx(1 - 0.1 / 0.5)
    assert float(response.left(one, row, ["bias"])[0]) == pytest.approx(1 - 0.1 / 2.0)
    both = math.sqrt((6 * 0.5**2 + 2 * 2.0**2) / 8)
    assert float(response.left(one, row, ["weight", "bias"])[0]) == pytest.approx(1 - 0.1 / both)
    missing = Response(Recipe(Adam()), (Round((Work(1.0, 0.1, 1),)),) * 2, layout)
    with pytest.raises(RequestError, match="second_moments"):
        missing.left(one, row)


def test_many_curvatures_are_interpolated_closely() -> None:
    works = tuple(Round((Work(1.0, 0.05, 30 + n), Work(0.5, 0.02, 11.5))) for n in range(8))
    for rule in (SGD(), SGD(momentum=0.9)):
        response, rows = Response(Recipe(rule, FedAvgM(0.3, 0.9)), works), torch.rand(2, 8, dtype=torch.float64)
        many = torch.cat([torch.zeros(3), torch.logspace(-9, 0.3, 3 * GRID)]).double()
        moved, momentum = response.left(many, rows)
        for at in range(0, len(many), 97):
            near = response.left(many[at : at + 1], rows)
            assert torch.allclose(moved[:, at : at + 1], near[0], atol=2e-3)
            assert torch.allclose(momentum[:, at : at + 1], near[1], atol=2e-3)


def test_rounds_that_nobody_stays_in_correct_nothing_and_plain_ones_leave_momentum_alone() -> None:
    alone = Response(Recipe(), (Round((Work(1.0, 0.5, 1),)), Round(())))
    assert alone.left(torch.ones(1), torch.tensor([[1.0, 0.0]]))[0].item() == 1.0
    plain = Response(Recipe(server=FedAvgM(1.0, 0.5)), (Round((Work(1.0, 0.5, 1),)), Round((Work(1.0, 0.5, 1),), True)))
    moved, momentum = plain.left(torch.ones(1), torch.tensor([[1.0, 0.0]]))
    assert (moved.item(), momentum.item()) == (0.5, 1.0)


def test_a_pull_is_spread_over_the_rounds_of_its_client() -> None:
    works = [
        {"ada": Work(0.5, 0.2, 10), "bob": Work(0.5, 0.2, 10)},
        {"bob": Work(1.0, 0.1, 10)},
        {"ada": Work(0.5, 0.1, 10)},
        {"ada": Work(0.5, 0.1, 10)},
    ]
    assert torch.allclose(spread(works, ["ada"], range(0, 3)), torch.tensor([2 / 3, 0, 1 / 3, 0]).double())
    assert spread(works, ["bob"], range(2, 4)).sum() == 0


@pytest.mark.parametrize("name", ["FedAdam", "FedYogi", "FedAdagrad"])
def test_adaptive_servers_are_refused_by_name(name: str) -> None:
    response = Response(Recipe(server=AdaptiveServer(name)), (Round((Work(1.0, 0.1, 1),)),))
    with pytest.raises(RequestError, match=f"{name}.*hf-kcu"):
        response.left(torch.ones(1), torch.ones(1, 1))
    assert FedAdam == AdaptiveServer("FedAdam")


@pytest.mark.parametrize("rule", [*LINEAR, Adam(), AdamW(weight_decay=0.2)])
def test_recipes_are_written_and_read(rule: ClientRule) -> None:
    for server in (*SERVERS, FedAdam):
        recipe = Recipe(rule, server)
        assert Recipe.from_dict(recipe.as_dict()) == recipe


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SGD(momentum=1.0),
        lambda: SGD(nesterov=True),
        lambda: SGD(weight_decay=-1.0),
        lambda: Adam(betas=(1.0, 0.9)),
        lambda: FedAvg(learning_rate=0.0),
        lambda: FedAvgM(momentum=1.0),
        lambda: FedAvgM(learning_rate=float("nan")),
        lambda: Work(1.0, -0.1, 1),
    ],
)
def test_what_no_training_has_is_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(RequestError):
        wrong()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(SGD), "clients' rule of a Recipe is one of expunge's, made with its settings"),
        (lambda: Recipe(torch.optim.SGD), r"clients' rule .*not torch\.optim\.sgd\.SGD"),
        (lambda: Recipe(FedAvgM()), "clients' rule of a Recipe"),
        (lambda: Recipe(server=FedAvgM), "server's rule of a Recipe"),
        (lambda: Recipe(server="FedAvgM"), "server's rule .*not 'FedAvgM'"),
        (lambda: SGD("0.9"), "momentum of SGD must be a number, not '0.9'"),
        (lambda: FedAvg(None), "learning_rate of FedAvg must be a number, not None"),
        (lambda: Adam(0.9), "betas are two numbers"),
        (lambda: Measured(None), r"takes a function, train\(model, name\)"),
    ],
)
def test_what_is_no_recipe_is_refused_where_it_is_made(make, words):
    with pytest.raises(RequestError, match=words):
        make()
