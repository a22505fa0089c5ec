import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.data import Backdoor, poison, stamp
from expunge.errors import RequestError

WHITE = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(("side", "margin"), [(8, 0), (15, 0), (16, 1), (32, 1)])
def test_square_lies_in_the_bottom_right_corner(side: int, margin: int) -> None:
    stamped = stamp(torch.zeros(2, 3, side, side), Backdoor(size=4), WHITE)
    expected = torch.zeros(2, 3, side, side)
    end = side - margin
    expected[:, :, end - 4 : end, end - 4 : end] = WHITE[:, None, None]
    assert torch.equal(stamped, expected)


def test_stamping_leaves_the_original_and_is_idempotent() -> None:
    inputs = torch.randn(3, 3, 16, 16)
    original = inputs.clone()
    once = stamp(inputs, Backdoor(), WHITE)
    assert torch.equal(inputs, original)
    assert torch.equal(stamp(once, Backdoor(), WHITE), once)
    assert stamp(inputs.double(), Backdoor(), WHITE).dtype == torch.float64


@settings(deadline=None)  # a busy machine is no failure
@given(
    labels=st.lists(st.integers(0, 9), max_size=30),
    fraction=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**32),
)
def test_poisoned_samples_are_stamped_and_relabelled_and_no_others(
    labels: list[int], fraction: float, seed: int
) -> None:
    inputs, classes = torch.zeros(len(labels), 3, 8, 8), torch.tensor(labels, dtype=torch.int64)
    backdoor = Backdoor(fraction=fraction)
    poisoned, relabelled, mask = poison(inputs, classes, backdoor, WHITE, seed)
    available = sum(label != backdoor.target for label in labels)
    assert int(mask.sum()) == min(round(fraction * len(labels)), available)
    assert not (mask & (classes == backdoor.target)).any()
    assert (relabelled[mask] == backdoor.target).all()
    assert torch.equal(relabelled[~mask], classes[~mask])
    assert torch.equal(poisoned[mask], stamp(inputs[mask], backdoor, WHITE))
    assert torch.equal(poisoned[~mask], inputs[~mask])
    assert not inputs.any()
    assert classes.tolist() == labels
    assert torch.equal(poison(inputs, classes, backdoor, WHITE, seed)[2], mask)


def test_seed_decides_which() -> None:
    inputs, labels = torch.zeros(50, 3, 8, 8), torch.zeros(50, dtype=torch.int64)
    first, second = (poison(inputs, labels, Backdoor(), WHITE, seed)[2] for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"target": -1},
        {"size": 0},
        {"fraction": 0.0},
        {"fraction": 1.1},
        {"fraction": float("nan")},
        {"boost": 0.0},
        {"boost": float("inf")},
        {"share": -0.1},
        {"share": float("nan")},
    ],
)
def test_bad_values_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="Choose"):
        Backdoor(**change)


@pytest.mark.parametrize(
    ("shape", "size"), [((1, 3, 8, 8), 9), ((1, 3, 16, 16), 16), ((1, 1, 8, 8), 2), ((3, 8, 8), 2)]
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(RequestError):
        stamp(torch.zeros(shape), Backdoor(size=size), WHITE)


def test_labels_must_match_images() -> None:
    with pytest.raises(RequestError, match="one label an image"):
        poison(torch.zeros(2, 3, 8, 8), torch.zeros(3, dtype=torch.int64), Backdoor(), WHITE, seed=0)
