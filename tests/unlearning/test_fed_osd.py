"""FedOSD against numbers worked out by hand: bounded loss, orthogonal direction, recovery that does not walk back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import RequestError
from expunge.unlearning.fed_osd import FedOsdOptions, fed_osd, orthogonal_direction
from expunge.unlearning.request import Request
from unlearning.by_hand import assert_ends_at, averaged, dot, engine_of, gradient, line, moved, trained

# At theta = (1, 1, 1). ada: residual 6 - 5.5 = 0.5, so l = 1/8. bob: residuals 1 and 2, mean gradient (0.5, 1, 0).
# cyd: residual 1, gradient (0, 1, 1). Orthogonal to both is their cross product (1, -0.5, 0.5).
DATA = {"ada": [((3, 1, 2), 5.5)], "bob": [((1, 0, 0), 0), ((0, 1, 0), -1)], "cyd": [((0, 1, 1), 1)]}
START = [1.0, 1.0, 1.0]
NORMAL = [1.0, -0.5, 0.5]


def run(request=None, data=DATA, start=START, **options):
    engine, state = engine_of(line(*start), data), trained(line(*start), data)
    return fed_osd(engine, state, request or Request.of("ada"), FedOsdOptions(**options))


def away_from(theta, own):
    """Down -log(1 - e^-l / 2) at 0.1, for one sample: its slope in l is -e^-l / (2 - e^-l)."""
    ((x, y),) = own
    residual = dot(theta, x) - y
    share = math.exp(-(residual**2) / 2)
    return [0.1 * share / (2 - share) * residual * value for value in x]


def unlearned():
    """(3, 1, 2) . (1, -0.5, 0.5) > 0: along the normal, as long as ada's own update."""
    wanted = away_from(START, DATA["ada"])
    length = math.sqrt(dot(wanted, wanted))
    return [length * value / math.sqrt(1.5) for value in NORMAL]


def test_one_unlearning_round():
    outcome = run(unlearning_rounds=1, recovery_rounds=0)
    assert_ends_at(outcome, moved(START, unlearned()))
    assert outcome.cost.sample_gradients == 4
    assert outcome.cost.rounds == 1
    assert outcome.details["orthogonal_share"] == [pytest.approx(3.5 / math.sqrt(1.5 * 14))]
    assert outcome.warnings == ()


def test_the_second_round_starts_where_the_first_ended():
    """Its step is orthogonal to the retained gradients there, and as long as ada's update there."""
    middle = moved(START, unlearned())
    outcome = run(unlearning_rounds=2, recovery_rounds=0)
    step = [a - b for a, b in zip(outcome.state.model.parameters.tolist(), middle, strict=True)]
    wanted = away_from(middle, DATA["ada"])
    assert dot(step, wanted) > 0
    assert dot(step, step) == pytest.approx(dot(wanted, wanted), rel=1e-10)
    for name in ("bob", "cyd"):
        assert abs(dot(step, gradient(middle, DATA[name]))) < 1e-12


def test_recovery_without_a_way_back():
    """Each update loses its part along what was walked and keeps its length."""
    walked = unlearned()
    now = moved(START, walked)
    updates, shares = [], []
    for name in ("bob", "cyd"):
        update = [-0.1 * value for value in gradient(now, DATA[name])]
        along = dot(update, walked) / dot(walked, walked)
        rest = moved(update, walked, -along)
        scale = math.sqrt(dot(update, update) / dot(rest, rest))
        updates.append([scale * value for value in rest])
        shares.append(along)
    assert min(shares) < -1e-3  # there is something to take away
    outcome = run(unlearning_rounds=1, recovery_rounds=1)
    assert_ends_at(outcome, moved(now, averaged(updates, [2, 1])))
    back = [a - b for a, b in zip(outcome.state.model.parameters.tolist(), now, strict=True)]
    assert abs(dot(back, walked)) < 1e-14
    assert outcome.memory.rounds == 2
    assert outcome.cost.sample_gradients == 4 + 3


def test_several_owners_by_how_much_they_hold():
    """ada's sample and two alike of dan's: weights 1/3 and 2/3 before the projection."""
    data = {**DATA, "dan": [((1, 0, 1), 1.5)] * 2}
    wanted = averaged([away_from(START, data["ada"]), away_from(START, data["dan"][:1])], [1, 2])
    length = math.sqrt(dot(wanted, wanted))
    assert dot(wanted, NORMAL) > 0
    outcome = run(Request.of(["ada", "dan"]), data, unlearning_rounds=1, recovery_rounds=0)
    assert_ends_at(outcome, moved(START, [length * value / math.sqrt(1.5) for value in NORMAL]))


def test_a_client_that_forgets_some_samples_is_both():
    """dan loses his first sample and retains the second, (0, 2, 0) with residual 1: all of ada's and his first's
    pull goes; what is left is orthogonal to (0.5, 1, 0), (0, 1, 1) and (0, 2, 0): nothing."""
    data = {**DATA, "dan": [((1, 0, 1), 1.5), ((0, 2, 0), 1)]}
    outcome = run(Request.of("ada", samples={"dan": [0]}), data, unlearning_rounds=1, recovery_rounds=0)
    assert_ends_at(outcome, START)
    assert outcome.cost.sample_gradients == 2 + 1 + 1 + 1 + 1  # bob 2, cyd 1, dan 1; ada 1, dan 1
    assert any("no direction was left" in sentence for sentence in outcome.warnings)


def test_where_the_retained_clients_feel_everything_no_step_is_made():
    """Two parameters, two independent retained gradients."""
    data = {"ada": [((1, 1), 1)], "bob": [((1, 0), 0)], "cyd": [((0, 1), 5)]}
    outcome = run(data=data, start=[1.0, 2.0], unlearning_rounds=2, recovery_rounds=0)
    assert_ends_at(outcome, [1, 2])
    assert outcome.details["orthogonal_share"] == [0.0, 0.0]
    assert "no direction was left" in outcome.warnings[0]


def test_nonsense_is_refused():
    for bad in ({"unlearning_rounds": 0}, {"recovery_rounds": -1}, {"epochs": 0}):
        with pytest.raises(RequestError):
            FedOsdOptions(**bad)


class TestOrthogonalDirection:
    @settings(deadline=None)
    @given(st.integers(0, 1000), st.integers(1, 6))
    def test_against_the_pseudo_inverse(self, seed, count):
        """d = c - A' (A A')^+ A c, at the length of c; the last row repeats the first."""
        chance = torch.Generator().manual_seed(seed)
        rows = torch.randn(count, 9, generator=chance, dtype=torch.float64)
        rows = torch.cat([rows, 2 * rows[:1]])
        wanted = torch.randn(9, generator=chance, dtype=torch.float64)
        rest = wanted - rows.T @ torch.linalg.pinv(rows @ rows.T, hermitian=True, rtol=1e-12) @ (rows @ wanted)
        direction, share = orthogonal_direction(wanted, list(rows))
        torch.testing.assert_close(direction, rest * (wanted.norm() / rest.norm()), rtol=1e-6, atol=1e-8)
        assert share == pytest.approx(float(rest.norm() / wanted.norm()), rel=1e-6)

    def test_zero_others_are_passed_over(self):
        direction, share = orthogonal_direction(torch.tensor([1.0, 2.0]), [torch.zeros(2)])
        assert direction.tolist() == [1.0, 2.0]
        assert share == 1.0
