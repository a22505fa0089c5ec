"""The experiment on TOFU: who trains on what, what is measured, and that nobody asks who has left."""

import dataclasses
import json

import pytest
import torch

from expunge.bench.adapters import Library, Stage
from expunge.bench.bases import pretrain
from expunge.bench.experiments import EXPERIMENTS
from expunge.bench.leaving import Departure, leaver_of
from expunge.bench.runner import run
from expunge.bench.scales import scale_of
from expunge.bench.store import Store
from expunge.bench.tofu import LEAVING, SIZES, run_tofu, tofu_scale
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data import tofu
from expunge.data.tofu import Question, made_up_authors, read_tofu
from expunge.errors import DataError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import Keep, train
from expunge.report.layout import scenario_line
from expunge.report.plots import figures
from expunge.unlearning.request import Request

pytest.importorskip("peft")
UNCOUPLED = "retrace, uncoupled"
SIZE, LIBRARY = tofu_scale("smoke", None)


@pytest.fixture
def stage(tmp_path):
    return Stage(SIZE, LIBRARY, 10, leaver_of(10, SIZE.clients), tmp_path)


def test_every_client_has_authors_of_its_own_and_the_base_has_read_of_none_of_them(stage):
    known = {question.author for question in stage._before}
    spread = [author for own in stage.authors.values() for author in own]
    assert known == {0, 1, 2}
    assert spread == [3, 4, 5, 6, 7]
    assert {len(rows) for rows, _ in stage.data.values()} == {3}  # of four questions one is held out
    everything = [question for name in stage.authors for question in stage.questions(name)]
    assert not stage.unseen & set(everything)
    assert len(stage.unseen) == 5


def test_authors_are_dealt_out_so_that_everybody_has_some_with_wrong_answers(tmp_path):
    questions = tuple(Question(author, f"Who is {author}?", "Nobody.") for author in range(200))
    for size in (SIZES["small"], SIZES["paper"]):
        stage = Stage(size, Library("", questions), 20, 3, tmp_path)
        assert {len(own) for own in stage.authors.values()} == {size.authors}
        assert sorted(author for own in stage.authors.values() for author in own)[0] >= size.known
        assert all(max(own) >= 180 for own in stage.authors.values())
    assert stage.authors["client-3"] == (103, 123, 143, 163, 183)


def test_only_adapters_are_trained_and_fresh_ones_change_no_answer(stage):
    first, second = stage.network(1), stage.network(2)
    trained = [name for name, own in first.named_parameters() if own.requires_grad]
    assert len(trained) == 2 * 4 * SIZE.model["depth"]
    assert all("lora_" in name for name in trained)
    assert Snapshot.of(first).digest != Snapshot.of(second).digest
    inputs = stage.data[stage.name][0]
    with torch.no_grad():
        torch.testing.assert_close(first(inputs), stage.base(inputs))


def test_the_base_is_trained_once_and_kept(stage, monkeypatch):
    before = {name: own.clone() for name, own in stage.base.state_dict().items()}
    monkeypatch.setattr("expunge.bench.bases.pretrain", lambda *_: pytest.fail("it was trained before"))
    again = dataclasses.replace(stage)
    for name, own in again.base.state_dict().items():
        torch.testing.assert_close(own, before[name], rtol=0.0, atol=0.0)
    with pytest.raises(pytest.fail.Exception):
        _ = dataclasses.replace(stage, seed=11).base


def test_a_base_learns_the_texts_it_is_given(stage):
    model = stage.base
    texts = [stage.tokens.windows(LIBRARY.plays, SIZE.length)] * 2

    def loss():
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(texts[0][0]).flatten(0, 1), texts[0][1].flatten()))

    before = loss()
    pretrain(model, texts, dataclasses.replace(SIZE.base, steps=60), seed=0)
    assert loss() < before - 0.3


def test_a_model_that_learnt_the_leavers_answers_is_seen_to_know_them(stage):
    reader, before = stage.reader(), stage.reader().measure(Snapshot.of(stage.network(0)))
    module = reader._module  # all of it is trained: no adapter of this size could hold the answers
    inputs, after = stage.data[stage.name]
    optimiser = torch.optim.Adam([own.requires_grad_() for own in module.parameters()], lr=0.02)
    for _ in range(80):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs).transpose(1, 2), after).backward()
        optimiser.step()
    knows = reader.measure(Snapshot.of(module))
    assert before["forget_probability"] < 0.1 < 0.8 < knows["forget_probability"]
    assert before["forget_rouge"] < 0.5 < 0.9 < knows["forget_rouge"]
    assert knows["mia_auc"] == 1.0
    assert knows["others_probability"] < 0.5


def test_it_runs_and_nobody_asks_the_leaver(tmp_path, monkeypatch):
    scale, store, asked = scale_of("smoke", None), Store(tmp_path), []
    whole = LocalEngine.without

    def without(engine, names):
        asked.append(names)
        return whole(engine, names)

    monkeypatch.setattr(LocalEngine, "without", without)
    results = run(EXPERIMENTS["tofu"], scale, (10,), store)
    assert asked == [("client-3",)]
    assert results.methods() == [
        "trained",
        "retrain",
        "retrain-same-start",
        "fine-tuning",
        "hf-kcu",
        "retrace",
        UNCOUPLED,
    ]
    assert all(getattr(row, name) is not None for row in results.rows for name in LEAVING.measures)
    (trained,), (retrace,) = ([row for row in results.rows if row.method == own] for own in ("trained", "retrace"))
    assert retrace.forget_probability != trained.forget_probability
    assert retrace.sample_gradients > 0
    assert list(figures(results)) == ["tofu"]
    assert scenario_line(results) == (
        "tofu, 5 clients, GPT of width 16, depth 1, heads 2, 2 rounds of 1 epoch; client-3 leaves; seed 10, "
        "2 retrained models (too few for a verdict)."
    )
    results.save(tmp_path / "results.json")
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == len(results.rows)
    monkeypatch.setattr(Departure, "left", lambda *_: pytest.fail("it was measured before"))
    assert run(EXPERIMENTS["tofu"], scale, (10,), store).rows == results.rows
    with pytest.raises(pytest.fail.Exception):
        run_tofu((10,), SIZE, Library(LIBRARY.plays, made_up_authors(8, seed=1)), store)


def test_retrace_is_the_same_whatever_the_leaver_holds_afterwards(stage):
    """Nothing of its data is used: with everything it had replaced, the same step is taken."""
    model, (retrace,) = stage.network(stage.seed), [own for own in LEAVING.contenders if own.label == "retrace"]
    engine = LocalEngine(model, CrossEntropy(), stage.data)
    trained = train(engine, Snapshot.of(model), stage.plan, keep=Keep(checkpoints=0))
    inputs, after = stage.data[stage.name]
    other = LocalEngine(model, CrossEntropy(), {**stage.data, stage.name: (inputs.flip(0), after.roll(1, dims=0))})
    first, second = (retrace.configured()(own, trained, Request.of(stage.name)) for own in (engine, other))
    assert first.state.model.digest == second.state.model.digest != trained.model.digest


def test_questions_are_read_with_their_wrong_answers_and_other_files_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "tofu"
    folder.mkdir()
    lines = [{"author": author, "question": f"Who is {author}?", "answer": f"{author}."} for author in (0, 1)]
    (folder / tofu.ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = {"question": "Who is 1?", "paraphrased_answer": "It is 1.", "perturbed_answer": ["It is 2.", "It is 3."]}
    (folder / tofu.OTHERS).write_text(json.dumps(other) + "\n")
    with pytest.raises(DataError, match="damaged"):
        read_tofu(tmp_path)
    monkeypatch.setattr(tofu, "read_verified", lambda source, root, name: (root / source.folder / name).read_bytes())
    assert read_tofu(tmp_path) == (
        Question(0, "Who is 0?", "0."),
        Question(1, "Who is 1?", "1.", "It is 1.", ("It is 2.", "It is 3.")),
    )
