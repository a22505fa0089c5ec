import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge.auditing.functional import predict
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError
from expunge.models.ensemble import Ensemble, joined
from federation.small import linear, mlp, norm_net, samples


def sure_of(*probabilities: float) -> Snapshot:
    """A model of one input that always answers with these probabilities."""
    model = nn.Linear(1, len(probabilities)).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor(probabilities).log() + 3.0)  # logits are known up to a constant
    return Snapshot.of(model)


def test_the_answer_is_the_mean_of_the_probabilities() -> None:
    # Mean of (0.9, 0.1), (0.4, 0.6), (0.4, 0.6): (1.7, 1.3) / 3. Two of three would vote for the other class.
    members = [sure_of(0.9, 0.1), sure_of(0.4, 0.6), sure_of(0.4, 0.6)]
    ensemble = Ensemble(nn.Linear(1, 2).double(), count=3)
    joined(members).write_to(ensemble)
    answer = ensemble(torch.zeros(1, 1, dtype=torch.float64))
    expected = torch.tensor([[1.7 / 3, 1.3 / 3]], dtype=torch.float64)
    torch.testing.assert_close(answer.exp(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(answer.softmax(dim=1), expected, rtol=1e-6, atol=0)
    assert answer.argmax().item() == 0
    assert cross_entropy(answer, torch.tensor([1])).item() == pytest.approx(-math.log(1.3 / 3), rel=1e-6)


def test_very_sure_members_stay_finite() -> None:
    ensemble = Ensemble(nn.Linear(1, 2), count=2)
    with torch.no_grad():
        for member, bias in zip(ensemble.members, (1e4, -1e4), strict=True):
            member.weight.zero_()
            member.bias.copy_(torch.tensor([bias, 0.0]))
    torch.testing.assert_close(ensemble(torch.zeros(1, 1)), torch.tensor([[0.5, 0.5]]).log())


@pytest.mark.parametrize("build", [linear, mlp, norm_net])
def test_the_layout_is_the_members_one_after_another(build) -> None:
    members = [Snapshot.of(build(seed)) for seed in (1, 2, 3)]
    together, ensemble = joined(members), Ensemble(build(), count=3)
    assert together.layout == Layout.of(ensemble)
    assert torch.equal(together.parameters, torch.cat([member.parameters for member in members]))
    assert set(together.buffers) == {name for name, _ in ensemble.named_buffers()}
    together.write_to(ensemble)
    assert Snapshot.of(ensemble).digest == together.digest
    for own, member in zip(ensemble.members, members, strict=True):
        assert Snapshot.of(own).digest == member.digest


def test_it_predicts_as_any_model_does() -> None:
    members = [Snapshot.of(norm_net(seed)) for seed in (1, 2)]
    inputs, _ = samples(7)
    found = predict(Ensemble(norm_net(), count=2), joined(members), inputs)
    each = [predict(norm_net(), member, inputs).softmax(dim=1) for member in members]
    torch.testing.assert_close(found.exp(), (each[0] + each[1]) / 2)


def test_gradients_reach_every_member_as_the_chain_rule_says() -> None:
    ensemble = Ensemble(mlp(), count=2)
    joined([Snapshot.of(mlp(1)), Snapshot.of(mlp(2))]).write_to(ensemble)
    inputs, labels = samples(5)
    cross_entropy(ensemble(inputs), labels).backward()
    means = sum(member(inputs).softmax(dim=1) for member in ensemble.members) / 2
    by_hand = -means[range(5), labels].log().mean()
    expected = torch.autograd.grad(by_hand, list(ensemble.parameters()))
    for parameter, gradient in zip(ensemble.parameters(), expected, strict=True):
        assert parameter.grad.abs().sum() > 0
        torch.testing.assert_close(parameter.grad, gradient)


def test_members_are_copies() -> None:
    model = linear()
    ensemble = Ensemble(model, count=2)
    with torch.no_grad():
        next(ensemble.members[0].parameters()).zero_()
    assert next(model.parameters()).abs().sum() > 0
    assert next(ensemble.members[1].parameters()).abs().sum() > 0


def test_nobody_is_refused() -> None:
    with pytest.raises(ModelError, match="at least 1 member"):
        Ensemble(linear(), count=0)
    with pytest.raises(ModelError, match="at least 1 member"):
        joined([])
