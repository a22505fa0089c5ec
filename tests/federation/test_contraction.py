"""Recursions that run side by side are those that run one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from expunge.core.vectors import Layout
from expunge.federation.training import response as responses
from expunge.federation.training.contraction import Contractions
from expunge.federation.training.recipe import SGD, Adam, AdamW, ClientRule, FedAvgM, Recipe, Scaled
from expunge.federation.training.response import Response
from expunge.federation.training.works import Round, Work

LAYOUT = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
GROUPS = (("0.weight", "0.bias"), ("1.weight",), ())
RULES = (
    SGD(),
    SGD(weight_decay=0.1),
    SGD(0.9, dampening=0.2),
    SGD(0.8, nesterov=True, proximal_mu=0.3),
    Adam(),
    AdamW(weight_decay=0.3),
    Adam(weight_decay=0.2, proximal_mu=0.1),
    Scaled(),
)


class Halving:
    """A rule of a user's own, which takes numbers: every step halves what is curved."""

    adaptive, name = True, "halving"

    def left(self, curvature: Tensor, rate: float, steps: float, moment: float = 0.0) -> Tensor:
        assert all(isinstance(number, float) for number in (rate, moment))
        return torch.where(curvature > 0, torch.full_like(curvature, 0.5**steps * rate / moment), 1.0)


def rounds(moments: int = 4) -> tuple[Round, ...]:
    """Unequal steps, some of them in part, two rates in a round, absent clients, a round of nobody, a repair."""
    chance = torch.Generator().manual_seed(0)
    found = []
    for number in range(6):
        works = [
            Work(share, rate, steps, tuple((0.3 + torch.rand(moments, generator=chance)).double().tolist()))
            for share, rate, steps in ((0.5, 0.05, 7 + number), (0.3, 0.02, 4.25), (0.2, 0.05, 0.0))
        ]
        found.append(Round(tuple(works[: 1 + number % 3]), plain=number == 5))
    return (*found[:2], Round(()), *found[2:])


def by_hand(rule: ClientRule, each: Round, curvature: Tensor, group: tuple[str, ...]) -> Tensor:
    """The mean over those who took part, one after another."""
    if not each.works:
        return torch.ones_like(curvature)
    squares = weight = 0.0
    for work in each.works:
        for moment, (name, shape) in zip(work.moments, LAYOUT.shapes, strict=True):
            if name in group or not group:
                squares, weight = squares + work.share * shape.numel() * moment**2, weight + work.share * shape.numel()
    moment, total = (squares / weight) ** 0.5, sum(work.share for work in each.works)
    lefts = [work.share / total * rule.left(curvature, work.learning_rate, work.steps, moment) for work in each.works]
    return torch.stack(lefts).sum(dim=0)


@pytest.mark.parametrize("rule", [*RULES, Halving()])
def test_side_by_side_is_one_by_one(rule: ClientRule) -> None:
    curvature = torch.tensor([[0.0, 0.1, 2.0, 30.0], [0.0, 0.4, 5.0, 0.2], [1.0, 0.0, 0.0, 90.0]]).double()
    found = Contractions(rule, rounds(), LAYOUT, GROUPS).of(curvature)
    for number, each in enumerate(rounds()):
        for group, own in enumerate(curvature):
            expected = by_hand(rule, each, own, GROUPS[group])
            torch.testing.assert_close(found[group, number], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_several_layers_at_once_are_each_on_its_own(rule: ClientRule, monkeypatch: pytest.MonkeyPatch) -> None:
    response = Response(Recipe(rule, FedAvgM(0.5, 0.6)), rounds(), LAYOUT)
    rows = torch.rand(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    many = torch.logspace(-6, 1, 2 * responses.GRID).view(2, -1)
    spectra = list(zip((many, torch.rand(3, 2), torch.zeros(1)), GROUPS, strict=True))
    alone = [response.left(curvature, rows, names) for curvature, names in spectra]
    for cells in (1, 1 << 14, 1 << 30):
        monkeypatch.setitem(responses.CELLS, "cpu", cells)
        for found, expected in zip(response.lefts(spectra, rows), alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
            assert all(each.shape == expected[0].shape for each in found)
    travels = response.travels(GROUPS)
    assert travels == pytest.approx([response.travel(names) for names in GROUPS], rel=1e-5)
    small = torch.tensor([1e-9], dtype=torch.float64)
    gains = [1.0 if each.plain else 0.5 / 0.4 for each in rounds()]
    for travel, names in zip(travels, GROUPS, strict=True):
        kept = [by_hand(rule, each, small * 0, names) - by_hand(rule, each, small, names) for each in rounds()]
        slope = sum(gain * float(own) / 1e-9 for gain, own in zip(gains, kept, strict=True))
        assert travel == pytest.approx(slope, rel=1e-4)


def test_in_double_precision_a_power_is_its_steps() -> None:
    curvature = torch.tensor([0.0, 1e-9, 0.3, 9.9, 19.9, 20.1], dtype=torch.float64)
    x = torch.ones_like(curvature)
    for _ in range(190):
        x = x - 0.1 * curvature * x
    x = torch.where(0.1 * curvature > 2, 0.0, 0.5 * x + 0.5 * (x - 0.1 * curvature * x))
    torch.testing.assert_close(SGD().left(curvature, 0.1, 190.5), x, rtol=1e-12, atol=1e-15)
