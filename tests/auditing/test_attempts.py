"""Audits of one request are counted."""

import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch

from expunge.auditing.attempts import asked_now, model_digest, samples_digest, setting_digest
from expunge.errors import DataError, RequestError


def test_models_of_one_request_are_counted(tmp_path):
    record = tmp_path / "audits.json"
    first = asked_now(record, "request", "model a")
    assert (first.attempt, first.counted) == (1, True)
    assert asked_now(record, "request", "model a") == first, "the same questions again"
    assert asked_now(record, "request", "model b").attempt == 2
    assert asked_now(record, "request", "model a", nonce="another").attempt == 3
    assert asked_now(record, "other request", "model a").attempt == 1
    assert asked_now(record, "request", "model a") == first


def _asked(record, model):
    return asked_now(record, "request", model).attempt


def test_audits_at_the_same_time_are_all_counted(tmp_path):
    record = tmp_path / "audits.json"
    with ProcessPoolExecutor(4) as pool:
        attempts = list(pool.map(partial(_asked, record), [f"model {number}" for number in range(24)]))
    assert sorted(attempts) == list(range(1, 25))


def test_the_same_weights_that_answer_otherwise_are_another_model():
    answers = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    assert model_digest("weights", answers) == model_digest("weights", answers + 1e-7)
    assert (
        len({model_digest(*own) for own in (("weights", answers), ("weights", 2 * answers), ("other", answers))}) == 3
    )


def test_nonces_are_fresh_or_given(tmp_path):
    one, two = (asked_now(tmp_path / "audits.json", "request", model) for model in "ab")
    assert one.nonce != two.nonce
    assert len(one.nonce) >= 16
    assert asked_now(None, "request", "a", nonce="mine").nonce == "mine"
    assert asked_now(None, "request", "a").counted is False


def test_what_is_no_record_is_refused(tmp_path):
    for number, content in enumerate(([1], {"request": [{"model": "a"}]}, {"request": 3})):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(content))
        with pytest.raises(DataError):
            asked_now(file, "request", "model")
        assert json.loads(file.read_text()) == content


def test_a_request_is_its_samples_in_any_order():
    inputs, labels = torch.rand(5, 2), torch.arange(5)
    order = torch.tensor([3, 1, 0, 4, 2])
    assert samples_digest((inputs, labels)) == samples_digest((inputs.clone()[order], labels.clone()[order]))
    others = [(inputs[:4], labels[:4]), (inputs, labels.flip(0)), (inputs.double(), labels), (inputs, labels.int())]
    assert len({samples_digest(own) for own in [*others, (inputs, labels)]}) == 5


def test_whoever_chooses_questions_or_retrained_models_is_counted(tmp_path):
    record = tmp_path / "audits.json"

    def asked(setting="unseen", beside="abc"):
        return asked_now(record, "request", "model", setting=setting, beside=beside)

    first = asked()
    assert asked(beside="cba") == first
    assert asked(beside="abcde") == first, "more models may be retrained"
    assert asked(beside="abcde") == first
    assert asked(beside="abc").attempt == 2, "but none may be left out again"
    assert asked(beside="abc").attempt == 2
    other = asked(setting="other unseen", beside="abcde")
    assert (other.attempt, other.nonce != first.nonce) == (3, True)
    assert asked(beside="abcde") == first


def test_settings_are_told_apart():
    inputs, labels = torch.rand(5, 2), torch.arange(5)
    settings = [(inputs, labels, None), (inputs.flip(0), labels.flip(0), None), (inputs, labels, 3), (inputs, labels)]
    assert len({setting_digest(*own) for own in settings}) == 4
    assert setting_digest(inputs, labels, 3) == setting_digest(inputs.clone(), labels.clone(), 3)


def test_records_of_earlier_versions_count(tmp_path):
    record = tmp_path / "audits.json"
    record.write_text(json.dumps({"request": [{"model": "a", "nonce": "old", "date": "then"}]}))
    assert asked_now(record, "request", "a", setting="unseen", beside="abc").nonce == "old"
    assert asked_now(record, "request", "a", setting="unseen", beside="ab").attempt == 2
    assert asked_now(record, "request", "b", setting="unseen", beside="abc").attempt == 3


def test_a_nonce_that_was_told_before_is_known(tmp_path):
    record = tmp_path / "audits.json"
    assert not asked_now(record, "request", "a", "mine").is_known
    assert not asked_now(record, "request", "a", "mine").is_known, "the same audit again"
    assert asked_now(record, "request", "b", "mine").is_known
    assert asked_now(record, "other request", "c", "mine").is_known
    assert not asked_now(record, "request", "d").is_known


@pytest.mark.parametrize("nonce", ["", 5])
def test_a_nonce_is_a_text(tmp_path, nonce):
    for record in (None, tmp_path / "audits.json"):
        with pytest.raises(RequestError, match="A nonce is a text"):
            asked_now(record, "request", "a", nonce)


def test_samples_of_any_type_have_a_digest():
    inputs, labels = torch.rand(5, 2), torch.arange(5)
    kinds = [torch.bfloat16, torch.half, torch.float, torch.int64, torch.bool]
    assert len({samples_digest((inputs.to(kind), labels)) for kind in kinds}) == len(kinds)
