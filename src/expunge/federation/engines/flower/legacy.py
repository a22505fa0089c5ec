"""A strategy of Flower's old server API (``flwr.server.strategy``) as one of today's, for a Recorder to wrap."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import Code, EvaluateIns, FitIns, Parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.app_utils import start_update_client_manager_thread
from flwr.server.strategy import FedAvgM
from flwr.server.strategy import Strategy as Legacy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

_log = logging.getLogger("flwr")


class Modern(Strategy):
    """An old strategy, its rounds as in Flower's own workflow for such strategies (flwr 1.41, ``DefaultWorkflow``).

    The clients are old ones, too: made of a client function, they get ``FitIns`` and reply with ``FitRes``.

    Args:
        legacy: the strategy; its initial parameters are left aside for the arrays that ``start`` is given.
    """

    weighted_by_key = "num_examples"

    def __init__(self, legacy: Legacy) -> None:
        self.legacy = legacy
        self._clients = SimpleClientManager()
        self._names: list[str] = []
        self._asked: dict[int, ClientProxy] = {}

    def summary(self) -> None:
        """What it says of itself."""
        _log.info("\t└──> %s", self.legacy)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *arguments: Any, **named: Any) -> Result:
        """As ever, with the strategy's own central evaluation; the client manager learns who comes and goes."""
        self._clients = SimpleClientManager()
        thread, stop, ready = start_update_client_manager_thread(grid, self._clients)
        ready.wait()
        try:
            given = self.legacy.initialize_parameters(self._clients)
            if given is not None and given.tensors != _parameters(initial_arrays).tensors:
                _log.warning("expunge: the strategy's initial parameters are left aside for the arrays given to start.")
            if isinstance(self.legacy, FedAvgM):  # it moves on from these
                self.legacy.initial_parameters = _parameters(initial_arrays)
            return super().start(grid, initial_arrays, *arguments, **{"evaluate_fn": self._evaluate, **named})
        finally:
            stop.set()
            thread.join()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's instructions to fit."""
        del grid  # the client manager has it
        self._names = list(arrays)
        asked = self.legacy.configure_fit(server_round, _parameters(arrays), self._clients)
        instructions = [(proxy, FitIns(ins.parameters, _merged(config, ins.config))) for proxy, ins in asked]
        contents = [(proxy, compat.fitins_to_recorddict(ins, keep_input=True)) for proxy, ins in instructions]
        return self._messages(contents, MessageType.TRAIN, server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's aggregate, under the names of the arrays that were sent."""
        results, failures = self._parted(replies, lambda content: compat.recorddict_to_fitres(content, keep_input=True))
        parameters, metrics = self.legacy.aggregate_fit(server_round, results, failures)
        if parameters is None:
            return None, None
        arrays = map(Array, parameters_to_ndarrays(parameters))
        return ArrayRecord(dict(zip(self._names, arrays, strict=True))), _numbers(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's instructions to evaluate."""
        del grid  # the client manager has it
        asked = self.legacy.configure_evaluate(server_round, _parameters(arrays), self._clients)
        instructions = [(proxy, EvaluateIns(ins.parameters, _merged(config, ins.config))) for proxy, ins in asked]
        contents = [(proxy, compat.evaluateins_to_recorddict(ins, keep_input=True)) for proxy, ins in instructions]
        return self._messages(contents, MessageType.EVALUATE, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The strategy's loss, and its metrics that are numbers."""
        results, failures = self._parted(replies, compat.recorddict_to_evaluateres)
        loss, metrics = self.legacy.aggregate_evaluate(server_round, results, failures)
        return None if loss is None else _numbers({"loss": loss, **metrics})

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        found = self.legacy.evaluate(server_round, _parameters(arrays))
        return None if found is None else _numbers({"loss": found[0], **found[1]})

    def _messages(self, contents: list[tuple[ClientProxy, RecordDict]], kind: str, number: int) -> list[Message]:
        self._asked = {proxy.node_id: proxy for proxy, _ in contents}
        return [Message(content, proxy.node_id, kind, group_id=str(number)) for proxy, content in contents]

    def _parted(
        self, replies: Iterable[Message], read: Callable[[RecordDict], Any]
    ) -> tuple[list[tuple[ClientProxy, Any]], list[Any]]:
        """Results and failures."""
        results, failures = list[tuple[ClientProxy, Any]](), list[Any]()
        for reply in replies:
            if not reply.has_content():
                failures.append(Exception(reply.error))
                continue
            answer = (self._asked[reply.metadata.src_node_id], read(reply.content))
            (results if answer[1].status.code == Code.OK else failures).append(answer)
        return results, failures


def declined(content: RecordDict) -> bool:
    """Whether an old client says in its reply that it did not train."""
    status = content.config_records.get("fitres.status")
    return status is not None and status.get("code") != Code.OK.value


def _parameters(arrays: ArrayRecord) -> Parameters:
    return compat.arrayrecord_to_parameters(arrays, keep_input=True)


def _merged(given: ConfigRecord, own: Mapping[str, Any]) -> dict[str, Any]:
    """What ``start`` was given for all, under what the strategy has for this one."""
    return {**given, **own}


def _numbers(metrics: Mapping[str, Any]) -> MetricRecord:
    """The metrics that today's records can hold."""
    return MetricRecord({name: value for name, value in metrics.items() if type(value) in (int, float)})
