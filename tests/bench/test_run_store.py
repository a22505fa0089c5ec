"""A run folder under deletion requests: one folder, one book, and nothing of the leaver in it afterwards."""

import dataclasses
import json
import os

import pytest
import torch

from expunge.bench.run_folder import RunFolder
from expunge.bench.run_store import FILE, RunStore
from expunge.bench.scenario import Scenario
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.book import Book
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.ledger.federation import Federation
from expunge.ledger.ledger import Ledger
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from killing import killed
from traces import Traces, remembering

SCENARIO = Scenario(
    model="softmax", clients=3, plan=TrainingPlan(rounds=2, epochs=1, batch_size=64, learning_rate=0.1, seed=2), seed=2
)
WORK = ("--method", "fine-tuning", "--override", "a test needs no audit")


@pytest.fixture(scope="module")
def built():
    return SCENARIO.build()


@pytest.fixture
def run(built, tmp_path, monkeypatch):
    """A run with a try for another client in it, a ledger, and a request."""
    state = train(built.engine(), built.initial(), SCENARIO.plan)
    run = RunFolder.create(tmp_path / "run", built, state)
    outcome = method("fine-tuning")(built.engine(), state, Request.of("client-0"))
    run.save(Request.of("client-0"), outcome, built)
    (run.path / "federation.py").write_text(FILE)
    Ledger.create(run.path / "ledger")
    monkeypatch.chdir(run.path)
    return RunFolder.open(run.path)


def asked(expunge, *words):
    code, out, said = expunge("request", *words)
    assert code == 0, said
    return out


def test_from_a_request_to_a_receipt(run, built, expunge):
    start, state = built.initial().parameters, run.trained(built)
    gone = remembering(state, ["client-1"])
    found = Traces(gone, start).kinds_in(run.path)
    assert found == {"model.safetensors", "memory.safetensors", "vectors", "checkpoints.safetensors"}
    asked(expunge, "add", "--client", "client-1", "--checked-by", "the clerk")
    asked(expunge, "run", "R-0001", *WORK)
    asked(expunge, "close", "R-0001", "--told-all")
    papers = ("ledger/receipts/R-0001.intoto.jsonl", "--key", "ledger/key.pub", "--log", "ledger/log.jsonl")
    assert expunge("receipt", "verify", *papers)[0] == 0
    after = RunFolder.open(run.path)
    assert after.departed == ("client-1",)
    assert set(after.book.counts) == {"client-0", "client-2"}
    assert after.requests() == {}, "all that was tried remembers, too"
    step = state.model.parameters - after.trained(built).model.parameters
    assert not Traces([*gone, step, -step], start).found_in(run.path)
    assert expunge("forget", ".", "--client", "client-1")[0] == 1
    assert expunge("forget", ".", "--client", "client-0")[0] == 0


def test_who_left_the_run_cannot_be_asked_for_and_the_other_way_round(run, built, expunge):
    outcome = method("fine-tuning")(built.engine(), run.trained(built), Request.of("client-2"))
    run.erase(Request.of("client-2"), outcome, built)
    asked(expunge, "add", "--client", "client-2", "--checked-by", "the clerk")
    code, _, said = expunge("request", "run")
    assert code == 1
    assert "has left already" in said


def test_it_trains_as_the_run_was_trained(run, built):
    """The same weights from the same seed, so that a model that is retrained for an audit is one of the run's."""
    before = run.trained(built).model.parameters
    Federation.load(run.path / "federation.py").train()
    after = RunFolder.open(run.path)
    assert torch.equal(after.trained(built).model.parameters, before)
    assert after.requests() == {}


def test_nothing_is_erased_from_under_a_request(run, built):
    store = RunStore(run.path)
    store.write(dataclasses.replace(store.book, pending={"requests": ["R-0001"]}))
    again = RunFolder.open(run.path)
    outcome = method("fine-tuning")(built.engine(), again.trained(built), Request.of("client-1"))
    with pytest.raises(RequestError, match="A request is being worked on"):
        again.erase(Request.of("client-1"), outcome, built)
    assert RunStore(run.path).book.pending == {"requests": ["R-0001"]}


def test_killed_before_any_file_operation_it_is_the_old_run_or_the_new_one(run, built):
    outcome = method("fine-tuning")(built.engine(), run.trained(built), Request.of("client-1"))
    old, new = run.trained(built).model.digest, outcome.state.model.digest
    number = seen = 0
    os.rename(run.path, run.path.with_name("pristine"))
    while True:
        number += 3
        os.system(f"rm -rf {run.path} && cp -r {run.path.with_name('pristine')} {run.path}")

        def go_over():
            store = RunStore(run.path)
            store.write(dataclasses.replace(store.book, departed=("client-1",)), outcome.state, built.model)

        died = killed(go_over, number)
        store = RunStore(run.path)
        assert store.load(built.model).model.digest == (new if store.book.departed else old)
        assert bool(RunFolder.open(run.path).requests()) is (not store.book.departed)
        assert not list(run.path.rglob(".staging*"))
        assert json.loads((run.path / "run.json").read_text())["erasing"] is False
        seen |= 1 << bool(store.book.departed)
        if not died:
            break
    assert seen == 3, "both were seen"


def test_a_run_of_an_earlier_version_is_told(run):
    content = json.loads((run.path / "run.json").read_text())
    old = {name: value for name, value in content.items() if name not in ("counts", "pending", "digest")}
    (run.path / "run.json").write_text(json.dumps(old))
    assert RunFolder.open(run.path).book.counts == {}
    with pytest.raises(DataError, match="train again"):
        RunStore(run.path)


@pytest.mark.parametrize(("name", "value"), [("counts", {"client-0": "3"}), ("counts", []), ("pending", 3)])
def test_a_book_that_says_something_else_is_refused(run, name, value):
    content = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**content, name: value, "digest": None}))
    with pytest.raises(DataError, match=r"run\.json cannot be read"):
        RunFolder.open(run.path)


def test_its_book_is_a_stores(run):
    assert isinstance(RunStore(run.path).book, Book)
    assert RunStore(run.path).book.counts == run.book.counts
