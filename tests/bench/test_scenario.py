import dataclasses

import pytest
import torch

from expunge.bench.cells import RetrainedCell, TrainedCell
from expunge.bench.scenario import Scenario
from expunge.bench.settings import Forget
from expunge.bench.store import described, digest
from expunge.data import Backdoor, Mislabelling
from expunge.errors import RequestError

ATTACKED = Scenario(backdoors={"client-1": Backdoor(size=3)})
SPOILED = Scenario(mislabelled={"client-1": Mislabelling(share=0.4, boost=3.0)})
GONE = Forget(("client-1",))


def test_scenarios_without_wrong_labels_are_written_as_they_always_were():
    """Kept models and committed results are found by what was written."""
    assert "mislabelled" not in ATTACKED.as_dict()
    assert digest(TrainedCell(ATTACKED), "cpu") == "9f79dbad94112530"
    assert digest(RetrainedCell(ATTACKED, GONE, 0), "cpu") == "ee0e969bf15cceea"
    assert Scenario.from_dict(ATTACKED.as_dict()) == ATTACKED


def test_wrong_labels_come_back_from_json_and_make_another_cell():
    assert Scenario.from_dict(SPOILED.as_dict()) == SPOILED
    assert described(TrainedCell(SPOILED))["scenario"]["mislabelled"] == {"client-1": {"share": 0.4, "boost": 3.0}}
    assert digest(TrainedCell(SPOILED), "cpu") != digest(TrainedCell(Scenario()), "cpu")


def test_only_labels_of_the_client_change_and_its_update_is_boosted():
    clean, spoiled = Scenario().build(), SPOILED.build()
    for name in clean.datasets:
        (inputs, labels), (same, others) = clean.datasets[name], spoiled.datasets[name]
        assert torch.equal(inputs, same)
        share = float((labels != others).double().mean())
        assert share == pytest.approx(0.4 if name == "client-1" else 0.0, abs=0.01)
    assert spoiled.boosts() == {"client-1": 3.0}
    assert not spoiled.triggered["client-1"].any()


def test_whole_clients_that_leave_take_their_labels_along():
    """So that models are retrained once for every deed of the leaver."""
    assert RetrainedCell(SPOILED, GONE, 0) == RetrainedCell(ATTACKED, GONE, 0) == RetrainedCell(Scenario(), GONE, 0)
    other = RetrainedCell(SPOILED, Forget(("client-2",)), 0)
    assert list(other.scenario.mislabelled) == ["client-1"]


@pytest.mark.parametrize("scenario", [Scenario(), ATTACKED])
def test_wrong_labels_are_for_clients_that_are_there_and_no_attackers(scenario):
    name = "client-1" if scenario.backdoors else "client-9"
    with pytest.raises(RequestError, match=f"without a backdoor, not '{name}'"):
        dataclasses.replace(scenario, mislabelled={name: Mislabelling()})
