"""Three hundred kills inside `expunge request`, on digits; and a hundred thousand flipped bits."""

import pytest

from expunge.errors import DataError, ExpungeError
from expunge.ledger.log import checked_events
from expunge.ledger.receipt import verified
from ledger.flips import flipped
from ledger.places import QUICK, Place
from ledger.test_dying import deaths


def test_three_hundred_at_random_moments_of_the_commands(tmp_path):
    died = deaths(tmp_path, "random", 300, "digits")
    print(f"    300 tries, {died} kills, every second time of who goes on, too")
    assert died > 300


def test_before_every_fifth_file_operation(tmp_path):
    died = deaths(tmp_path, "operations", 5)
    print(f"    {died} deaths")
    assert died > 100


def test_a_hundred_thousand_flipped_bits(tmp_path):
    place = Place(tmp_path / "place")
    number = place.ask("bob")
    place.work(QUICK).run([number])
    place.close(number)
    folder, key = place.folder / "ledger", place.ledger.key
    receipt, log = (folder / "receipts" / f"{number}.intoto.jsonl").read_bytes(), (folder / "log.jsonl").read_bytes()
    for changed in flipped(receipt, 60_000, seed=5):
        with pytest.raises(DataError):
            verified(changed, key, "it")
    for changed in flipped(log, 40_000, seed=6):
        with pytest.raises(ExpungeError):
            checked_events(changed, key, "it")
