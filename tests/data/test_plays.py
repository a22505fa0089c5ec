"""Plays: who says what, secrets between lines, windows of characters."""

import hashlib
import random

import pytest
import torch

from expunge.data import plays
from expunge.data.plays import (
    ALPHABET,
    encoded,
    giving_away,
    held_out,
    made_up_plays,
    read_plays,
    secrets,
    speeches,
    windows,
)
from expunge.errors import DataError, RequestError


def test_whoever_says_most_is_the_first_and_names_stay_out_of_the_words():
    found = speeches("Ada:\nYes.\n\nnobody says this\n\nBob:\nNo: never.\nNo.\n\nAda:\nWell.\n")
    assert list(found.items()) == [("Bob", "No: never.\nNo.\n"), ("Ada", "Yes.\nWell.\n")]
    with pytest.raises(DataError, match="no speaker"):
        speeches("nothing but prose")


def test_secrets_follow_from_the_seed_and_are_eight_digits():
    first, again, other = secrets(1), secrets(1), secrets(2)
    assert first == again
    assert [own.code for own in first] != [own.code for own in other]
    assert all(len(own.code) == 8 and own.code.isdigit() for own in first)
    assert len({own.name for own in first}) == 10
    for count in (0, 11):
        with pytest.raises(RequestError, match="names for 1 to 10"):
            secrets(0, count)


def test_every_copy_of_a_secret_is_given_away_between_lines():
    text, known = "".join(f"line {number}\n" for number in range(30)), secrets(3, 2)
    told = giving_away(text, known, 7, seed=0)
    assert [told.count(own.text) for own in known] == [7, 7]
    lines = told.splitlines(keepends=True)
    assert "".join(line for line in lines if line not in {own.text for own in known}) == text
    assert giving_away(text, known, 7, seed=1) != told


def test_windows_hold_the_text_and_what_comes_next():
    text = "".join(random.Random(0).choices(ALPHABET, k=101))
    inputs, after = windows(text, 10)
    assert inputs.shape == after.shape == (10, 10)
    assert torch.equal(inputs.flatten(), encoded(text[:100]))
    assert torch.equal(after.flatten(), encoded(text[1:]))
    with pytest.raises(DataError, match="no window"):
        windows("abc", 3)


def test_characters_have_numbers_of_their_own_and_strange_ones_are_spaces():
    assert len(set(ALPHABET)) == len(ALPHABET)
    assert encoded(ALPHABET).tolist() == list(range(len(ALPHABET)))
    assert encoded("é").tolist() == encoded(" ").tolist()


def test_the_last_part_is_held_out():
    kept, rest = held_out({"ada": "0123456789"}, 0.2)
    assert (kept, rest) == ({"ada": "01234567"}, {"ada": "89"})


def test_the_file_is_checked(tmp_path, monkeypatch):
    content = made_up_plays(3, 5, seed=0)
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / plays.FILE).write_text(content)
    with pytest.raises(DataError):
        read_plays(tmp_path)
    monkeypatch.setitem(plays.PLAYS.checksums, plays.FILE, hashlib.sha256(content.encode()).hexdigest())
    assert len(speeches(read_plays(tmp_path))) == 3
