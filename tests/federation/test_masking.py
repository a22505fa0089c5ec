"""The masks' arithmetic: sums are exact, and anything less than the sum of all is noise."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.errors import NumericalError
from federation.masking import FRACTION, MOST, encoded, mask, masked, opened, shared_keys

NAMES = ("ada", "bob", "cyd", "dee")
words = st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5).map(lambda own: np.array(own, dtype=np.uint64))


def sent(replies, seed="a seed", purpose="message 0"):
    keys = shared_keys(replies, seed)
    return {name: masked(name, own, keys[name], purpose) for name, own in replies.items()}


def truths(size=4096):
    """Replies that look like nothing but themselves: small, all alike, many zeros."""
    return {name: np.arange(size, dtype=np.uint64) * number for number, name in enumerate(NAMES)}


@given(st.lists(words, min_size=2, max_size=6), st.text(max_size=5), st.text(max_size=5))
def test_sums_are_exact_modulo_two_to_the_64(replies, seed, purpose):
    named = {f"client {number}": own for number, own in enumerate(replies)}
    found = sum(sent(named, seed, purpose).values())
    assert [int(word) for word in found] == [sum(map(int, column)) % 2**64 for column in zip(*replies, strict=True)]


@given(st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=2, max_size=9), st.integers(-9, 19))
def test_what_is_opened_is_the_sum_to_half_a_step_each(values, size):
    unit = FRACTION * 2.0 ** min(size, 0)
    clients = {
        f"client {number}": 2.0**size * torch.tensor(own, dtype=torch.float64) for number, own in enumerate(values)
    }
    found = opened(sent({n: encoded(own, unit, len(clients)) for n, own in clients.items()}).values(), unit)
    exact = torch.stack(list(clients.values())).sum(dim=0)
    assert float((found - exact).abs().max()) <= len(values) * (unit / 2 + 1e-15 * 2.0**size)


@given(words, words)
def test_one_clients_data_changes_nothing_in_anothers_reply(before, after):
    one, two = (dict.fromkeys(NAMES, own) | {"bob": bobs} for own, bobs in ((before, before), (before, after)))
    for name in set(NAMES) - {"bob"}:
        assert np.array_equal(sent(one)[name], sent(two)[name])
    assert np.array_equal(sent(one)["bob"], sent(two)["bob"]) == np.array_equal(before, after)


def bits(own):
    return np.unpackbits(own.view(np.uint8))


def assert_uniform(own):
    """Every bit of 64 is set half of the time and knows nothing of its neighbour, within five standard deviations."""
    columns = bits(own).reshape(len(own), 64).astype(float)
    assert np.abs(columns.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(own))
    flat = columns.reshape(-1)
    assert abs(np.mean(flat[1:] == flat[:-1]) - 0.5) < 5 * 0.5 / np.sqrt(len(flat))


def test_every_sum_of_fewer_than_all_is_noise_and_the_sum_of_all_is_not():
    replies = sent(truths())
    for size in range(1, len(NAMES)):
        for chosen in itertools.combinations(NAMES, size):
            assert_uniform(sum(replies[name] for name in chosen))
    assert np.array_equal(sum(replies.values()), sum(truths().values()))
    with pytest.raises(AssertionError):
        assert_uniform(sum(replies.values()))


@pytest.mark.parametrize("other", [{"seed": "another"}, {"purpose": "message 1"}])
def test_another_key_or_message_shares_no_bits(other):
    one, two = sent(truths()), sent(truths(), **other)
    for name in NAMES:
        agreement = np.mean(bits(one[name]) == bits(two[name]))
        assert abs(agreement - 0.5) < 5 * 0.5 / np.sqrt(64 * 4096)
        assert_uniform(one[name] - two[name])  # nor does their difference tell anything


def test_the_same_message_again_is_the_same_reply():
    """A lost reply is asked for again: another mask on the same numbers would give both away to whoever subtracts."""
    assert all(np.array_equal(sent(truths())[name], sent(truths())[name]) for name in NAMES)


def test_pairs_have_keys_of_their_own():
    keys = shared_keys(NAMES, "a seed")
    pairs = {keys[one][two] for one, two in itertools.combinations(NAMES, 2)}
    assert len(pairs) == 6
    assert all(keys[one][two] == keys[two][one] for one, two in itertools.combinations(NAMES, 2))
    assert not np.array_equal(mask(keys["ada"]["bob"], "m", 8), mask(keys["ada"]["cyd"], "m", 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2 * MOST * FRACTION, -2 * MOST * FRACTION])
def test_what_a_sum_could_not_hold_is_refused_at_the_client(value):
    with pytest.raises(NumericalError, match="cannot be masked"):
        encoded(torch.tensor([1.0, value]), FRACTION, 3)
    with pytest.raises(NumericalError, match="cannot be masked"):
        encoded(torch.tensor([0.9 * MOST * FRACTION]), FRACTION, 9)
