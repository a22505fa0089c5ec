"""Gradient ascent, plain and projected, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from expunge.core.vectors import Layout
from expunge.errors import ModelError, RequestError
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.gradient_ascent import GradientAscentOptions, gradient_ascent
from expunge.unlearning.projected_gradient_ascent import (
    ProjectedGradientAscentOptions,
    projected_gradient_ascent,
    random_distance,
)
from expunge.unlearning.registry import methods
from expunge.unlearning.request import Request
from unlearning.by_hand import assert_ends_at, averaged, engine_of, gradient, line, moved, trained

# At theta = (1, 2). ada: residual 3 - 1 = 2, gradient (2, 2). bob: residuals 1 and 5 - 3 = 2, gradients (1, 0) and
# (2, 4), mean (1.5, 2). cyd: residual 2 - 5 = -3, gradient (0, -3).
DATA = {"ada": [((1, 1), 1)], "bob": [((1, 0), 0), ((1, 2), 3)], "cyd": [((0, 1), 5)]}
ROOT = math.sqrt(2)


def climbed(request, **options):
    engine, state = engine_of(line(1, 2), DATA), trained(line(1, 2), DATA)
    return gradient_ascent(engine, state, request, GradientAscentOptions(**options))


class TestGradientAscent:
    def test_up_the_loss_of_the_leaver(self):
        """(1, 2) + 0.1 (2, 2) = (1.2, 2.2); there the residual is 2.4: + 0.1 (2.4, 2.4) = (1.44, 2.44)."""
        outcome = climbed(Request.of("ada"), epochs=2, max_norm=100)
        assert_ends_at(outcome, [1.44, 2.44])
        assert outcome.cost.sample_gradients == 2
        assert outcome.details["steps"] == {"ada": 2}
        assert outcome.details["distance"] == pytest.approx(0.44 * ROOT)

    def test_clipped(self):
        """Both gradients point along (1, 1) and are longer than 1: two steps of 0.1 (1, 1) / sqrt 2."""
        assert_ends_at(climbed(Request.of("ada"), epochs=2, max_norm=1), [1 + 0.2 / ROOT, 2 + 0.2 / ROOT])

    def test_a_short_gradient_is_left_as_it_is(self):
        assert_ends_at(climbed(Request.of("ada"), epochs=1, max_norm=2 * ROOT + 1e-9), [1.2, 2.2])

    def test_several_owners_by_how_much_they_hold(self):
        """ada moves by (0.2, 0.2), bob by (0.15, 0.2); 1 and 2 samples: (0.5 / 3, 0.6 / 3)."""
        assert_ends_at(climbed(Request.of(["ada", "bob"]), epochs=1, max_norm=100), [1 + 0.5 / 3, 2.2])

    def test_only_the_samples_to_forget(self):
        """bob's second sample alone has the gradient (2, 4)."""
        assert_ends_at(climbed(Request.of(samples={"bob": [1]}), epochs=1, max_norm=100), [1.2, 2.4])

    def test_one_owner_wholly_and_one_partly(self):
        """ada (0.2, 0.2) and one sample of bob (0.2, 0.4), a sample each: not bob's whole count."""
        assert_ends_at(climbed(Request.of("ada", samples={"bob": [1]}), epochs=1, max_norm=100), [1.2, 2.3])

    def test_defaults_are_the_papers(self):
        assert methods()["gradient-ascent"].options == GradientAscentOptions(epochs=10, max_norm=1.0)

    @pytest.mark.parametrize("bad", [{"max_norm": 0}, {"max_norm": -1}, {"max_norm": math.nan}, {"epochs": 0}])
    def test_nonsense_is_refused(self, bad):
        with pytest.raises(RequestError):
            GradientAscentOptions(**bad)


def projected(request=None, state=None, **options):
    engine, state = engine_of(line(1, 2), DATA), state or trained(line(1, 2), DATA)
    given = {"stop_accuracy": None, "recovery_rounds": 0, "radius": 100.0, "max_norm": 100.0, "ascent_epochs": 1}
    options = ProjectedGradientAscentOptions(**(given | options))
    return projected_gradient_ascent(engine, state, request or Request.of("ada"), options)


# ada trains to (1, 2) - 0.1 (2, 2); w = 1/4, so the mean of the others' models is (1, 2) + 1/3 (0.2, 0.2).
REFERENCE = [1 + 0.2 / 3, 2 + 0.2 / 3]


class TestProjectedGradientAscent:
    def test_from_the_mean_of_the_others(self):
        """The residual at the reference is 2 + 0.4 / 3; one step of 0.1 times that along (1, 1)."""
        residual = 2 + 0.4 / 3
        outcome = projected()
        assert_ends_at(outcome, moved(REFERENCE, [residual, residual], 0.1))
        assert outcome.cost.sample_gradients == 2  # a local epoch and an epoch of ascent
        assert outcome.cost.rounds == 2

    @pytest.mark.parametrize("epochs", [1, 3])
    def test_never_out_of_the_ball_around_the_reference(self, epochs):
        """The step of 0.3 is cut to the radius, 0.1 along (1, 1) / sqrt 2, and so are all that follow."""
        outcome = projected(radius=0.1, ascent_epochs=epochs)
        assert_ends_at(outcome, moved(REFERENCE, [1 / ROOT, 1 / ROOT], 0.1))
        assert outcome.details["radius"] == 0.1
        assert outcome.details["distance_from_the_reference"] == pytest.approx(0.1)

    def test_clipped(self):
        assert_ends_at(projected(max_norm=1.0), moved(REFERENCE, [1 / ROOT, 1 / ROOT], 0.1))

    def test_several_owners(self):
        """ada and bob hold 3 of 4 samples: the reference lies at theta - (1 (-0.2, -0.2) + 2 (-0.15, -0.2)) / 1."""
        reference = [1.5, 2.6]
        climbs = [gradient(reference, DATA[name]) for name in ("ada", "bob")]
        assert_ends_at(projected(Request.of(["ada", "bob"])), moved(reference, averaged(climbs, [1, 2]), 0.1))

    def test_samples_are_a_client_of_their_own(self):
        """One sample of bob's, gradient (2, 4): w = 1/4 again, and its other sample is not touched."""
        reference = [1 + 0.2 / 3, 2 + 0.4 / 3]
        outcome = projected(Request.of(samples={"bob": [1]}))
        assert_ends_at(outcome, moved(reference, gradient(reference, [DATA["bob"][1]]), 0.1))

    def test_recovery_by_the_clients_that_stay(self):
        """From the edge of the ball a round of bob and cyd, who hold 2 and 1 samples."""
        start = moved(REFERENCE, [1 / ROOT, 1 / ROOT], 0.1)
        pull = averaged([gradient(start, DATA["bob"]), gradient(start, DATA["cyd"])], [2, 1])
        outcome = projected(radius=0.1, recovery_rounds=1)
        assert_ends_at(outcome, moved(start, pull, -0.1))
        assert outcome.cost.sample_gradients == 2 + 3
        assert outcome.memory.rounds == 2

    def test_the_leavers_local_round_is_as_long_as_the_trainings(self):
        """Two full-batch steps: (1, 2) -> (0.8, 1.8), residual 1.6 -> (0.64, 1.64): a third of 0.36 away."""
        state = trained(line(1, 2), DATA)
        longer = ServerState(state.model, state.schedule.__class__(0.1, 2, 1, 100, epochs=2), state.memory)
        reference = [1.12, 2.12]
        residual = 3.24 - 1
        assert_ends_at(projected(state=longer), moved(reference, [residual, residual], 0.1))
        assert_ends_at(projected(local_epochs=2), moved(reference, [residual, residual], 0.1))

    def test_the_radius_is_a_third_of_the_distance_to_random_models(self):
        """Of two entries a shuffle swaps some: a distance of |a - b| sqrt 2, else 0; in between lies the mean."""
        radius = projected(radius=None).details["radius"]
        assert 0 < 3 * radius < ROOT
        reference = torch.tensor(REFERENCE, dtype=torch.float64)
        assert 3 * radius == pytest.approx(random_distance(reference, Layout.of(line(1, 2)), seed=0))

    def test_nonsense_is_refused(self):
        for bad in ({"radius": 0.0}, {"max_norm": -1.0}, {"ascent_epochs": 0}, {"recovery_rounds": -1}):
            with pytest.raises(RequestError):
                ProjectedGradientAscentOptions(**bad)
        with pytest.raises(RequestError, match="stop_accuracy=None"):
            projected(stop_accuracy=0.12)
        state = trained(line(1, 2), DATA)
        bare = ServerState(state.model.__class__(state.model.parameters, {}), state.schedule, state.memory)
        with pytest.raises(ModelError, match="layer by layer"):
            projected(state=bare)


class TestRandomModels:
    def test_as_far_as_independent_weights_of_the_same_size(self):
        """E ||a - shuffled a||^2 = 2 n var(a), layer by layer."""
        layout = Layout.of(nn.Sequential(nn.Linear(100, 50, bias=False), nn.Linear(50, 100, bias=False)))
        chance = torch.Generator().manual_seed(0)
        theta = torch.randn(10_000, generator=chance, dtype=torch.float64)
        theta[5000:] *= 3
        expected = math.sqrt(2 * 5000 * 1 + 2 * 5000 * 9)
        assert random_distance(theta, layout, seed=0) == pytest.approx(expected, rel=0.02)

    def test_layers_are_not_mixed(self):
        layout = Layout.of(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
        theta = torch.cat([torch.full((16,), 1.0), torch.full((16,), -5.0)])
        assert random_distance(theta, layout, seed=0) == 0
