"""States of the ledger's work have vectors in common: going back and destroying all the same, killed at any moment."""

import dataclasses
from datetime import timedelta

import pytest
import torch

from expunge.federation.keeping.state_files import load_state
from ledger.dying import SPARSE
from ledger.places import QUICK, Place
from ledger.test_dying import deaths
from traces import Traces, remembering

GRACEFUL = dataclasses.replace(QUICK, method="auto", grace=timedelta(days=7))
STRANGERS = ("ada", "cyd", "eve")
"""Who never met bob."""


@pytest.fixture
def place(tmp_path):
    return Place.written(tmp_path / "place", SPARSE)


def vectors(place):
    own = place.federation
    return {name: vector.clone() for name, vector in own.state_store().load(own.model()).memory.vectors.items()}


def files(folder):
    return {file.name: file.stat() for file in folder.glob("**/vectors/*")}


def test_while_it_is_kept_the_old_state_is_whole_and_it_can_go_back(place):
    before, number, work = vectors(place), place.ask("bob"), place.folder / "ledger" / "work"
    assert set(before) == {"bob", "dee", "fay", *STRANGERS}
    place.work(GRACEFUL).run([number])
    (aside,) = work.glob("superseded-*")
    (candidate,) = work.glob("candidate-*")
    kept, now, ready = files(aside), files(place.folder / "store"), files(candidate)
    assert (len(kept), len(now)) == (6, 5)
    both = kept.keys() & now.keys()
    assert len(both) == len(STRANGERS)
    assert all(kept[name].st_ino == now[name].st_ino == ready[name].st_ino for name in both)
    assert set(vectors(place)) == {"dee", "fay", *STRANGERS}
    place.work().roll_back(number, "a mistake")
    after = vectors(place)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {each.st_nlink for each in files(place.folder).values()} == {1}
    assert {file.parent.parent.parent for file in place.folder.glob("**/vectors/*")} == {place.folder / "store"}


def test_once_it_is_destroyed_nothing_is_left_of_it_and_the_others_are_whole(place):
    own = place.federation
    old, start = own.state_store().load(own.model()), own.initial(own.plan.seed).parameters
    gone = Traces(remembering(old, ["bob", "dee", "fay"]), start)  # what the others had before tells bob's, too
    before, number = vectors(place), place.ask("bob")
    place.work(GRACEFUL).run([number])
    assert "vectors" in gone.kinds_in(place.folder / "ledger" / "work")
    place.clock.now += timedelta(days=8)
    assert place.work(GRACEFUL).resume() == [number]
    assert place.ledger.case(number).erased
    assert not gone.found_in(place.folder)
    assert {each.st_nlink for each in files(place.folder).values()} == {1}
    after = vectors(place)
    assert after.keys() == before.keys() - {"bob"}
    assert all(torch.equal(after[name], before[name]) for name in STRANGERS)


def test_while_it_is_kept_a_training_that_goes_on_harms_neither(place):
    before, number = vectors(place), place.ask("bob")
    place.work(GRACEFUL).run([number])
    own, kept = place.federation, vectors(place)
    store, model = own.state_store(), own.model()
    state = store.load(model)
    state.memory.record({"ada": torch.ones(21), "eve": torch.zeros(21)}, {"ada": 1, "eve": 1})
    store.write(store.book, dataclasses.replace(state, memory=state.memory), model)
    now = vectors(place)
    assert not torch.equal(now["ada"], kept["ada"])
    assert all(torch.equal(now[name], kept[name]) for name in ("cyd", "dee", "fay"))
    (aside,) = (place.folder / "ledger" / "work").glob("superseded-*")
    old = load_state(model, aside, None).memory.vectors
    assert all(torch.equal(old[name], before[name]) for name in before)


@pytest.mark.slow
def test_killed_before_some_file_operations(tmp_path):
    assert deaths(tmp_path, "operations", 47, "sparse") > 10
