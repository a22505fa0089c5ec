"""Second moments by halves are those of whole numbers."""

import pytest
import torch

from expunge.core import moments
from expunge.core.moments import ROWS, by_halves, second_moments


def long(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * torch.logspace(0, -3, width)


@pytest.mark.parametrize("kept", ["by row", "by column"])
@pytest.mark.parametrize("at_once", [1, 1 << 29])
def test_halves_are_the_whole(kept, at_once, monkeypatch):
    monkeypatch.setattr(moments, "NUMBERS", at_once)
    rows = long(3 * ROWS, 41)
    rows = rows if kept == "by row" else rows.T.contiguous().T
    exact = rows.double().T @ rows.double()
    scale = exact.diagonal().sqrt()
    error = (by_halves(rows).double() - exact) / (scale[:, None] * scale)
    assert error.abs().max() < 1e-6


def test_the_first_half_is_what_tensor_cores_see(monkeypatch):
    """Rounded to 11 bits as they do, products stay as near; without the second half they would not."""

    def rounded(own):
        return (own.view(torch.int32) + (1 << 12) & moments.HIGH).view(torch.float32)

    def cores(left, right):
        return torch.matmul(rounded(left.contiguous()), rounded(right.contiguous()))

    rows = long(ROWS, 30)
    monkeypatch.setattr(torch, "bmm", cores)
    exact = rows.double().T @ rows.double()
    scale = exact.diagonal().sqrt()
    assert ((by_halves(rows) - exact) / (scale[:, None] * scale)).abs().max() < 1e-6
    coarse = rounded(rows).T @ rounded(rows)
    assert ((coarse - exact) / (scale[:, None] * scale)).abs().max() > 1e-6


def test_precision_is_left_as_it_was():
    before = torch.backends.cuda.matmul.fp32_precision
    by_halves(long(ROWS, 3))
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_few_rows_and_other_numbers_are_multiplied_as_they_are():
    for rows in (long(7, 3), long(ROWS + 5, 3).double()):
        assert torch.equal(second_moments(rows), rows.T @ rows)


@pytest.mark.parametrize("at_once", [1, 1 << 27])
def test_long_ones_are_halved_part_by_part(at_once, monkeypatch):
    rows = long(5 * ROWS + 7, 6)
    monkeypatch.setattr(moments, "WORTHWHILE", 1)
    monkeypatch.setattr(moments, "HALVED", at_once)
    monkeypatch.setattr(moments, "_has_tensor_cores", lambda _: True)
    assert torch.allclose(second_moments(rows), rows.T @ rows, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor cores are a GPU's")
@pytest.mark.parametrize("width", [512, 2049])
def test_on_a_gpu_it_is_as_near(width):
    rows = long(40 * ROWS + 3, width).cuda()
    exact = rows.double().T @ rows.double()
    scale = exact.diagonal().sqrt()
    assert ((second_moments(rows) - exact) / (scale[:, None] * scale)).abs().max() < 1e-5
