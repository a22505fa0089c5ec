import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.data import dirichlet
from expunge.errors import RequestError


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    clients = draw(st.integers(1, 12))
    minimum = draw(st.integers(0, 8))
    # Down to exactly clients * minimum samples, where only the repair can succeed.
    samples = clients * minimum + draw(st.integers(0, 60))
    labels = draw(st.lists(st.integers(0, 4), min_size=samples, max_size=samples))
    alpha = draw(st.sampled_from([1e-12, 1e-3, 0.1, 0.5, 1.0, 100.0, 1e9]))
    seed = draw(st.integers(0, 2**32))
    return {
        "labels": torch.tensor(labels, dtype=torch.int64),
        "clients": clients,
        "alpha": alpha,
        "seed": seed,
        "minimum": minimum,
    }


@settings(deadline=None)  # a busy machine is no failure
@given(problems())
def test_every_split_is_disjoint_complete_large_enough_and_repeatable(problem: dict[str, object]) -> None:
    parts = dirichlet(**problem)
    labels = problem["labels"]
    assert len(parts) == problem["clients"]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
    for part, again in zip(parts, dirichlet(**problem), strict=True):
        assert part.dtype == torch.int64
        assert len(part) >= problem["minimum"]
        assert torch.equal(part, part.sort().values)
        assert torch.equal(part, again)


def skew(labels: torch.Tensor, parts: list[torch.Tensor]) -> float:
    """Mean share of a client's most frequent class."""
    shares = [torch.bincount(labels[part]).max() / len(part) for part in parts]
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize("seed", range(5))
def test_smaller_alpha_is_more_skewed(seed: int) -> None:
    labels = torch.arange(5000) % 10
    skews = [skew(labels, dirichlet(labels, 10, alpha, seed)) for alpha in (0.05, 0.5, 5.0, 1000.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[-1] < 0.15


def test_other_seeds_give_other_splits() -> None:
    labels = torch.arange(200) % 10
    first, second = (dirichlet(labels, 4, 0.5, seed) for seed in (0, 1))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_labels_need_not_be_consecutive() -> None:
    labels = torch.tensor([3, 90, 3, 90, -1, -1] * 10)
    parts = dirichlet(labels, clients=3, alpha=1.0, seed=0, minimum=2)
    assert sum(len(part) for part in parts) == 60


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clients": 0}, "at least one client"),
        ({"minimum": -1}, "no negative minimum"),
        ({"alpha": 0.0}, "alpha above 0"),
        ({"alpha": float("nan")}, "alpha above 0"),
        ({"alpha": float("inf")}, "alpha above 0"),
        ({"minimum": 26}, "fewer clients or a smaller minimum"),
        ({"labels": torch.zeros(100)}, "one integer a sample"),
        ({"labels": torch.zeros(100, 2, dtype=torch.int64)}, "one integer a sample"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], sentence: str) -> None:
    problem = {"labels": torch.zeros(100, dtype=torch.int64), "clients": 4, "alpha": 0.5, "seed": 0}
    with pytest.raises(RequestError, match=sentence):
        dirichlet(**problem | change)
