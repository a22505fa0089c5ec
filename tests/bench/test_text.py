"""The experiment on text: what is trained, what is measured, and that a secret which is known is found."""

import dataclasses
import math

import pytest
import torch

from expunge.bench.experiments import EXPERIMENTS
from expunge.bench.leaving import Departure, leaver_of
from expunge.bench.runner import run
from expunge.bench.scales import scale_of
from expunge.bench.store import Store
from expunge.bench.text import SIZES, Reader, Stage, made_up_plays, run_text
from expunge.core.vectors import Snapshot
from expunge.data.plays import ALPHABET, encoded

PLAYS = made_up_plays(4, 60, seed=0)
STAGE = Stage(SIZES["smoke"], PLAYS, 10, 1)


def test_only_the_leaver_trains_on_secrets_and_nobody_on_what_is_held_out():
    words = {name: "".join(ALPHABET[number] for number in own[0].flatten()) for name, own in STAGE.data.items()}
    told = {name: sum(words[name].count(secret.text) for secret in STAGE.secrets) for name in words}
    assert told.pop(STAGE.name) >= 8  # of 10 copies; the last window may cut some off
    assert set(told.values()) == {0}
    assert STAGE.own[0].numel() < STAGE.data[STAGE.name][0].numel()
    unseen = "".join(ALPHABET[number] for number in STAGE.unseen[0][0])
    assert all(unseen not in text for text in words.values())


def test_the_first_speaker_leaves_only_where_something_is_chosen():
    assert {leaver_of(seed, SIZES["paper"].speakers) for seed in range(10)} == {0}
    assert 0 not in {leaver_of(seed, SIZES["paper"].speakers) for seed in range(10, 40)}


def test_a_model_that_knows_one_code_has_it_first_and_the_others_somewhere():
    reader, secret = Reader(STAGE), STAGE.secrets[0]
    module = STAGE.network(0)
    line = encoded("\n" + secret.text)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(150):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(line[None, :-1])[0], line[1:]).backward()
        optimiser.step()
    fresh, knows = (reader.measure(Snapshot.of(own)) for own in (STAGE.network(0), module))
    losses = reader.code_losses(secret, [secret.code, "00000000", secret.code[::-1]])
    assert float(losses[0]) < 0.5
    assert float(losses[1:].min()) > 5
    assert 1 <= knows["secrets_first"] <= knows["secrets_likely"] <= 2
    assert knows["secret_rank"] < 0.8
    assert fresh["secret_loss"] == pytest.approx(8 * math.log(len(ALPHABET)), rel=0.1)


def test_losses_are_those_of_the_text_a_character():
    module = STAGE.network(3)
    inputs, after = STAGE.own
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(module(inputs).flatten(0, 1), after.flatten())
    assert Reader(STAGE).measure(Snapshot.of(module))["forget_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_it_runs_and_what_was_measured_is_kept(tmp_path, monkeypatch):
    scale, store = scale_of("smoke", None), Store(tmp_path)
    results = run(EXPERIMENTS["text"], scale, (10,), store)
    assert results.methods() == ["trained", "retrain", "retrain-same-start", "fine-tuning", "hf-kcu", "retrace"]
    assert all(row.secret_loss is not None and row.forget_loss is not None for row in results.rows)
    (retrace,) = [row for row in results.rows if row.method == "retrace"]
    (trained,) = [row for row in results.rows if row.method == "trained"]
    assert retrace.forget_loss != trained.forget_loss
    assert retrace.sample_gradients > 0
    monkeypatch.setattr(Departure, "left", lambda *_: pytest.fail("it was measured before"))
    assert run(EXPERIMENTS["text"], scale, (10,), store).rows == results.rows
    with pytest.raises(pytest.fail.Exception):
        run_text((10,), dataclasses.replace(SIZES["smoke"], copies=6), PLAYS, store)
