"""How many processes an experiment takes: nobody shares a GPU who was not asked to."""

import os

import pytest

from expunge.bench.workers import processes


@pytest.mark.parametrize(
    ("asked", "device", "count"),
    [(None, "cuda", 1), (1, "cuda", 1), (2, "cuda", 2), (1, "cpu", 1), (2, "cpu", 2), (None, "cpu", 4)],
)
def test_a_gpu_has_one_process_unless_more_are_asked_for(asked, device, count):
    with processes(asked, device) as pool:
        assert pool.count == min(count, os.cpu_count() or 1)
        here = pool.submit(os.getpid).result() == os.getpid()
    assert here == (asked == 1 or (asked is None and device == "cuda"))
