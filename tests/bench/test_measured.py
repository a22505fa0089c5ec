"""What was measured, kept by method: put together it is what was measured at once, and one alone can be made again."""

import dataclasses

import pytest

from expunge.bench.measured import alone, joined, measured_part, part_path, split
from expunge.bench.measuring import REFERENCES, Part, measure
from expunge.bench.results import Row, plain
from expunge.bench.runner import cells, make_all, missing_cells
from expunge.bench.scales import scale_of
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.bench.workers import one_by_one

CONTENDERS = (Contender("sisa"), Contender("retrace"), Contender("hf-kcu", {"damping": 0.1}, "gradient"))
SMOKE = scale_of("smoke")
SETTING = Setting("poisoned", SMOKE.attacked("client-3"), (Forget(("client-3",)),), CONTENDERS, retrains=3, same_init=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    found = Store(tmp_path_factory.mktemp("bench") / "store")
    with one_by_one() as pool:
        make_all(missing_cells(cells(SETTING), found), found, pool, None)
    return found


def places(store):
    return [part_path(own, cells(own), "x", store) for own in (alone(SETTING, each) for each in CONTENDERS)]


def test_put_together_it_is_what_is_measured_at_once(store):
    whole = measure(SETTING, None, store)
    part = measured_part(SETTING, None, store, places(store))
    written = [Row(**plain(dataclasses.asdict(row), "a row")) for row in whole.rows]  # files have six digits
    assert sorted(map(repr, part.rows)) == sorted(map(repr, written))
    assert [row.method for row in part.rows].count("retrain") == 3
    assert part.noise["kl_forget"] == pytest.approx(whole.noise["kl_forget"], rel=1e-5)
    assert all(path.exists() for path in places(store))


def test_a_method_alone_is_measured_again_without_the_others_models(store, monkeypatch):
    before = measured_part(SETTING, None, store, places(store))
    places(store)[1].unlink()
    asked = []

    def watched(setting, curves, where):
        asked.append([contender.label for contender in setting.contenders])
        return measure(setting, curves, where)

    monkeypatch.setattr("expunge.bench.measured.measure", watched)
    after = measured_part(SETTING, None, store, places(store))
    assert asked == [["retrace"]]
    assert {repr(row) for row in after.rows} == {repr(row) for row in before.rows}
    assert measured_part(SETTING, None, store, places(store)) == after
    assert len(asked) == 1


def test_a_part_of_its_own_has_its_rows_and_those_of_all(store):
    whole = measure(SETTING, None, store)
    own = split(whole, CONTENDERS[1], CONTENDERS)
    assert {row.method for row in own.rows} == {*REFERENCES, "trained-sisa", "retrace"}
    others = [split(whole, contender, CONTENDERS) for contender in CONTENDERS]
    assert joined(others) == dataclasses.replace(whole, rows=joined(others).rows)
    assert len(joined(others).rows) == len(whole.rows)
    assert len({path.name for path in places(store)}) == len(CONTENDERS)


def test_a_part_of_its_own_has_its_curves_only():
    from expunge.bench.measured import split
    from expunge.bench.measuring import Part
    from expunge.bench.results import Series
    from expunge.bench.settings import Contender

    contenders = (Contender("sisa"), Contender("retrace"))
    curves = [Series(name, "v", "x", "y", [0.0], [1.0]) for name in ("trained", "sisa", "retrace")]
    own = split(Part([], {}, {}, curves), contenders[1], contenders)
    assert [curve.method for curve in own.series] == ["trained", "retrace"]


def test_one_model_under_two_labels_is_two_methods_and_a_label_may_change(store):
    def measured_as(*labels):
        setting = dataclasses.replace(SETTING, contenders=tuple(Contender("retrace", label=label) for label in labels))
        each = [alone(setting, contender) for contender in setting.contenders]
        part = measured_part(setting, None, store, [part_path(own, cells(own), "y", store) for own in each])
        return [row.method for row in part.rows if row.method not in REFERENCES]

    assert measured_as("one", "another") == ["one", "another"]
    assert measured_as("renamed") == ["renamed"]


def test_models_that_all_are_compared_with_are_those_of_the_first_measured_anywhere(store):
    """Measured again on another machine, the last digits differ."""
    whole = measure(SETTING, None, store)
    again = dataclasses.replace(
        whole, rows=[dataclasses.replace(row, test_accuracy=row.test_accuracy + 1e-6) for row in whole.rows]
    )
    parts = [split(part, own, CONTENDERS) for part, own in zip((whole, again, whole), CONTENDERS, strict=True)]
    methods = [row.method for row in joined(parts).rows]
    assert [methods.count(name) for name in (*REFERENCES, "trained-sisa", "retrace")] == [1, 3, 1, 1, 1]
    assert all(row in whole.rows for row in joined(parts).rows if row.method in REFERENCES)


def test_parts_put_together_are_as_old_as_the_last_one():
    days = ("2026-11-14T00:00:00+00:00", None, "2026-11-16T00:00:00+00:00", "2026-11-15T00:00:00+00:00")
    parts = [Part([], {}, {}, [], date=day) for day in days]
    assert joined(parts).date == days[2]
    assert joined(parts[1:2]).date is None
