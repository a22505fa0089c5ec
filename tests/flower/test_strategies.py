"""Strategies as people have them inside a Recorder: with a loop of their own, of the old API, under SecAgg+."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common import Code, Status, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server import strategy as old
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore.run import RunNotRunningException

from expunge.errors import RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import forget
from federation.small import mlp
from flower.training import OldClient, federation, kept, legacy_federation, ours, recorder, same, start


class Saving(FedAvg):
    """As in Flower's examples: it saves and evaluates around the rounds, in a ``start`` of its own."""

    returned = -1  # which of the saved models it gives back

    def start(self, grid, initial_arrays, num_rounds=3, note=""):
        self.saved, self.note, result = [initial_arrays], note, Result()
        for number in range(1, num_rounds + 1):
            asked = self.configure_train(number, self.saved[-1], ConfigRecord(), grid)
            arrays, _ = self.aggregate_train(number, grid.send_and_receive(asked))
            self.saved.append(arrays)
            result.evaluate_metrics_serverapp[number] = MetricRecord({"saved": len(self.saved)})
        result.arrays = self.saved[self.returned]
        return result


def said(caplog) -> list[str]:
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [warning for warning in warnings if warning.startswith("expunge")]


def test_what_a_strategy_does_in_its_own_start_is_done_and_the_rounds_are_recorded(tmp_path, caplog):
    strategy = Saving()
    result = start(federation(), recorder(tmp_path / "store", strategy), note="mine")
    same(kept(tmp_path / "store"), ours())
    assert (strategy.note, len(strategy.saved)) == ("mine", 4)
    assert result.evaluate_metrics_serverapp[3]["saved"] == 4
    assert said(caplog) == []
    assert not {"configure_train", "aggregate_train"} & set(vars(strategy))  # it is as it was


def test_a_start_that_ends_with_another_model_than_the_recorded_one_is_told(tmp_path, caplog):
    class Best(Saving):
        returned = 1

    start(federation(), recorder(tmp_path / "store", Best()))
    (sentence,) = said(caplog)
    assert sentence.startswith("expunge: the model that Best.start returned is not that of the last recorded round")


def test_a_start_that_trains_past_the_recorder_is_told(tmp_path, caplog):
    class Past(Saving):
        def configure_train(self, *arguments):
            raise AssertionError("not called")

        def start(self, grid, initial_arrays, num_rounds=3):
            return FedAvg(fraction_evaluate=0.0).start(grid, initial_arrays, num_rounds)

    start(federation(), recorder(tmp_path / "store", Past()))
    assert not (tmp_path / "store").exists()
    assert said(caplog)[0].startswith("expunge: the model that Past.start returned is not that of the last recorded")


def test_that_a_second_run_goes_on_is_said(tmp_path, caplog):
    start(federation(), recorder(tmp_path / "store"), rounds=2)
    assert said(caplog) == []
    recorder(tmp_path / "store")
    folder = tmp_path / "store"
    assert said(caplog) == [
        f"expunge: the training goes on from the model in {folder}, after 2 rounds; a new folder begins anew."
    ]


def numbered(number: int) -> dict[str, int]:
    """What an old strategy sends with a round."""
    return {"server-round": number}


def test_an_old_strategy_with_old_clients_is_recorded(tmp_path):
    """Its hooks run: config functions, metrics, central evaluation."""
    seen: list[int] = []

    def evaluated(number, arrays, config):
        seen.append(number)
        return float(sum(np.abs(array).sum() for array in arrays)), {"accuracy": 0.25, "note": "no number"}

    strategy = old.FedAvg(
        on_fit_config_fn=numbered,
        evaluate_fn=evaluated,
        fit_metrics_aggregation_fn=lambda found: {"sites": len(found)},
        evaluate_metrics_aggregation_fn=lambda found: {"reached": sum(each["reached"] for _, each in found)},
    )
    result = start(legacy_federation(), recorder(tmp_path / "store", strategy))
    same(kept(tmp_path / "store"), ours())
    assert seen == [0, 1, 2, 3]
    assert result.evaluate_metrics_serverapp[3]["accuracy"] == 0.25
    assert result.train_metrics_clientapp[1] == {"sites": 3}
    assert result.evaluate_metrics_clientapp[2] == {"loss": 0.5, "reached": 3.0}
    own = mlp()
    own.load_state_dict(result.arrays.to_torch_state_dict())  # under the model's own names
    assert forget(legacy_federation(), "bob", store=tmp_path / "store", model=mlp()).succeeded


def test_config_given_to_start_reaches_old_clients(tmp_path):
    strategy = old.FedAvg(fraction_evaluate=0.0)
    start(legacy_federation(), recorder(tmp_path / "store", strategy), rounds=1, train_config=ConfigRecord(numbered(1)))
    assert kept(tmp_path / "store").schedule.rounds == 1


def test_an_old_strategys_share_of_clients_and_its_initial_parameters(tmp_path, caplog):
    zeros = ndarrays_to_parameters([np.zeros_like(tensor.numpy()) for tensor in mlp().state_dict().values()])
    strategy = old.FedAvg(fraction_fit=0.7, fraction_evaluate=0.0, on_fit_config_fn=numbered, initial_parameters=zeros)
    start(legacy_federation(), recorder(tmp_path / "store", strategy), rounds=2)
    assert said(caplog) == ["expunge: the strategy's initial parameters are left aside for the arrays given to start."]
    counts = StateStore(tmp_path / "store").book.counts
    assert 2 <= len(counts) <= 3


def test_an_old_client_that_declines_has_no_part(tmp_path, monkeypatch):
    trained = OldClient.to_client

    def declining(self):
        client = trained(self)
        fit = client.fit

        def fitted(ins):
            reply = fit(ins)
            reply.status = Status(Code.FIT_NOT_IMPLEMENTED, "busy")
            return reply

        if self.site.name == "bob":
            client.fit = fitted
        return client

    monkeypatch.setattr(OldClient, "to_client", declining)
    strategy = old.FedAvg(fraction_evaluate=0.0, on_fit_config_fn=numbered)
    start(legacy_federation(), recorder(tmp_path / "store", strategy), rounds=1)
    assert kept(tmp_path / "store").memory.clients == ("ada", "cyd")


@pytest.mark.parametrize("kind", [old.FedMedian, old.FedTrimmedAvg])
def test_an_old_strategy_that_does_not_average_is_refused_by_its_name(tmp_path, kind):
    strategy = kind(fraction_evaluate=0.0, on_fit_config_fn=numbered)
    with pytest.raises(RequestError, match=f"^{kind.__name__} does not take the plain weighted mean"):
        start(legacy_federation(), recorder(tmp_path / "store", strategy))


@pytest.mark.parametrize(
    "fit", [None, SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)], ids=["", "secagg"]
)
def test_old_workflows_and_secagg_say_what_to_do(tmp_path, fit):
    grid = legacy_federation()
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=1), recorder(tmp_path / "store")
    )
    with pytest.raises(RequestError, match=r"call recorder\.start.*under SecAgg\+ no site's own update is seen"):
        DefaultWorkflow(fit_workflow=fit)(grid, context)

    def ended() -> list[int]:
        raise RunNotRunningException

    grid.get_node_ids = ended  # so does the thread that the workflow leaves behind


def test_what_is_no_strategy_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"wraps a strategy of flwr\.serverapp\.strategy or flwr\.server\.strategy"):
        recorder(tmp_path / "store", FedAvg)
