import json
import re
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from matplotlib import pyplot
from rich.console import Console

from expunge.auditing import words
from expunge.auditing.comparison import Scores, beside_retrained
from expunge.auditing.evidence import Evidence
from expunge.auditing.measures import MEASURES, Compared
from expunge.auditing.model_audit import ModelAudit, Provenance
from expunge.auditing.verdict import Judgement, Verdict, judge
from expunge.bench.auditing import Audit
from expunge.bench.results import Results, Row, Series
from expunge.errors import DataError, RequestError
from expunge.report import mixing, publish_audit, terminal_audit
from expunge.report.audit_page import render_audit
from expunge.report.audit_plots import _curve, audit_figures, roc_plot, scores_plot
from expunge.report.audit_text import margin_text
from expunge.report.audit_verdict import scaled, verdict_plot
from expunge.report.measures import MISSING
from expunge.report.palette import NOISE
from report.test_page import Reader

EVIDENCE = (
    Evidence("held-out data", "for", "They look like held-out ones.", {"auc": 0.512345678}),
    Evidence("retained loss", "neither", "It went from 0.1 to 0.1.", {"before": 0.1, "after": 0.1}),
    Evidence("solver", "against", "It met <negative> curvature.", {}),
)
PROVENANCE = Provenance("0a", "1b", ("2c", "3d"), "2026-01-02T03:04:05+00:00", "0.1.0", "secret", counted=True)
KEPT = {"fine-tuning": 0.9, "retrace": 0.02}
RETRAINED = {  # the mean of retrained models, their standard deviation, and the trained model's value
    "forget_loss": (2.0, 0.05, 0.1),
    "forget_accuracy": (0.5, 0.01, 0.99),
    "mia_auc": (0.52, 0.04, 0.6),
    "distance": (0.1, 0.01, 0.9),
    "asr": (0.02, 0.005, 0.95),
    "trigger_pull": (0.1, 0.1, 8.0),
    "test_accuracy": (0.94, 0.003, 0.945),
    "test_loss": (0.2, 0.01, 0.19),
}
SPREAD = (-1.2, 0.7, 0.0, 1.1, -0.6)


def measures(kept, without=(), damage=0.0, trained=None):
    """A model that kept a share of what the trained one shows, beside five retrained models."""
    found = []
    for name, (mean, spread, before) in RETRAINED.items():
        if name not in without:
            value = mean + kept * (before - mean) - (damage if name == "test_accuracy" else 0.0)
            before = mean if trained == "forgot" else before
            found.append(Compared(MEASURES[name], value, before, tuple(mean + spread * part for part in SPREAD)))
    return found


def scores(seed, shift, others=400):
    chance = np.random.default_rng(seed)
    return Scores(chance.normal(shift, 1.0, 80), chance.normal(0.0, 1.0, others))


def method_audit(kept, others=400, **how):
    """A method that kept a share of what there was to know, with two attacks on it and five retrained models."""
    references = [scores(seed, 0.1, others) for seed in range(5)]
    before, after = scores(10, 1.5, others), scores(11, 0.1 + 1.4 * kept, others)
    judgement = judge(measures(kept, **how))
    found = beside_retrained(before, after, references, np.ones(others))
    own = ModelAudit(judgement, {"loss": found, "LiRA": found}, EVIDENCE, PROVENANCE)
    return own, {"trained": before, "retrained": references[0]}, after


def synthetic(others=400, **how):
    methods, drawn = {}, {}
    for name, kept in KEPT.items():
        methods[name], shared, after = method_audit(kept, others, **how)
        drawn |= shared | {name: after}
    rows = [Row("trained", 0, test_accuracy=0.9)]
    return Audit(
        Results("run/without-client-3", {"forgotten": ["client-3"]}, {}, rows, {}),
        methods,
        "loss",
        drawn,
        np.ones(others),
        "No certificate: <why>.",
    )


@pytest.fixture(scope="module")
def audit():
    return synthetic()


@pytest.fixture
def alone(audit):
    """No retrained models: nothing was compared."""
    nothing = Judgement(Verdict.UNDECIDED, "0 retrained models show no noise.")
    methods = {name: replace(own, judgement=nothing, attacks={}) for name, own in audit.methods.items()}
    return replace(audit, methods=methods, attack=None, scores={})


def printed(audit, width=80):
    console = Console(width=width, file=StringIO())
    for part in terminal_audit(audit, width):
        console.print(part)
    return console.file.getvalue()


def test_the_cases_are_what_they_are_meant_to_be(audit):
    assert {name: own.judgement.verdict.value for name, own in audit.methods.items()} == {
        "fine-tuning": "UNDER-FORGOTTEN",
        "retrace": "EQUIVALENT",
    }


def test_pictures_and_terminal_name_the_attack_that_is_drawn(audit):
    assert scores_plot(audit).axes[0].get_xlabel().startswith("loss: ")
    assert roc_plot(audit).axes[0].get_title(loc="left") == "loss on each model"
    assert "loss TPR" in " ".join(printed(audit).split())
    other = replace(audit, attack="LiRA")
    assert scores_plot(other).axes[0].get_xlabel().startswith("LiRA: ")
    assert roc_plot(other).axes[0].get_title(loc="left") == "LiRA on each model"
    assert "LiRA TPR" in " ".join(printed(other).split())


def test_scores_have_a_row_a_model_filled_and_as_a_line(audit):
    axes = scores_plot(audit).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["do nothing (trained)", "fine-tuning", "retrace", "a retrained model"]
    assert [patch.get_fill() for patch in axes.patches] == [True, False] * 4
    assert sum(text.get_text().startswith("AUC ") for text in axes.texts) == 4


def test_a_ruined_model_does_not_press_the_others_together(audit):
    ruined = Scores(audit.scores["retrace"].members - 1000.0, audit.scores["retrace"].others)
    axes = scores_plot(replace(audit, scores={**audit.scores, "retrace": ruined})).axes[0]
    low, high = axes.get_xlim()
    assert high - low < 15
    assert "← 100% of the filled beyond" in [text.get_text() for text in axes.texts]


def test_equal_scores_still_have_an_axis(audit):
    flat = dict.fromkeys(audit.scores, Scores(np.zeros(80), np.zeros(400)))
    low, high = scores_plot(replace(audit, scores=flat)).axes[0].get_xlim()
    assert low < high


def test_non_members_count_by_their_weights(audit):
    weights = np.zeros(400)
    weights[0] = 1.0
    heights = scores_plot(replace(audit, weights=weights)).axes[0].patches[1].get_data().values
    assert np.count_nonzero(heights) == 1


def test_roc_is_logarithmic_with_a_line_a_model_and_the_diagonal(audit):
    axes = roc_plot(audit).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {line.get_gid(): line for line in axes.lines}
    assert set(lines) == {"trained", "fine-tuning", "retrace", "retrained", "diagonal", "one-percent"}
    assert axes.get_xlim()[0] == pytest.approx(1 / 400)
    for line in lines.values():
        assert min(line.get_xdata()) > 0
        assert max(line.get_xdata()) <= 1


def marks(figure, name):
    return [line for axes in figure.axes for line in axes.lines if line.get_gid() == name]


def test_the_picture_has_the_margin_the_model_and_doing_nothing_of_every_measure(audit):
    for own in audit.methods.values():
        figure = verdict_plot("retrace", own.judgement)
        found = own.findings
        bars = [bar for axes in figure.axes for bar in axes.patches if bar.get_gid() == NOISE]
        assert len(bars) == len(found) == len(RETRAINED)
        models, rings = marks(figure, "model"), marks(figure, "doing-nothing")
        assert len(models) == len(rings) == len(found)
        red = [mark for mark in models if mark.get_markerfacecolor() == "#b3261e"]
        assert len(red) == sum(one.outcome == "outside" for one in found)
        assert all(ring.get_markerfacecolor() == "none" for ring in rings)
        assert [ring.get_xdata()[0] for ring in rings[:6]] == pytest.approx([1.0] * 6), "doing nothing keeps all"
        assert [model.get_xdata()[0] for model in models[:6]] == pytest.approx([scaled(one).share for one in found[:6]])
        assert own.verdict.value in figure.axes[0].get_title(loc="left")
        assert len(figure.legends) == 1


def test_a_measure_that_is_left_out_is_faint_and_said(audit):
    own = audit.methods["retrace"]
    assert [one.measure.name for one in own.findings if not one.usable] == ["mia_auc"]
    figure = verdict_plot("retrace", own.judgement)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label for label in labels if label.endswith("(left out)")] == [
        "membership AUC of the forgotten data (left out)"
    ]
    faint = [mark for mark in marks(figure, "model") if mark.get_alpha() < 1]
    assert [labels[int(mark.get_ydata()[0])] for mark in faint] == ["membership AUC of the forgotten data (left out)"]
    assert "left out: too noisy" in render_audit(audit)
    row = next(line for line in printed(audit, 120).splitlines() if "membership AUC" in line)
    assert "–" in row


def test_a_noisy_measure_that_is_outside_all_the_same_is_not_left_out():
    found = [one for one in measures(0.02) if one.measure.name != "mia_auc"]
    noisy = Compared(MEASURES["mia_auc"], 0.9, 0.6, tuple(0.52 + 0.02 * part for part in SPREAD))
    judgement = judge([*found, noisy])
    own = judgement.findings[-1]
    assert (own.usable, own.outcome, judgement.verdict.value) == (False, "outside", "UNDER-FORGOTTEN")
    assert words.outcome(own) == "outside"
    assert not any("left out" in label.get_text() for label in verdict_plot("x", judgement).axes[0].get_yticklabels())
    assert words.number(judgement) == judgement.reason, "its share of next to nothing is no number"


def test_use_is_drawn_towards_the_worse_side_in_margins():
    accuracy, loss = judge(measures(0.0, damage=0.06)).findings[-2:]
    assert scaled(accuracy).share == pytest.approx(1.5)
    assert scaled(accuracy).trained == pytest.approx(-0.005 / 0.04)
    assert scaled(loss).trained == pytest.approx(-0.01 / 0.15)


def test_edges_that_nothing_can_pass_are_not_written(audit):
    found = {one.measure.name: one for one in audit.methods["retrace"].findings}
    assert margin_text(replace(found["asr"], retrained=0.02, margin=0.03)) == "at most 5.0%"
    assert margin_text(replace(found["test_accuracy"], retrained=0.96, margin=0.03)) == "at least 93.0%"
    assert margin_text(replace(found["forget_accuracy"], retrained=0.5, margin=0.1)) == "40.0% to 60.0%"
    assert margin_text(replace(found["asr"], retrained=0.5, margin=2.0)) == "anything"
    assert margin_text(replace(found["trigger_pull"], retrained=0.5, margin=2.0)) == "-1.500 to 2.500"


def test_page_says_the_sentence_the_number_and_the_limits_before_all_details(audit):
    page = render_audit(audit)
    reader = Reader(page)
    text = " ".join(reader.text)
    first, details = text.split(" Details ")
    for own in audit.methods.values():
        assert words.sentence(own.verdict, "the data of client-3") in first
        assert words.number(own.judgement) in first
        assert own.reason in first
        for finding in own.findings:
            assert finding.measure.label in details
    assert words.LIMITS in first
    assert "1st model audited for this request: judged at a level of 5%." in first
    assert all(own.power.sentence in details for own in audit.methods.values())
    assert 'result first near"' in page
    assert 'result first far"' in page
    for part in ("LiRA: TPR at 1% FPR", "speaks against forgetting", "outside"):
        assert part in details
    images = [link for link in reader.links if link.startswith("data:image/svg+xml;base64,")]
    assert len(images) == 10, "five pictures, light and dark, with the measured curve"
    assert all(link.startswith("#") and f'id="{link[1:]}"' in page for link in reader.links if link not in images)
    assert "://" not in page


def test_the_measured_curve_stands_beside_the_limits(audit, tmp_path, monkeypatch):
    monkeypatch.setattr(mixing.known_curves, "__defaults__", (tmp_path / "missing.json",))
    assert "Measured: " not in printed(audit) + render_audit(audit)
    names = ("percent of trained weights", "mixtures: share called EQUIVALENT")
    curves = [Series("fresh start", "digits", *names, [0.0, 10.0, 20.0], [0.9, 0.55, 0.02])]
    (tmp_path / "mixing.json").write_text(mixing.as_text(curves))
    monkeypatch.setattr(mixing.known_curves, "__defaults__", (tmp_path / "mixing.json",))
    said = "called EQUIVALENT were up to 55% of the models with 10% of the trained weights in them, 2% with 20%."
    page = Reader(render_audit(audit))
    assert f"{words.LIMITS} Measured: {said}" in " ".join(page.text)
    assert len([link for link in page.links if link.startswith("data:")]) == 10
    assert said in " ".join(printed(audit).split())


def test_a_retrained_model_that_was_refused_is_named():
    found = [replace(one, retrained=(*one.retrained, *one.retrained)) for one in measures(0.02)]
    spoiled = [
        replace(one, retrained=(*one.retrained[:-1], 0.5)) if one.measure.name == "asr" else one for one in found
    ]
    own = ModelAudit(judge(spoiled), {}, (), replace(PROVENANCE, retrained=tuple(f"d{n}" for n in range(10))))
    assert [one.number for one in own.judgement.refused] == [9]
    audit = replace(synthetic(), methods={"retrace": own})
    for text in (render_audit(audit), printed(audit), str(own)):
        assert "retrained[9] is unlike the others" in " ".join(text.split())
    assert "<dt>retrained[9]</dt><dd>d9 (left out)</dd>" in render_audit(audit)
    assert "<dt>retrained[8]</dt><dd>d8</dd>" in render_audit(audit)


def test_page_says_which_models_were_looked_at_when_and_which_attack_is_drawn(audit):
    page = render_audit(audit)
    shown = re.search(r'<h2>Which models</h2>\s*<div class="card"><dl class="small">(.*?)</dl>', page, re.DOTALL)[1]
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown)) == {
        "looked at": "2026-01-02T03:04:05+00:00",
        "expunge": "0.1.0",
        "do nothing (trained)": "0a",
        "fine-tuning": "1b",
        "retrace": "1b",
        "nonce for fine-tuning": "secret",
        "nonce for retrace": "secret",
        "retrained[0]": "2c",
        "retrained[1]": "3d",
    }
    assert page.count("The attack is loss.</figcaption>") == 2
    assert "The attack is LiRA." in render_audit(replace(audit, attack="LiRA"))


def test_within_a_margin_that_carries_no_claim_is_not_marked(audit):
    row = re.search(r"<tr><th[^>]*>membership AUC of the forgotten data</th>(.*?)</tr>", render_audit(audit)).group(1)
    assert "near" not in row
    assert "left out: too noisy" in row
    row = re.search(r"<tr><th[^>]*>attack success</th>(.*?)</tr>", render_audit(audit)).group(1)
    assert 'class="far"' in row


def test_everything_is_escaped(audit):
    evil = "<script>alert('&')</script>"
    own = audit.methods["retrace"]
    odd = replace(
        own,
        judgement=replace(own.judgement, reason=evil),
        attacks={evil: own.attacks["LiRA"]},
        evidence=(Evidence(evil, "for", evil, {}),),
    )
    page = render_audit(replace(audit, methods={evil: odd}, certificate=evil, results=Results(evil, {}, {}, [], {})))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6
    Reader(page)


def test_terminal_fits_and_says_it(audit):
    for width in (60, 80, 140):
        assert max(len(line.rstrip()) for line in printed(audit, width).splitlines()) <= width
    text = printed(audit)
    for part in ("UNDER-FORGOTTEN", "EQUIVALENT", "With 5 retrained models", "TPR at", "retrained, mean of 5", "<why>"):
        assert part in text
    flowing = " ".join(text.split())
    for own in audit.methods.values():
        assert words.sentence(own.verdict, "the data of client-3") in flowing
        assert words.number(own.judgement) in flowing
        assert own.reason in flowing
    assert flowing.count(audit.methods["retrace"].power.sentence) == 1, "what is told needs no power"
    assert words.LIMITS in flowing
    assert "1st model audited for this request" in flowing
    assert "nonce secret" in flowing
    line = next(line for line in text.splitlines() if re.match(r"fine-tuning +\d\.\d{3}", line))
    assert line.count("✗") == 2
    assert "It met <negative> curvature." in text


def test_square_brackets_are_no_markup_in_the_terminal(audit):
    own = replace(audit.methods["retrace"], evidence=(Evidence("x", "for", "AUC [red]0.5[/red] [0.4, 0.6]", {}),))
    assert "[red]0.5[/red] [0.4, 0.6]" in printed(replace(audit, methods={"retrace": own}))


def test_without_retrained_models_there_is_evidence_only(alone, tmp_path):
    page = publish_audit(alone, tmp_path).read_text(encoding="utf-8")
    assert 'class="card result first open"' in page
    assert "0 retrained models show no noise." in page
    assert "No retrained models: nothing was compared" in page
    assert "They look like held-out ones." in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.html", "audit.json"]
    text = printed(alone)
    assert "UNDECIDED" in text
    assert "Membership attacks" not in text
    assert "It met <negative> curvature." in text
    for drawn in (scores_plot(alone), roc_plot(alone), verdict_plot("retrace", alone.methods["retrace"].judgement)):
        assert len(drawn.axes[0].texts) == 1


def test_a_clean_client_has_no_attack_success(tmp_path):
    clean = synthetic(without=("asr", "trigger_pull"))
    axes = verdict_plot("retrace", clean.methods["retrace"].judgement).axes[0]
    assert "attack success" not in [label.get_text() for label in axes.get_yticklabels()]
    publish_audit(clean, tmp_path)


def test_few_samples_have_no_rate_at_one_percent(tmp_path):
    few = synthetic(others=40)
    assert few.methods["retrace"].attacks["LiRA"].gap.tpr_at_1_percent is None
    assert "LiRA: TPR at 1% FPR" in publish_audit(few, tmp_path).read_text(encoding="utf-8")
    line = next(line for line in printed(few).splitlines() if re.match(r"retrace +\d\.\d{3}", line))
    assert line.rstrip().endswith(MISSING)
    gap = json.loads((tmp_path / "audit.json").read_text())["methods"]["retrace"]["attacks"]["LiRA"]["gap"]
    assert gap["tpr_at_1_percent"] is None


def test_files_are_written_and_reproducible_without_pyplot_state(audit, tmp_path):
    first, second = publish_audit(audit, tmp_path / "a"), publish_audit(audit, tmp_path / "b")
    assert first == tmp_path / "a" / "audit.html"
    names = ["audit-roc", "audit-scores", "audit-verdict-fine-tuning", "audit-verdict-retrace"]
    written = sorted(path.name for path in first.parent.iterdir())
    assert written == sorted(
        [f"{name}.{kind}" for name in names for kind in ("png", "svg")] + ["audit.html", "audit.json"]
    )
    assert all((second.parent / name).read_bytes() == (first.parent / name).read_bytes() for name in written)
    assert not pyplot.get_fignums()
    assert sorted(audit_figures(audit)) == names


def test_json_holds_the_audit_to_six_digits(audit, tmp_path):
    publish_audit(audit, tmp_path)
    content = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    own = content["methods"]["retrace"]
    assert own["verdict"] == "EQUIVALENT"
    assert own["evidence"][0]["values"]["auc"] == 0.512346
    expected = audit.methods["retrace"].attacks["LiRA"].gap.auc
    assert own["attacks"]["LiRA"]["gap"]["auc"] == pytest.approx(list(expected), rel=1e-5)
    assert {found["measure"] for found in own["findings"]} >= {"asr", "forget_loss"}


def test_a_value_that_is_no_number_is_refused(audit, tmp_path):
    bad = replace(audit.methods["retrace"], evidence=(Evidence("x", "for", "y", {"auc": float("nan")}),))
    with pytest.raises(DataError, match=r"finite numbers only.*auc"):
        publish_audit(replace(audit, methods={"retrace": bad}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_an_error_of_ours(audit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write"):
        publish_audit(audit, tmp_path / "file")


def test_the_curve_is_that_of_scikit_learn_but_for_points_on_straight_lines():
    from sklearn.metrics import roc_curve

    chance = np.random.default_rng(0)
    members, others = chance.integers(0, 9, 40) + 1.0, chance.integers(0, 9, 60) * 1.0  # many are equal
    weights = chance.random(60)
    truth = np.concatenate([np.ones(40), np.zeros(60)])
    weight = np.concatenate([np.full(40, 1 / 40), weights / weights.sum()])
    both = np.concatenate([members, others])
    alarms, found, _ = roc_curve(truth, both, sample_weight=weight, drop_intermediate=False)
    own = _curve(Scores(members, others), weights)
    np.testing.assert_allclose(own[0], alarms, atol=1e-12)
    np.testing.assert_allclose(own[1], found, atol=1e-12)
