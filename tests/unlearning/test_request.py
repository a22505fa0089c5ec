import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import RequestError
from expunge.unlearning.request import Request

COUNTS = {"ada": 4, "bob": 6, "cyd": 10}


def retained_counts(parties):
    """Samples that each retained client keeps."""
    return {name: parties.counts[name] - len(left_out) for name, left_out in parties.retained.items()}


class TestRequest:
    def test_one_name_several_names_and_duplicates(self):
        assert Request.of("ada").clients == ("ada",)
        assert Request.of(["bob", "ada", "bob"]).clients == ("bob", "ada")
        assert Request.of(samples={"ada": [3, 1, 3, 1]}).samples == {"ada": (1, 3)}

    @pytest.mark.parametrize("indices", [np.array([2, 0]), torch.tensor([2, 0]), range(0, 3, 2), (2, 0)])
    def test_indices_of_any_kind(self, indices):
        assert Request.of(samples={"ada": indices}).samples == {"ada": (0, 2)}
        assert all(type(index) is int for index in Request.of(samples={"ada": indices}).samples["ada"])

    @pytest.mark.parametrize("indices", [[True, False], np.array([True, False]), torch.tensor([True]), [0.5], ["0"]])
    def test_masks_and_fractions_are_refused(self, indices):
        """A mask would otherwise be read as the samples 0 and 1."""
        with pytest.raises(RequestError, match="Samples are named by"):
            Request.of(samples={"ada": indices})

    @pytest.mark.parametrize("samples", ["auto", 10_000, [1, 2]])
    def test_what_is_not_by_client_is_refused_and_curvature_samples_are_named(self, samples):
        with pytest.raises(RequestError, match=r"given by client.* curvature_samples"):
            Request.of("ada", samples=samples)

    def test_indices_are_a_list(self):
        with pytest.raises(RequestError, match="client 'ada' are given as a list of whole numbers"):
            Request.of(samples={"ada": 3})

    def test_nothing_to_forget_is_refused(self):
        with pytest.raises(RequestError, match="nothing to forget"):
            Request.of()
        with pytest.raises(RequestError, match="nothing to forget"):
            Request.of([], {})
        with pytest.raises(RequestError, match="no samples of client 'ada'"):
            Request.of(samples={"ada": []})
        with pytest.raises(RequestError, match="no samples of client 'ada'"):
            Request.of("bob", samples={"ada": []})

    def test_a_client_and_its_samples_is_refused(self):
        with pytest.raises(RequestError, match="choose one"):
            Request.of("ada", samples={"ada": [0]})


class TestParties:
    def test_whole_clients(self):
        parties = Request.of("bob").parties(COUNTS)
        assert parties.leaving == ("bob",)
        assert parties.partly == {}
        assert parties.retained == {"ada": (), "cyd": ()}
        assert parties.owners == {"bob": None}
        assert parties.forgotten_counts == {"bob": 6}
        assert retained_counts(parties) == {"ada": 4, "cyd": 10}
        assert parties.mass == pytest.approx(6 / 20)

    def test_samples_and_a_client(self):
        parties = Request.of("ada", samples={"cyd": [9, 0, 5]}).parties(COUNTS)
        assert parties.leaving == ("ada",)
        assert parties.partly == {"cyd": (0, 5, 9)}
        assert parties.retained == {"bob": (), "cyd": (0, 5, 9)}
        assert parties.owners == {"ada": None, "cyd": (0, 5, 9)}
        assert parties.forgotten_counts == {"ada": 4, "cyd": 3}
        assert retained_counts(parties) == {"bob": 6, "cyd": 7}
        assert parties.mass == pytest.approx(7 / 20)

    def test_samples_that_empty_a_client_are_the_whole_client(self):
        by_samples = Request.of(samples={"ada": range(4)}).parties(COUNTS)
        assert by_samples == Request.of("ada").parties(COUNTS)
        almost = Request.of(samples={"ada": range(3)}).parties(COUNTS)
        assert almost.leaving == ()
        assert retained_counts(almost)["ada"] == 1

    def test_a_client_of_whom_only_a_vector_is_left(self):
        parties = Request.of("zoe").parties(COUNTS, remembered=["ada", "zoe"])
        assert parties.leaving == ("zoe",)
        assert parties.retained == dict.fromkeys(COUNTS, ())
        assert parties.forgotten_counts == {}
        with pytest.raises(RequestError, match="'zoe' cannot be reached"):
            Request.of(samples={"zoe": [0]}).parties(COUNTS, remembered=["zoe"])

    @pytest.mark.parametrize(
        "request_", [Request.of("zoe"), Request.of(["ada", "zoe"]), Request.of("zo", {"ada": [0]})]
    )
    def test_unknown_clients_are_refused_with_the_known_ones(self, request_):
        with pytest.raises(RequestError, match="there are ada, bob, cyd, eve"):
            request_.parties(COUNTS, remembered=["eve", "ada"])
        with pytest.raises(RequestError, match="no client 'zoe'"):
            Request.of(samples={"zoe": [0]}).parties(COUNTS)

    @pytest.mark.parametrize("indices", [[4], [0, 4], [-1], [-1, 2], [10**9]])
    def test_foreign_and_negative_indices_are_refused(self, indices):
        with pytest.raises(RequestError, match="'ada' has samples 0 to 3 only"):
            Request.of(samples={"ada": indices}).parties(COUNTS)

    @pytest.mark.parametrize(
        "request_",
        [
            Request.of(list(COUNTS)),
            Request.of(["ada", "bob"], samples={"cyd": range(10)}),
            Request.of(samples={name: range(count) for name, count in COUNTS.items()}),
        ],
    )
    def test_every_client_is_refused(self, request_):
        with pytest.raises(RequestError, match="every client"):
            request_.parties(COUNTS, remembered=["zoe"])

    @settings(deadline=None)
    @given(st.data())
    def test_every_sample_is_forgotten_or_retained(self, data):
        counts = {f"c{i}": data.draw(st.integers(1, 8)) for i in range(data.draw(st.integers(2, 5)))}
        samples = {
            name: data.draw(st.sets(st.integers(0, count - 1), min_size=1))
            for name, count in counts.items()
            if data.draw(st.booleans())
        }
        leaving = [name for name in counts if name not in samples and data.draw(st.booleans())]
        whole = [*leaving, *(name for name in samples if len(samples[name]) == counts[name])]
        if not (leaving or samples) or len(whole) == len(counts):
            with pytest.raises(RequestError):
                Request.of(leaving, samples).parties(counts)
            return
        parties = Request.of(leaving, samples).parties(counts)
        assert set(parties.leaving) == set(whole)
        assert set(parties.retained) == set(counts) - set(whole)
        forgotten = sum(parties.forgotten_counts.values())
        assert forgotten + sum(retained_counts(parties).values()) == sum(counts.values())
        assert parties.mass == pytest.approx(forgotten / sum(counts.values()))
        assert all(count > 0 for count in retained_counts(parties).values())
