import pytest
import torch

from expunge.data import Mislabelling, mislabel
from expunge.errors import RequestError

LABELS = torch.arange(600) % 5


def test_so_many_labels_are_wrong_and_the_others_stay():
    changed, mask = mislabel(LABELS, 0.3, classes=5, seed=1)
    assert int(mask.sum()) == 180
    assert torch.equal(changed != LABELS, mask), "a wrong label is never the right one"
    assert torch.equal(LABELS, torch.arange(600) % 5), "the originals stay"


def test_every_wrong_label_is_alike_likely():
    changed, _ = mislabel(torch.zeros(4000, dtype=torch.int64), 1.0, classes=5, seed=2)
    counts = torch.bincount(changed, minlength=5)
    assert counts[0] == 0
    assert all(900 < int(count) < 1100 for count in counts[1:])


def test_the_seed_decides():
    first, again, other = (mislabel(LABELS, 0.5, classes=5, seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.5}, {"boost": 0.0}, {"boost": float("inf")}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(RequestError, match="Choose a"):
        Mislabelling(**wrong)


def test_one_class_has_no_wrong_label():
    with pytest.raises(RequestError, match="two classes"):
        mislabel(torch.zeros(3, dtype=torch.int64), 0.5, classes=1, seed=0)
