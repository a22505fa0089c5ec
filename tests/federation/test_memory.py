import json
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ExpungeError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.tensor_file import write_tensors
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, FedAvgM, Recipe
from federation.small import clients, linear, norm_net

SIZE = 3


def updates_of(names, rounds, seed):
    """Each round's updates by client."""
    source = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(SIZE, generator=source, dtype=torch.float64) for name in names} for _ in range(rounds)]


def recorded(rounds, weights):
    memory = Memory()
    for updates in rounds:
        memory.record(updates, {name: weights[name] for name in updates})
    return memory


def mean_of(updates, weights, without=()):
    """The mean of a round's updates; where nobody is left the model stays where it is."""
    left = {name: update for name, update in updates.items() if name not in without and weights[name] > 0}
    total = sum(weights[name] for name in left)
    return sum((weights[n] / total * own for n, own in left.items()), torch.zeros(SIZE, dtype=torch.float64))


def by_training_twice(rounds, weights, *names):
    """A_u as two trainings tell it in which nobody answers: nothing of it is shared with the code."""
    return sum(mean_of(updates, weights) - mean_of(updates, weights, names) for updates in rounds)


def vector(memory, name):
    """What a client added to the means, by what the memory says in public: A_u (1 - w_u)."""
    return memory.influence([name]) * (1 - memory.mass([name]))


@st.composite
def federations(draw, least=2):
    names = [f"client-{i}" for i in range(draw(st.integers(least, 6)))]
    weights = {name: draw(st.integers(1, 1000)) for name in names}
    return names, weights, updates_of(names, draw(st.integers(1, 5)), draw(st.integers(0, 1000)))


@st.composite
def partial_federations(draw):
    names, weights, rounds = draw(federations(least=3))
    taken = [draw(st.sets(st.sampled_from(names), min_size=1)) for _ in rounds]
    return (
        names,
        weights,
        [{n: u[n] for n in names if n in chosen} for u, chosen in zip(rounds, taken, strict=True)],
    )


class TestWhatIsKept:
    def test_two_rounds_by_hand(self):
        memory = Memory()
        memory.record({"a": torch.tensor([1.0]), "b": torch.tensor([5.0])}, {"a": 3, "b": 1})  # mean 2
        memory.record({"a": torch.tensor([4.0]), "c": torch.tensor([0.0])}, {"a": 1, "c": 1})  # mean 2
        assert memory.mass(["a"]) == pytest.approx(5 / 8)
        # Without a the means are 5 and 0, without b they are 1 and 2, without c 2 and 4.
        assert [memory.influence([name]).item() for name in "abc"] == pytest.approx([-3 + 2, 1, -2])
        assert memory.clients == ("a", "b", "c")
        assert memory.rounds == 2

    @settings(deadline=None)
    @given(partial_federations())
    def test_the_difference_of_two_trainings_and_nothing_in_a_missed_round(self, federation):
        """Whatever a client's weight in each round, in rounds of its own too, as long as others took part at all."""
        _, weights, rounds = federation
        memory = recorded(rounds, weights)
        assert set(memory.clients) == {name for updates in rounds for name in updates}
        for name in memory.clients:
            torch.testing.assert_close(memory.vectors[name], by_training_twice(rounds, weights, name))
            if any(set(updates) - {name} for updates in rounds):
                torch.testing.assert_close(memory.influence([name]), by_training_twice(rounds, weights, name))

    @pytest.mark.parametrize("share", [0.0, 1e-12, 0.01, 0.99, 1 - 1e-6, 1 - 1e-12])
    def test_of_any_weight_in_single_precision(self, share):
        (updates,) = updates_of("abc", 1, seed=3)
        weights = {"a": share, "b": (1 - share) / 3, "c": (1 - share) * 2 / 3}
        memory = Memory()
        memory.record({name: update.float() for name, update in updates.items()}, weights)
        exact = mean_of(updates, weights) - (mean_of(updates, weights, "a") if share < 1 - 1e-9 else 0)
        torch.testing.assert_close(memory.vectors["a"].double(), exact, rtol=1e-5, atol=1e-7)

    @settings(deadline=None)
    @given(partial_federations())
    def test_what_the_pulls_of_a_round_say_about_each_other_adds_up_to_zero(self, federation):
        _, weights, rounds = federation
        for updates in (updates for updates in rounds if len(updates) > 1):
            memory = recorded([updates], weights)
            left = [(1 - memory.mass([name])) * vector for name, vector in memory.vectors.items()]
            torch.testing.assert_close(sum(left), torch.zeros(SIZE, dtype=torch.float64), atol=1e-12, rtol=0)

    def test_a_missed_round_changes_nothing_of_the_absent(self):
        memory = recorded(updates_of("abc", 2, seed=0), {"a": 1, "b": 2, "c": 3})
        before = memory.vectors["a"].clone()
        memory.record(updates_of("bc", 1, seed=1)[0], {"b": 2, "c": 3})
        assert torch.equal(memory.vectors["a"], before)
        assert memory.mass(["a"]) == pytest.approx(1 / 6)

    @settings(deadline=None)
    @given(federations())
    def test_weights_are_in_any_unit(self, federation):
        _, weights, rounds = federation
        name = next(iter(weights))
        one, other = (recorded(rounds, {n: w * unit for n, w in weights.items()}) for unit in (1, 0.001))
        torch.testing.assert_close(one.influence([name]), other.influence([name]))

    def test_after_training_it_is_the_formula_of_what_the_clients_sent(self):
        data = clients(a=4, b=7, c=9)
        model = linear()
        plan = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.3)
        state = train(LocalEngine(model, CrossEntropy(), data, {"b": 3.0}), Snapshot.of(model), plan)
        engine = LocalEngine(model, CrossEntropy(), data, {"b": 3.0})
        here, total = Snapshot.of(model), torch.zeros(12, dtype=torch.float64)
        for number in range(3):
            sent = {name: engine.ask({name: plan.task(here, number, name)})[name].update for name in data}
            mean = (4 * sent["a"] + 7 * sent["b"] + 9 * sent["c"]) / 20
            total = total + 7 / 20 * (sent["b"] - mean)
            here = here.moved(here.parameters + mean)
        torch.testing.assert_close(here.parameters, state.model.parameters)
        torch.testing.assert_close(state.memory.influence(["b"]), total / (13 / 20))
        assert state.memory.stored_bytes == 3 * 3 * 12 * 8  # a small model's three rounds are kept apart


class TestStretches:
    """When a client pulled: one vector for a few rounds each, where it matters or costs nothing."""

    @pytest.mark.parametrize(
        ("size", "recipe", "kept"),
        [
            (1000, Recipe(), 4),
            (1001, Recipe(), 1),
            (1001, Recipe(server=FedAvgM(1.0, 0.0)), 1),
            (1001, Recipe(server=FedAvgM(1.0, 0.5)), 4),
        ],
    )
    def test_of_small_models_and_under_server_momentum(self, size, recipe, kept):
        start = Snapshot(torch.zeros(size, dtype=torch.float64), {})
        apart, together = Memory(start, recipe), Memory()
        for updates in updates_of("abc", 8, seed=0):
            longer = {name: torch.cat([update, update.new_zeros(size - SIZE)]) for name, update in updates.items()}
            for memory in (apart, together):
                memory.record(longer, {"a": 1, "b": 2, "c": 3}, learning_rate=0.1, steps=2)
        vectors, spreads = apart.pulls(["a"], None)
        assert len(vectors) == len(spreads) == kept
        torch.testing.assert_close(vectors.sum(dim=0), together.influence(["a"]))
        torch.testing.assert_close(apart.influence(["a"]), together.influence(["a"]))
        assert apart.stored_bytes == kept * together.stored_bytes

    def test_each_row_is_the_pull_of_its_rounds_spread_by_their_lengths(self):
        rounds, weights = updates_of("abc", 8, seed=1), {"a": 1, "b": 2, "c": 3}
        memory = Memory(Snapshot(torch.zeros(SIZE, dtype=torch.float64), {}))
        for updates in rounds:
            memory.record(updates, weights, learning_rate=0.1, steps=2)
        vectors, spreads = memory.pulls(["a"], None)
        for row in range(4):
            own = rounds[2 * row : 2 * row + 2]
            torch.testing.assert_close(vectors[row], by_training_twice(own, weights, "a"))
            lengths = torch.stack([by_training_twice([each], weights, "a").norm() for each in own])
            expected = torch.zeros(8, dtype=torch.float64)
            expected[2 * row : 2 * row + 2] = lengths / lengths.sum()
            torch.testing.assert_close(spreads[row], expected)


class TestLoudness:
    def test_is_the_length_of_pulls_by_weight_beside_the_median_of_those_who_stay(self):
        memory = Memory()
        for number in range(2):
            own = {"a": 9.0, "b": -3.0, "c": 2.0, "d": -1.0}
            memory.record(
                {name: torch.tensor([value + number], dtype=torch.float64) for name, value in own.items()},
                {"a": 1, "b": 2, "c": 1, "d": 4},
            )
        # The mean is (9 - 6 + 2 - 4) / 8 = 1/8, so a pull by weight is |value - 1/8|, in every round.
        strengths = {name: abs(value - 1 / 8) for name, value in own.items()}
        assert memory.loudness(["a"]) == pytest.approx(strengths["a"] / strengths["c"])  # of 3.125, 1.875, 1.125
        others = (strengths["c"] + strengths["d"]) / 2
        assert memory.loudness(["a", "b"]) == pytest.approx(strengths["a"] / others)
        assert memory.loudness(["d"]) < 1

    def test_is_one_where_nothing_is_known(self):
        memory = Memory()
        memory.record({"a": torch.ones(2), "b": torch.ones(2)}, {"a": 1, "b": 1})
        assert memory.loudness(["a"]) == 1.0  # nobody pulled
        assert memory.loudness(["zoe"]) == 1.0
        assert memory.loudness(["a", "b"]) == 1.0


class TestWithout:
    @given(federations(least=3), st.data())
    @settings(deadline=None)
    def test_equals_never_having_taken_part(self, federation, data):
        """With constant weights: a memory rebuilt from the same updates without those clients."""
        names, weights, rounds = federation
        gone = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names) - 2, unique=True))
        left = recorded(rounds, weights).without(gone)
        rebuilt = recorded([{n: u for n, u in updates.items() if n not in gone} for updates in rounds], weights)
        assert left.clients == rebuilt.clients
        assert left.rounds == rebuilt.rounds
        for name in rebuilt.clients:
            torch.testing.assert_close(left.vectors[name], rebuilt.vectors[name], rtol=1e-7, atol=1e-9)
            assert left.mass([name]) == pytest.approx(rebuilt.mass([name]))

    @given(federations(least=5))
    @settings(max_examples=20, deadline=None)
    def test_the_order_of_leaving_does_not_matter(self, federation):
        names, weights, rounds = federation
        memory = recorded(rounds, weights)
        together = memory.without(names[:3])
        for order in permutations(names[:3]):
            one_by_one = memory
            for name in order:
                one_by_one = one_by_one.without([name])
            assert one_by_one.clients == together.clients
            for name in together.clients:
                torch.testing.assert_close(one_by_one.vectors[name], together.vectors[name], rtol=1e-7, atol=1e-9)

    @settings(deadline=None)
    @given(federations(least=3))
    def test_influences_of_one_after_another_add_up(self, federation):
        names, weights, rounds = federation
        memory = recorded(rounds, weights)
        first, second = names[:2]
        one_by_one = memory.influence([first]) + memory.without([first]).influence([second])
        torch.testing.assert_close(one_by_one, memory.influence([first, second]), rtol=1e-7, atol=1e-8)

    @settings(deadline=None)
    @given(partial_federations(), st.data())
    def test_under_partial_participation_it_stays_finite_and_leaves_strangers_alone(self, federation, data):
        _, weights, rounds = federation
        memory = recorded(rounds, weights)
        gone = data.draw(st.sampled_from(memory.clients))
        left = memory.without([gone])
        assert gone not in left.clients
        assert all(torch.isfinite(kept).all() for kept in left.vectors.values())
        for name in left.clients:
            if not any(gone in updates and name in updates for updates in rounds):
                assert torch.equal(left.vectors[name], memory.vectors[name])

    def test_a_client_that_was_always_alone_can_leave(self):
        """Its weight is 1 in each of its rounds: the others have nothing to correct."""
        memory = Memory()
        memory.record({"a": torch.ones(2)}, {"a": 5})
        memory.record({"b": torch.ones(2), "c": torch.zeros(2)}, {"b": 5, "c": 5})
        left = memory.without(["a"])
        assert left.clients == ("b", "c")
        assert left.rounds == 1
        assert torch.equal(left.vectors["b"], memory.vectors["b"])

    @pytest.mark.parametrize("weights", [{"ada": 1, "bob": 1}, {"ada": 1, "bob": 3}])
    def test_of_two_who_were_always_alone_together_nothing_is_left_of_one_in_the_others_vector(self, weights):
        """Its vector is the leaver's, turned round: nothing of its own is known without the leaver."""
        memory, chance = Memory(), torch.Generator().manual_seed(0)
        for _ in range(3):
            memory.record({name: torch.randn(6, generator=chance) for name in weights}, weights)
        gone, left = memory.vectors["ada"], memory.without(["ada"])
        assert float(torch.nn.functional.cosine_similarity(gone, memory.vectors["bob"], dim=0)) == pytest.approx(-1)
        assert not left.vectors["bob"].any()
        assert left.clients == ("bob",)

    def test_the_memory_itself_is_left_alone(self):
        memory = recorded(updates_of("abc", 2, seed=0), {"a": 1, "b": 2, "c": 3})
        before = {name: kept.clone() for name, kept in memory.vectors.items()}
        memory.without(["a"]).record(updates_of("bc", 1, seed=1)[0], {"b": 1, "c": 1})
        memory.copy().record(updates_of("abc", 1, seed=1)[0], {"a": 1, "b": 1, "c": 1})
        assert memory.clients == ("a", "b", "c")
        assert memory.rounds == 2
        assert all(torch.equal(memory.vectors[name], kept) for name, kept in before.items())


class TestRefusals:
    def test_unknown_clients_with_the_known_ones_listed(self):
        memory = recorded(updates_of("ab", 1, seed=0), {"a": 1, "b": 1})
        with pytest.raises(RequestError, match=r"'zoe'.*there are: a, b"):
            memory.influence(["a", "zoe"])
        with pytest.raises(RequestError, match="none"):
            Memory().influence(["zoe"])
        with pytest.raises(RequestError, match="at least one"):
            memory.influence([])

    @settings(deadline=None)
    @given(federations())
    def test_the_whole_federation_in_spite_of_rounding(self, federation):
        """Shares add up to 0.9999999999999999 as often as to 1."""
        names, weights, rounds = federation
        with pytest.raises(RequestError, match="whole federation"):
            recorded(rounds, weights).influence(names)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_an_update_that_is_not_finite(self, value):
        memory = recorded(updates_of("ab", 1, seed=0), {"a": 1, "b": 1})
        before = memory.vectors["a"].clone()
        with pytest.raises(DataError, match="client 'b'"):
            memory.record({"a": torch.ones(SIZE).double(), "b": torch.full((SIZE,), value).double()}, {"a": 1, "b": 1})
        assert memory.rounds == 1
        assert torch.equal(memory.vectors["a"], before)

    @pytest.mark.parametrize(
        "weights",
        [
            {"a": 1},
            {"a": 1, "b": 1, "c": 1},
            {"a": 0, "b": 0},
            {"a": -1, "b": 2},
            {"a": 1, "b": float("nan")},
            {"a": float("inf"), "b": 1},
            {},
        ],
    )
    def test_weights_that_make_no_average(self, weights):
        memory = Memory()
        with pytest.raises(RequestError, match="weight"):
            memory.record({"a": torch.ones(2), "b": torch.ones(2)}, weights)
        assert memory.rounds == 0

    def test_updates_of_different_lengths(self):
        memory = Memory()
        with pytest.raises(RequestError, match="length"):
            memory.record({"a": torch.ones(2), "b": torch.ones(3)}, {"a": 1, "b": 1})
        memory.record({"a": torch.ones(1), "b": torch.zeros(1)}, {"a": 1, "b": 1})
        with pytest.raises(RequestError, match="length"):
            memory.record({"a": torch.ones(3), "b": torch.ones(3)}, {"a": 1, "b": 1})
        with pytest.raises(RequestError, match="flat vector"):
            memory.record({"a": torch.ones(1, 1), "b": torch.ones(1, 1)}, {"a": 1, "b": 1})

    def test_named_tensors_without_a_model(self):
        with pytest.raises(RequestError, match=r"Memory\(model\)"):
            Memory().record({"a": {"weight": torch.ones(1)}}, {"a": 1})


def test_of_a_training_that_diverges_everything_is_kept_and_checked(tmp_path):
    """Its squares are more than single precision holds: a file that cannot be read again would be a lost memory."""
    memory = Memory(Snapshot(torch.zeros(2), {}))
    memory.record({"ada": torch.tensor([3e25, 4e25]), "bob": torch.tensor([1e25, 0.0])}, {"ada": 1, "bob": 1})
    memory.save(tmp_path / "memory")
    again = Memory.load(tmp_path / "memory")
    assert again.norms(["ada"]) == pytest.approx([(1e25**2 + 2e25**2) ** 0.5])  # (2, 2) - (1, 0)
    again.require_model(Snapshot(torch.tensor([2e25, 2e25]), {}))
    with pytest.raises(RequestError, match="do not lead to this model"):
        again.require_model(Snapshot(torch.tensor([2e25, 1e25]), {}))


def test_named_tensors_equal_flat_vectors_and_buffers_are_passed_over():
    model = norm_net()
    named, flat = Memory(model), Memory(model)
    received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = torch.Generator().manual_seed(0)
    for _ in range(2):
        differences = {}
        for name in ("ada", "bob"):
            sent = {
                key: tensor + torch.randn(tensor.shape, generator=source, dtype=torch.float64)
                for key, tensor in received.items()
            }
            differences[name] = {key: sent[key] - received[key] for key in received}
        named.record(differences, {"ada": 2, "bob": 1})
        by_order = {
            name: torch.cat([difference[key].reshape(-1) for key, _ in model.named_parameters()])
            for name, difference in differences.items()
        }
        flat.record(by_order, {"ada": 2, "bob": 1})
    assert torch.equal(named.influence(["ada"]), flat.influence(["ada"]))
    assert len(named.influence(["ada"])) == Layout.of(model).size < sum(t.numel() for t in received.values())


class TestFile:
    def test_which_parameters_were_chosen_is_read_back(self, tmp_path):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        memory = Memory(net, parameters=["1"])
        memory.record({"ada": torch.ones(3), "bob": torch.zeros(3)}, {"ada": 1, "bob": 1}, learning_rate=0.1, steps=1)
        memory.save(tmp_path / "memory.safetensors")
        assert Memory.load(tmp_path / "memory.safetensors").parameters == ("1.weight", "1.bias")
        Memory(net).save(tmp_path / "other.safetensors")
        assert Memory.load(tmp_path / "other.safetensors").parameters is None

    def test_round_trip(self, tmp_path):
        memory = recorded(updates_of("abc", 3, seed=0), {"a": 1, "b": 2, "c": 3})
        memory.record(updates_of("bc", 1, seed=1)[0], {"b": 1, "c": 1})
        memory.save(tmp_path / "memory.safetensors")
        loaded = Memory.load(tmp_path / "memory.safetensors")
        assert set(loaded.clients) == set(memory.clients)
        assert loaded.rounds == 4
        for names in (["a"], ["b"], ["a", "c"]):
            assert torch.equal(loaded.influence(names), memory.influence(names))
            assert loaded.mass(names) == memory.mass(names)
        left, expected = loaded.without(["a"]), memory.without(["a"])
        assert torch.equal(left.influence(["b"]), expected.influence(["b"]))

    @pytest.mark.parametrize("cut", [0, 4, 100, -1])
    def test_a_damaged_file_is_refused(self, tmp_path, cut):
        path = tmp_path / "memory.safetensors"
        recorded(updates_of("ab", 1, seed=0), {"a": 1, "b": 2}).save(path)
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(DataError, match="cannot be read"):
            Memory.load(path)

    def test_other_files_are_refused(self, tmp_path):
        save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
        save_file({"a": torch.ones(2)}, tmp_path / "odd.safetensors", metadata={"rounds": "not json"})
        for name in ("plain.safetensors", "odd.safetensors", "absent.safetensors"):
            with pytest.raises(DataError, match="cannot be read"):
                Memory.load(tmp_path / name)

    def test_the_departed_leave_no_trace_in_the_bytes(self, tmp_path):
        names = ["ada-lovelace", "bob", "cyd"]
        memory = recorded(updates_of(names, 3, seed=0), dict(zip(names, (5, 7, 11), strict=True)))
        memory.save(tmp_path / "before")
        memory.without(["ada-lovelace"]).save(tmp_path / "after")
        before, after = (tmp_path / "before").read_bytes(), (tmp_path / "after").read_bytes()
        gone = memory.vectors["ada-lovelace"]
        for trace in (b"lovelace", gone.numpy().tobytes(), gone[:1].numpy().tobytes()):
            assert trace in before
            assert trace not in after
        for trace in (-gone, memory.influence(["ada-lovelace"])):
            assert trace.numpy().tobytes() not in after
        # Nor can it be added up again from those of the others: they add up to zero without it.
        left = Memory.load(tmp_path / "after")
        total = torch.stack([vector(left, name) for name in left.clients]).sum(dim=0)
        torch.testing.assert_close(total, torch.zeros(SIZE, dtype=torch.float64), atol=1e-12, rtol=0)
        assert json.dumps(left.shares).count("lovelace") == 0


def test_under_partial_participation_the_correction_is_near_the_exact_one():
    """Exact: the vectors rebuilt round by round without the leaver. The kept ones know mean weights only."""
    generator = torch.Generator().manual_seed(0)
    names = [f"client-{number}" for number in range(10)]
    weights = {name: 1.0 + number % 3 for number, name in enumerate(names)}
    pulls = {name: torch.randn(30, generator=generator).double() for name in names}
    kept, exact = Memory(), Memory()
    for _ in range(60):
        chosen = [names[i] for i in torch.randperm(10, generator=generator)[:5].tolist()]
        updates = {name: pulls[name] + 0.3 * torch.randn(30, generator=generator).double() for name in chosen}
        kept.record(updates, {name: weights[name] for name in chosen})
        rest = [name for name in chosen if name != "client-0"]
        exact.record({name: updates[name] for name in rest}, {name: weights[name] for name in rest})
    after = kept.without(["client-0"])
    corrected = [float((after.vectors[n] - exact.vectors[n]).norm() / exact.vectors[n].norm()) for n in names[1:]]
    untouched = [float((kept.vectors[n] - exact.vectors[n]).norm() / exact.vectors[n].norm()) for n in names[1:]]
    assert max(corrected) < 0.15
    assert sum(corrected) < 0.5 * sum(untouched)


def pulling(names, weights, draws, seed=0):
    """Rounds of a training in which everybody pulls its own way, and that gets shorter."""
    source = torch.Generator().manual_seed(seed)
    common, own = 3 * torch.randn(SIZE, generator=source).double(), torch.randn(len(names), SIZE, generator=source)
    for number, drawn in enumerate(draws):
        noise = torch.randn(len(names), SIZE, generator=source).double()
        updates = {n: (common + own[at] + noise[at]) / (1 + 0.1 * number) for at, n in enumerate(names) if n in drawn}
        yield updates, {name: weights[name] for name in updates}


def drawn(names, count, rounds, seed):
    source = torch.Generator().manual_seed(seed)
    return [[names[at] for at in torch.randperm(len(names), generator=source)[:count].tolist()] for _ in range(rounds)]


class TestTogetherAndOneAfterAnother:
    """What several pulled, in rounds of different members, is told from sums over rounds: about, and it is said."""

    def true(self, rounds, weights, gone, before=()):
        return sum(mean_of(u, weights, before) - mean_of(u, weights, (*before, *gone)) for u, _ in rounds)

    @pytest.mark.parametrize("count", [2, 3, 5])
    @pytest.mark.parametrize("after", [False, True], ids=["together", "one after another"])
    def test_a_doubt_says_about_how_much_is_missed(self, count, after):
        names = ["ada", "bob", "cyd", "dan", "eve", "fay"]
        weights, said = {name: 1.0 + at % 3 for at, name in enumerate(names)}, []
        for seed in range(12):
            rounds = list(pulling(names, weights, drawn(names, count, 20, seed), seed))
            memory = Memory()
            for updates, own in rounds:
                memory.record(updates, own)
            if after:
                memory, gone, before = memory.without(["bob"]), ("ada",), ("bob",)
            else:
                gone, before = ("ada", "bob"), ()
            exact = self.true(rounds, weights, gone, before)
            missed = float((memory.influence(gone) - exact).norm() / exact.norm())
            doubts = memory.doubts(None, gone)
            said.append(bool(doubts))
            assert doubts or missed < 0.4
            assert missed > 0.1 or not doubts
        assert any(said) == (count < 5)

    def test_nothing_is_missed_where_weights_are_the_same_in_every_round(self):
        names = ["ada", "bob", "cyd", "dan"]
        weights = {name: 1.0 + at for at, name in enumerate(names)}
        rounds = list(pulling(names, weights, [names] * 5))
        memory = Memory()
        for updates, own in rounds:
            memory.record(updates, own)
        exact = self.true(rounds, weights, ("ada", "dan"))
        torch.testing.assert_close(memory.influence(["ada", "dan"]), exact)
        assert memory.doubts(None, ("ada", "dan")) == memory.without(["ada"]).doubts(None, ("dan",)) == ()

    def test_rounds_that_leavers_had_to_themselves(self):
        (one, two), others = updates_of("ab", 2, seed=0), updates_of("cd", 1, seed=1)[0]
        memory = Memory()
        for updates in (one, two, others):
            memory.record(updates, dict.fromkeys(updates, 1))
        with pytest.raises(RequestError, match=r"a, b were never in a round with others.*retrain"):
            memory.influence(["a", "b"])
        torch.testing.assert_close(memory.influence(["a"]), (one["a"] - one["b"] + two["a"] - two["b"]) / 2)
        doubt, heavy = memory.without(["a"]).doubts(None, ("b",))  # b's own way was never seen apart
        assert "of the pull of b is not known" in doubt
        assert "b had 100% of the weight" in heavy

    def test_a_round_in_which_the_leaver_counted_nothing_stays_as_it_is(self):
        (first, second), weights = updates_of("abc", 2, seed=0), {"a": 1, "b": 2, "c": 3}
        memory = Memory()
        memory.record(first, weights)
        memory.record(second, {**weights, "a": 0})
        torch.testing.assert_close(memory.influence(["a"]), by_training_twice([first], weights, "a"))
        left = memory.without(["a"])
        assert left.shares[1] == pytest.approx({"b": 2 / 5, "c": 3 / 5})
        assert left._kept[1].pulls == {name: memory._kept[1].pulls[name] for name in "bc"}

    def test_a_doubt_stays_with_the_file(self, tmp_path):
        names, weights = ["ada", "bob", "cyd"], {"ada": 1.0, "bob": 2.0, "cyd": 3.0}
        memory = Memory(Snapshot(torch.zeros(SIZE, dtype=torch.float64), {}))
        for updates, own in pulling(names, weights, drawn(names, 2, 12, 0)):
            memory.record(updates, own)
        left = memory.without(["ada"])
        left.save(tmp_path / "memory")
        assert left.doubts(None, ("bob",))
        assert Memory.load(tmp_path / "memory").doubts(None, ("bob",)) == left.doubts(None, ("bob",))


class TestOlderFiles:
    """Up to version 3 a vector was the sum of ``w (D_u - D)``, which tells pulls where weights are the same."""

    def third_version(self, path, rounds, weights):
        memory, sums = recorded(rounds, weights), {name: torch.zeros(SIZE, dtype=torch.float64) for name in weights}
        kept = json.loads(json.dumps([each.as_dict() for each in memory._kept]))
        for updates, written in zip(rounds, kept, strict=True):
            mean = mean_of(updates, weights)
            for name, share in written["shares"].items():
                sums[name] += share * (updates[name] - mean)
                written["pulls"][name] = float((share * (updates[name] - mean)).norm())
        content = {"clients": list(sums), "rounds": kept, "stretches": [[0, len(rounds)]]}
        tensors = {f"0.{number}": own for number, own in enumerate(sums.values())}
        write_tensors(path, "memory", 3, tensors, {**content, "recipe": Recipe().as_dict()})
        return Memory.load(path), memory

    def test_are_read_where_weights_are_the_same_in_every_round(self, tmp_path):
        read, memory = self.third_version(tmp_path / "old", updates_of("abc", 4, seed=0), {"a": 1, "b": 2, "c": 3})
        for name in "abc":
            torch.testing.assert_close(read.vectors[name], memory.vectors[name])
            assert read.doubts(None, (name,)) == ()
            for one, other in zip(read._kept, memory._kept, strict=True):
                assert one.pulls == pytest.approx(other.pulls)

    def test_say_what_they_do_not_tell(self, tmp_path):
        rounds = [*updates_of("ab", 1, seed=0), *updates_of("abc", 1, seed=1), *updates_of("c", 2, seed=2)]
        read, _ = self.third_version(tmp_path / "old", rounds, {"a": 9, "b": 1, "c": 6})
        assert [name for name in "abc" if read.doubts(None, (name,))] == ["a", "c"]
        read.save(tmp_path / "new")
        assert Memory.load(tmp_path / "new").doubts(None, ("c",))


GIVEN = {"ada": torch.ones(12), "bob": 2 * torch.ones(12)}
"""Of a linear model of three features and three classes."""


class TestWhatIsGivenWithARound:
    @pytest.mark.parametrize(
        "other",
        [
            lambda own: own.numpy(),
            lambda own: own.to_sparse(),
            lambda own: {"weight": own[:9].view(3, 3).numpy(), "bias": own[9:].to_sparse(), "steps": None, 3: own},
        ],
        ids=["numpy", "sparse", "named"],
    )
    def test_arrays_and_sparse_tensors_are_as_tensors(self, other):
        one, two = Memory(linear().float()), Memory(linear().float())
        one.record(GIVEN, {"ada": 1, "bob": 2})
        two.record({name: other(own) for name, own in GIVEN.items()}, {"ada": np.int64(1), "bob": torch.tensor([2.0])})
        assert torch.equal(one.influence("ada"), two.influence(["ada"]))
        assert one.shares == two.shares

    def test_weights_of_numpy_can_be_written(self, tmp_path):
        memory = Memory()
        memory.record(GIVEN, dict.fromkeys(GIVEN, np.float32(0.5)), learning_rate=np.float32(0.5), steps=np.int64(2))
        memory.save(tmp_path / "memory")
        assert Memory.load(tmp_path / "memory").shares == [{"ada": 0.5, "bob": 0.5}]

    @pytest.mark.parametrize(
        ("updates", "words"),
        [
            (list(GIVEN.values()), "Updates are given by client, as"),
            ({"ada": tuple(GIVEN.values())}, r"flat vector or a mapping .*that of client 'ada' is a tuple"),
            ({"ada": None}, "that of client 'ada' is None"),
            ({"ada": linear()}, "that of client 'ada' is a Linear"),
            ({"ada": np.ones(12, dtype=int)}, "flat vector or a mapping"),
            ({3: GIVEN["ada"]}, r"named by texts: write str\(3\) for 3"),
        ],
    )
    def test_what_is_no_update_is_refused(self, updates, words):
        with pytest.raises(RequestError, match=words):
            Memory(linear()).record(updates, {"ada": 1})

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"weights": [1, 1]}, r"Weights are given by client, as .*, not as \[1, 1\]"),
            ({"weights": None}, "Weights are given by client"),
            ({"weights": {"ada": "1", "bob": 1}}, "The weight of client 'ada' must be a number, not '1'"),
            ({"learning_rate": "0.1"}, "The learning rate of client 'ada' must be a number, not '0.1'"),
            ({"learning_rate": [0.1, 0.1]}, "The learning rate of client 'ada' must be a number"),
            ({"steps": {"ada": 1, 3: 2}}, "The steps must be given of everybody"),
            ({"steps": {"ada": None, "bob": 2}}, "The steps of client 'ada' must be a number, not None"),
            ({"moments": [1.0]}, "Second moments are given by client"),
            ({"moments": {"ada": 1.0}}, "Second moments of client 'ada' are a number for each parameter"),
            ({"moments": {"ada": "12"}}, "Second moments of client 'ada' are a number for each parameter"),
            ({"altered": 3}, "named by a text, or by several in a list, not by 3"),
        ],
    )
    def test_what_is_said_beside_it_is_refused_in_a_sentence(self, more, words):
        memory = Memory(linear())
        with pytest.raises(RequestError, match=words):
            memory.record(GIVEN, **{"weights": {"ada": 1, "bob": 1}, **more})
        assert memory.rounds == 0

    def test_one_name_is_no_list_of_letters(self):
        memory = Memory(linear())
        memory.record(GIVEN, {"ada": 1, "bob": 3}, altered="ada")
        assert memory.mass("ada") == 0.25
        assert memory.loudness("ada") == memory.loudness(["ada"])
        assert memory.without("ada").clients == ("bob",)
        assert "at ada" in memory.doubts(None)[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((linear().state_dict(),), "made with the model itself"),
        ((linear(), torch.optim.SGD), "stated as a Recipe"),
        (
            (linear(), torch.optim.SGD(linear().parameters(), lr=0.1)),
            r"Recipe\(SGD\(momentum=0.9\)\), .*torch.optim.sgd.SGD",
        ),
        ((linear(), SGD()), "stated as a Recipe"),
        ((linear(), "SGD"), "stated as a Recipe"),
        ((linear(), None, 3), "Parameters are chosen by their names"),
    ],
)
def test_what_a_memory_is_not_made_of(given, words):
    with pytest.raises(ExpungeError, match=words):
        Memory(*given)


def test_a_folder_is_a_path():
    with pytest.raises(RequestError, match="a path, not 3"):
        Memory(folder=3)


class TestWhoBoostsWhatEverybodyDoes:
    """A leaver that goes where all go, only further, has a vector along the way of the training."""

    @staticmethod
    def told(leaving="ada", boost=4.0, common=1.0):
        model, source = linear(), torch.Generator().manual_seed(0)
        memory, size = Memory(model), sum(own.numel() for own in model.parameters())
        for _ in range(4):
            updates = {
                name: common * torch.ones(size, dtype=torch.float64)
                + torch.randn(size, generator=source, dtype=torch.float64)
                for name in ("ada", "bob", "cyd", "dan")
            }
            memory.record(updates | {"ada": boost * updates["ada"]}, dict.fromkeys(updates, 1))
        return [each for each in memory.doubts(None, [leaving]) if "along the way that the whole training went" in each]

    def test_it_is_told(self):
        (said,) = self.told()
        assert said.startswith("ada pulled")

    def test_nobody_else_is(self):
        assert self.told("bob") == self.told(boost=1.0) == self.told(boost=-1.0) == []

    def test_after_a_forget_the_way_is_not_known(self):
        assert Memory().doubts(None, []) == ()
