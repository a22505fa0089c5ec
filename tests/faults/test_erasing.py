"""Two hundred kills inside `expunge forget --erase`, and kills of those who tidy up after a kill."""

from bench.test_erasing import outcome_of


def test_two_hundred_at_random_moments_of_the_command(tmp_path):
    counts = outcome_of(tmp_path, "random", 200)
    print(f"    200 kills: {counts}")
    assert sum(counts.values()) == 200
    assert min(counts.values()) > 0


def test_before_each_operation_of_an_erasure_and_of_tidying_up_after_it(tmp_path):
    counts = outcome_of(tmp_path, "twice", 1)
    print(f"    twice: {counts}")
    assert min(counts.values()) > 100
