import json
import re
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from matplotlib import pyplot
from rich.console import Console

from auditing.synthetic import observed, retrained, trained
from expunge.auditing.comparison import Scores, beside_retrained
from expunge.auditing.evidence import Evidence
from expunge.auditing.model_audit import ModelAudit, Provenance
from expunge.auditing.verdict import Judgement, Verdict, judge
from expunge.bench.auditing import Audit
from expunge.bench.results import Results, Row
from expunge.errors import DataError, RequestError
from expunge.report import publish_audit, terminal_audit
from expunge.report.audit_page import render_audit
from expunge.report.audit_plots import audit_figures, roc_plot, scores_plot
from expunge.report.audit_text import interval_text
from expunge.report.audit_verdict import position, verdict_plot
from expunge.report.measures import MISSING
from expunge.report.palette import NOISE
from report.test_page import Reader

EVIDENCE = (
    Evidence("held-out data", "for", "They look like held-out ones.", {"auc": 0.512345678}),
    Evidence("retained loss", "neither", "It went from 0.1 to 0.1.", {"before": 0.1, "after": 0.1}),
    Evidence("solver", "against", "It met <negative> curvature.", {}),
)
PROVENANCE = Provenance("0a", "1b", ("2c", "3d"), "2026-01-02T03:04:05+00:00", "0.1.0")
KEPT = {"fine-tuning": 1.0, "retrace": 0.0}


def scores(seed, shift, others=400):
    chance = np.random.default_rng(seed)
    return Scores(chance.normal(shift, 1.0, 80), chance.normal(0.0, 1.0, others))


def method_audit(kept, others=400, **how):
    """A method that kept a share of what there was to know, with two attacks on it and five retrained models."""
    references = [scores(seed, 0.1, others) for seed in range(5)]
    before, after = scores(10, 1.5, others), scores(11, 0.1 + 1.4 * kept, others)
    judgement = judge(retrained=retrained(**how), trained=trained(**how), candidate=observed(70, kept=kept, **how))
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
        Results("run/without-client-3", {}, {}, rows, {}),
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


def test_verdict_panel_marks_what_was_told_and_doing_nothing(audit):
    for own in audit.methods.values():
        figure = verdict_plot("retrace", own.judgement)
        axes, found = figure.axes[0], own.judgement.findings
        assert len([bar for bar in axes.patches if bar.get_gid() == NOISE]) == len(found) == 9
        marks = [line for line in axes.lines if line.get_gid() == "model"]
        red = [mark for mark in marks if mark.get_markerfacecolor() == "#b3261e"]
        assert len(red) == sum(finding.deviates for finding in found)
        rings = [line for line in axes.lines if line.get_gid() == "doing-nothing"]
        assert len(rings) == len(marks) == 9
        assert all(ring.get_markerfacecolor() == "none" for ring in rings)
        assert any(ring.get_marker() == ">" for ring in rings), "the attack's success is far out"
        assert own.judgement.verdict.value in axes.get_title(loc="left")
        assert len(figure.legends) == 1


def test_the_edges_of_an_interval_are_one(audit):
    for finding in audit.methods["retrace"].judgement.findings:
        assert position(finding, finding.retrained) == 0
        assert [position(finding, edge) for edge in (finding.low, finding.high) if np.isfinite(edge)] == pytest.approx(
            [side for side, edge in ((-1, finding.low), (1, finding.high)) if np.isfinite(edge)]
        )
        assert (
            finding.deviates
            or abs(position(finding, finding.value)) <= 1
            or not np.isfinite(finding.low + finding.high)
        )


def test_limits_that_nothing_can_pass_are_not_written(audit):
    found = {finding.measure.name: finding for finding in audit.methods["retrace"].judgement.findings}
    assert interval_text(replace(found["asr"], low=-0.03, high=0.05)) == "at most 5.0%"
    assert interval_text(replace(found["test_accuracy"], low=0.93, high=np.inf)) == "at least 93.0%"
    assert interval_text(replace(found["forget_accuracy"], low=0.4, high=0.6)) == "40.0% to 60.0%"
    assert interval_text(replace(found["asr"], low=-1.0, high=2.0)) == "anything"
    assert interval_text(replace(found["forget_loss"], low=1.0, high=2.0)) == "1.000 to 2.000"


def test_page_says_verdicts_reasons_power_and_all_tables(audit):
    page = render_audit(audit)
    reader = Reader(page)
    text = " ".join(reader.text)
    for own in audit.methods.values():
        assert own.judgement.verdict.value in text
        assert own.judgement.reason in text
        for finding in own.judgement.findings:
            assert finding.measure.label in text
    assert page.count(audit.methods["retrace"].judgement.power.sentence.replace("'", "&#x27;")) == 1
    assert 'class="card result near"' in page
    assert 'class="card result far"' in page
    for part in ("LiRA: TPR at 1% FPR", "speaks against forgetting", "not a proof of forgetting", "told apart"):
        assert part in text
    images = [link for link in reader.links if link.startswith("data:image/svg+xml;base64,")]
    assert len(images) == 8
    assert all(link.startswith("#") and f'id="{link[1:]}"' in page for link in reader.links if link not in images)
    assert "://" not in page


def test_page_says_which_models_were_looked_at_when_and_which_attack_is_drawn(audit):
    page = render_audit(audit)
    shown = re.search(r'<h2>Which models</h2>\s*<div class="card"><dl class="small">(.*?)</dl>', page, re.DOTALL)[1]
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown)) == {
        "looked at": "2026-01-02T03:04:05+00:00",
        "expunge": "0.1.0",
        "do nothing (trained)": "0a",
        "fine-tuning": "1b",
        "retrace": "1b",
        "retrained model 1": "2c",
        "retrained model 2": "3d",
    }
    assert page.count("The attack is loss.</figcaption>") == 2
    assert "The attack is LiRA." in render_audit(replace(audit, attack="LiRA"))


def test_passing_where_doing_nothing_passes_is_not_marked():
    blind = synthetic(trace=0.0)
    page = render_audit(blind)
    assert {own.judgement.verdict.value for own in blind.methods.values()} == {"UNDECIDED"}
    row = re.search(r"<tr><th[^>]*>attack success</th>(.*?)</tr>", page).group(1)
    assert "near" not in row
    assert "<small>passes</small>" in row


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
    line = next(line for line in text.splitlines() if re.match(r"fine-tuning +\d\.\d{3}", line))
    assert line.count("✗") == 2
    assert "It met <negative> curvature." in text


def test_square_brackets_are_no_markup_in_the_terminal(audit):
    own = replace(audit.methods["retrace"], evidence=(Evidence("x", "for", "AUC [red]0.5[/red] [0.4, 0.6]", {}),))
    assert "[red]0.5[/red] [0.4, 0.6]" in printed(replace(audit, methods={"retrace": own}))


def test_without_retrained_models_there_is_evidence_only(alone, tmp_path):
    page = publish_audit(alone, tmp_path).read_text(encoding="utf-8")
    assert 'class="card result open"' in page
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
    clean = synthetic(asr=None, forget_auc=None, retained_auc=None)
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
    assert {found["measure"] for found in own["findings"]} >= {"asr", "kl_forget"}


def test_a_value_that_is_no_number_is_refused(audit, tmp_path):
    bad = replace(audit.methods["retrace"], evidence=(Evidence("x", "for", "y", {"auc": float("nan")}),))
    with pytest.raises(DataError, match=r"finite numbers only.*auc"):
        publish_audit(replace(audit, methods={"retrace": bad}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_an_error_of_ours(audit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write"):
        publish_audit(audit, tmp_path / "file")
