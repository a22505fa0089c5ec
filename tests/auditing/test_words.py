"""What an audit says first is what its findings are."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expunge.auditing import words
from expunge.auditing.margins import findings
from expunge.auditing.measures import MEASURES, Compared
from expunge.auditing.verdict import Judgement, Verdict, judge

SPREAD = (-1.2, 0.7, 0.0, 1.1, -0.6)


def one(name, value, trained, mean=2.0, spread=0.05):
    return Compared(MEASURES[name], value, trained, tuple(mean + spread * part for part in SPREAD))


def found(*args, **how):
    return findings([one(*args, **how)])[0]


@pytest.mark.parametrize(("trained", "value"), [(0.0, 1.5), (4.0, 2.5)])
def test_a_share_has_the_trained_models_direction_as_its_own(trained, value):
    assert words.left(found("trigger_pull", value, trained)).share == pytest.approx(0.25)
    assert words.left(found("trigger_pull", 4.0 - value, trained)).share == pytest.approx(-0.25)
    assert words.left(found("trigger_pull", trained, trained)).share == pytest.approx(1.0)
    assert words.left(found("trigger_pull", trained, trained)).trained == pytest.approx(1.0)


def test_a_measure_in_another_ones_unit_has_shares_of_that():
    pull, near = findings(
        [one("trigger_pull", 2.0, 10.0), one("nearby_pull", 4.0, 0.0, mean=2.0)],
    )
    assert words.left(pull).share == pytest.approx(0.0)
    assert words.left(near).share == pytest.approx(0.25), "2 of the trigger's own 8"
    assert words.left(near).trained == pytest.approx(-0.25)


def test_use_has_no_share_and_neither_has_what_nobody_could_know():
    assert words.left(found("test_accuracy", 0.9, 0.95, mean=0.94)) is None
    assert words.left(found("trigger_pull", 3.0, 2.0)) is None
    assert words.strip(found("test_accuracy", 0.9, 0.95, mean=0.94)) == ""


@given(st.floats(-0.5, 1.5), st.floats(0.01, 0.3), st.floats(-50, 50), st.floats(3, 100))
def test_what_is_still_there_at_most_is_never_more_than_passes(share, spread, mean, deviation):
    judgement = judge([one("trigger_pull", mean + share * deviation, mean + deviation, mean, spread)])
    number = words.number(judgement)
    if judgement.verdict is Verdict.EQUIVALENT:
        at_most, passes = map(int, re.fullmatch(r"At most (\d+)% .*; (\d+)% would pass\)\.", number).groups())
        assert max(round(100 * share), 0) <= at_most <= passes <= 30
    elif judgement.verdict is Verdict.UNDECIDED:
        assert number == judgement.would_decide
    elif judgement.verdict is Verdict.OVER_FORGOTTEN:
        assert share < 0
        assert f"off by {abs(share):.0%}"[:8] in number
    else:
        assert number.startswith("All of" if words.left(judgement.findings[0]).share >= 1 else f"About {share:.0%} of")


def test_at_most_counts_what_is_not_known_of_the_retrained_models():
    own = found("trigger_pull", 2.2, 10.0, spread=0.2)
    assert own.reach > 0.16
    assert words.number(judge([one("trigger_pull", 2.2, 10.0, spread=0.2)])).startswith(
        f"At most {(0.2 + own.reach) / 8:.0%} "
    )


def test_what_would_decide_is_the_number_of_an_undecided_one():
    near = judge([one("trigger_pull", 2.7, 10.0, spread=0.2)])
    assert re.fullmatch(r"About \d+ more retrained models? would decide\.", words.number(near))
    assert near.reason.endswith(f"; {near.would_decide[:1].lower()}{near.would_decide[1:]}")
    few = judge([Compared(MEASURES["trigger_pull"], 2.0, 10.0, (1.9, 2.0, 2.1))])
    assert words.number(few) == "2 more retrained models would decide."
    assert words.number(judge([])) == "5 more retrained models might decide."
    assert words.number(judge([one("trigger_pull", 2.0, 2.0)])) == "There is nothing to tell."
    assert words.number(judge([one("trigger_pull", 2.0, 2.1)])) == "More retrained models would not help."


def test_the_worst_measure_gives_the_number():
    near, far = one("trigger_pull", 10.1, 2.0, mean=10.0), one("forget_loss", 1.9, 0.0)
    number = words.number(judge([near, far]))
    assert "loss on the forgotten data" in number
    assert number == words.number(judge([far, near]))
    both = judge([one("trigger_pull", 3.0, 2.0, mean=10.0), one("forget_loss", 1.5, 0.0)])
    assert words.number(both).startswith("About 88%")


def test_damage_is_told_in_numbers_that_people_know():
    accuracy = one("test_accuracy", 0.6, 0.95, mean=0.94, spread=0.003)
    number = words.number(judge([accuracy, one("forget_loss", 2.0, 0.0)]))
    assert number == "Accuracy on unseen data is 60.0%; retrained models have 94.0%, and 90.0% would pass."
    loss = one("test_loss", 3.0, 0.2, mean=0.2, spread=0.003)
    number = words.number(judge([loss, one("forget_loss", 2.0, 0.0)]))
    assert number == "Loss on unseen data is 3.000; retrained models have 0.200, and 0.350 would pass."
    broken = Judgement(Verdict.DAMAGED, "The model's outputs are not finite.")
    assert words.number(broken) == broken.reason


def test_every_verdict_has_a_sentence_about_whoever_left():
    said = [words.sentence(verdict, "the data of ada") for verdict in Verdict]
    assert len(set(said)) == len(Verdict)
    assert all(re.fullmatch(r"The data of ada was to be forgotten[,;] .*[^.]\.", sentence) for sentence in said)


@pytest.mark.parametrize(
    ("attempt", "said"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (22, "22nd")]
)
def test_attempts_are_counted_as_people_do(attempt, said):
    text = words.attempt(Judgement(Verdict.UNDECIDED, "", attempt=attempt), counted=True)
    assert text.startswith(f"{said} model audited for this request: judged at a level of ")


def test_what_is_not_counted_is_said():
    text = words.attempt(Judgement(Verdict.UNDECIDED, ""), counted=False)
    assert text == "Not counted: no record of audits was kept. Judged as the first of this request, at a level of 5%."


def test_the_picture_puts_every_letter_where_it_belongs():
    drawn = words.strip(found("trigger_pull", 6.0, 10.0), cells=36)  # a letter is 5% of the deviation
    assert {letter: drawn.index(letter) for letter in "[│]●○"} == {"[": 8, "│": 10, "]": 12, "●": 20, "○": 30}
    assert words.strip(found("trigger_pull", 10.0, 10.0), cells=36).index("◉") == 30
    assert words.strip(found("trigger_pull", 500.0, 10.0), cells=36).endswith("●")
    assert words.strip(found("trigger_pull", -500.0, 10.0), cells=36).startswith("●")
    assert "[" not in words.strip(found("distance", 6.0, 10.0)), "no distance is too small"
    assert "[" not in words.strip(found("trigger_pull", 6.0, 10.0, spread=3.0)), "a margin wider than the picture"
