"""Those who stay go on from every model alike, and what comes back is counted beside models that went on likewise."""

from dataclasses import replace

import pytest
import torch

from expunge.auditing.later import more_rounds
from expunge.bench.cells import ContinuedCell, ForgottenCell, RetrainedCell, TrainedCell, after
from expunge.bench.persistence import persistence
from expunge.bench.results import Results, Row, Variant
from expunge.bench.runner import Experiment, cells, run
from expunge.bench.scales import scale_of
from expunge.bench.settings import Forget
from expunge.bench.store import Store
from expunge.federation.training.fedavg import train
from expunge.report.persistence import later, persistence_figures, persistence_markdown

SMOKE = scale_of("smoke")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("bench") / "smoke")


@pytest.fixture(scope="module")
def results(store):
    return run(Experiment("persistence", "", persistence), SMOKE, (10,), store, workers=1)


def test_every_model_goes_on_and_none_but_the_asked_rounds(results, store):
    now, going = (setting.with_seed(10) for setting in persistence(SMOKE))
    assert not any(isinstance(cell, ContinuedCell) for cell in cells(now))
    continued = [cell for cell in cells(going) if isinstance(cell, ContinuedCell)]
    assert [cell.of for cell in continued] == cells(now)
    for cell in continued:
        before, model = (store.kept(own).state.model.parameters for own in (cell.of, cell))
        assert not torch.equal(before, model)
    by_place = {(row.variant, row.method, row.digest) for row in results.rows}
    for cell, name in ((TrainedCell, "trained"), (ForgottenCell, "retrace")):
        (own,) = [each for each in continued if isinstance(each.of, cell)]
        assert (going.label, name, store.kept(own).state.model.digest) in by_place
        assert (now.label, name, store.kept(own.of).state.model.digest) in by_place
    assert all(row.verdict is None for row in results.part(going.label).rows)
    assert results.part(now.label).rows[-1].verdict is not None


def test_it_is_the_persistence_of_an_audit_and_the_leaver_takes_no_part(results, store):
    going = persistence(SMOKE)[1].with_seed(10)
    start = RetrainedCell(going.scenario, going.forgets[0], 0)
    federation, engine = store.engine(going.scenario)
    model, found = store.kept(start).state.model, store.kept(after(start, going.forgets[0], 1)).state.model
    assert (
        found.digest == more_rounds(engine, going.scenario.plan, going.forgets[0].request(federation), 1)(model).digest
    )
    alone = engine.without(going.forgets[0].clients)  # the leaver cannot even be asked
    plan = replace(going.scenario.plan, rounds=1)
    assert found.digest == train(alone, model, plan).model.digest


def test_a_continued_cell_is_named_by_what_it_continues(store):
    cell = ContinuedCell(SMOKE.base, TrainedCell(SMOKE.base), Forget(("client-1",)), 5)
    others = [
        replace(cell, rounds=6),
        replace(cell, forget=Forget(("client-2",))),
        replace(cell, of=RetrainedCell(SMOKE.base, Forget(("client-1",)), 0)),
        replace(cell, of=RetrainedCell(SMOKE.base, Forget(("client-1",)), 1)),
    ]
    assert len({store.path(own) for own in (cell, *others)}) == 5
    assert cell.needs == (cell.of,)
    assert after(TrainedCell(SMOKE.base), cell.forget, 5) == cell


def test_a_longer_way_goes_over_shorter_ones_and_shuffles_anew(store):
    cell, gone = TrainedCell(SMOKE.base.with_seed(10)), Forget((SMOKE.leaver,))
    whole = after(cell, gone, 12)
    assert [(own.rounds, own.earlier) for own in (whole, whole.of, whole.of.of)] == [(5, 7), (5, 2), (2, 0)]
    assert whole.of.of.of == cell
    store.make(after(cell, gone, 7))
    federation, engine = store.engine(cell.scenario)
    model = store.kept(after(cell, gone, 2)).state.model
    again = more_rounds(engine, cell.scenario.plan, gone.request(federation), 5)(model)
    assert store.kept(after(cell, gone, 7)).state.model.digest != again.digest


def study():
    """Two seeds of one training: of the second the backdoor comes back."""
    rows, variants = [], {}
    for rounds in (0, 15):
        label = f"digits, {rounds} more rounds"
        variants[label] = Variant({"more_rounds": rounds} if rounds else {}, {}, {})
        for seed, base, back in ((20, 0.01, 0.0), (21, 0.20, 0.03 * (rounds > 0))):
            rows += [Row("retrain", seed, asr=base + off, forget_loss=5 + off, variant=label) for off in (-0.01, 0.01)]
            rows += [Row("trained", seed, asr=0.9, variant=label)]
            rows += [Row("retrace", seed, asr=base + 0.02 + back, forget_loss=4 + base, variant=label)]
    return Results("persistence", {}, {}, rows, {}, variants)


def test_a_seed_counts_beside_the_retrained_models_of_its_own():
    now, then = later(study())
    assert (now.rounds, then.rounds) == (0, 15)
    assert now.excess == pytest.approx([0.02, 0.02])
    assert then.excess == pytest.approx([0.02, 0.05])
    assert (now.within, then.within) == (2, 1)  # exactly at the bar is within
    text = persistence_markdown(study())
    assert "| digits | 15 | 90.0–90.0 (90.0) | 0.0–21.0 (10.5) | 3.0–25.0 (14.0) | +5.0 | 1 of 2 | −0.90 |" in text


def test_the_picture_has_a_mark_a_seed_and_the_bar_beside_other_trainings():
    own = study()
    success, losses = persistence_figures(own)["persistence"].axes
    assert [line.get_label() for line in success.lines if not line.get_label().startswith("_")] == [
        "do nothing (trained)",
        "retrain (gold standard)",
        "retrace",
    ]
    marks = [y for line in losses.lines if line.get_marker() == "o" for y in line.get_ydata()]
    assert sorted(marks) == pytest.approx([-0.99, -0.99, -0.8, -0.8])
    label = "digits, Adam, 15 more rounds"
    more = [replace(row, variant=label) for row in own.rows if row.variant == "digits, 15 more rounds"]
    variants = {**own.variants, label: Variant({"more_rounds": 15}, {}, {})}
    *_, others = persistence_figures(replace(own, rows=own.rows + more, variants=variants))["persistence"].axes
    assert [text.get_text() for text in others.get_yticklabels()] == ["digits, Adam"]
    found = [x for line in others.lines if line.get_marker() == "o" for x in line.get_xdata()]
    assert sorted(found) == pytest.approx([2.0, 5.0])
    assert [2.0, 2.0] in [list(line.get_xdata()) for line in others.lines if line.get_linestyle() == "--"]
    assert persistence_figures(Results("persistence", {}, {}, [], {})) == {}
