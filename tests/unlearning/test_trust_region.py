"""How much a step may cost those who stay: tau, and what its own curvature says, under a cap."""

import math

import pytest

from expunge.unlearning.lengths import LENGTHS
from expunge.unlearning.retained import Retained
from expunge.unlearning.trust_region import CAP, Bounds, take
from unlearning.test_kronecker_filter import LEAVER, many


@pytest.mark.parametrize(
    ("tau", "expected", "allowed"),
    [(0.1, 0.2, 0.3), (0.1, 0.4, 0.5), (0.1, 9.0, 0.5), (0.1, -3.0, 0.1), (0.0, 9.0, 0.0), (0.1, math.inf, 0.5)],
)
def test_what_is_expected_is_allowed_as_far_as_the_cap(tau, expected, allowed):
    assert Bounds(tau, LENGTHS, {"response": expected}).allowed("response") == pytest.approx(allowed)
    assert Bounds(tau, LENGTHS).allowed("response") == tau


def test_the_longest_step_within_what_is_allowed_is_taken():
    federation, state = many(copies=10)
    engine, step = federation.engine(), state.memory.influence(["client-0"])
    parties = LEAVER.parties(engine.clients())
    stay = Retained(engine, parties.retained, parties.counts)
    rises = dict(zip(LENGTHS, stay.losses(state.model, step, (0.0, *LENGTHS)).rises[1:], strict=True))

    def length(tau: float, expected: float) -> float | None:
        return take(stay, state.model, {"response": step}, Bounds(tau, LENGTHS, {"response": expected}), None).length

    for longest in LENGTHS[:6]:
        tau = 1.001 * rises[longest] / (1 + CAP)
        assert length(tau, 1e9) == longest  # whoever lies about curvature gains no more than the cap
        assert length(tau, CAP * tau / 2) == next(t for t in LENGTHS if rises[t] <= tau * (1 + CAP / 2))
        assert length(tau, 0.0) == next(t for t in LENGTHS if rises[t] <= tau)
