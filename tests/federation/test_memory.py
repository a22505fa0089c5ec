import json
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import FedAvgM, Recipe
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


def by_formula(rounds, weights, name):
    """B_u written out: nothing of it is shared with the code."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    for updates in rounds:
        if name in updates:
            everyone = sum(weights[other] for other in updates)
            mean = sum(weights[other] * update for other, update in updates.items()) / everyone
            total = total + weights[name] / everyone * (updates[name] - mean)
    return total


def vector(memory, name):
    """B_u from what the memory says in public: A_u (1 - w_u)."""
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
        # B_a = 3/4 (1 - 2) + 1/2 (4 - 2) = 1/4, weight (3/4 + 1/2) / 2 = 5/8.
        assert memory.mass(["a"]) == pytest.approx(5 / 8)
        assert memory.influence(["a"]).item() == pytest.approx(0.25 / (3 / 8))
        # B_b = 1/4 * 3, one round only: weight 1/4, not 1/8.
        assert memory.influence(["b"]).item() == pytest.approx(0.75 / 0.75)
        assert memory.clients == ("a", "b", "c")
        assert memory.rounds == 2

    @settings(deadline=None)
    @given(partial_federations())
    def test_the_formula_and_nothing_in_a_missed_round(self, federation):
        _, weights, rounds = federation
        memory = recorded(rounds, weights)
        for name in memory.clients:
            if memory.mass([name]) < 1 - 1e-6:
                torch.testing.assert_close(vector(memory, name), by_formula(rounds, weights, name))
        assert set(memory.clients) == {name for updates in rounds for name in updates}

    @settings(deadline=None)
    @given(partial_federations())
    def test_all_vectors_add_up_to_zero(self, federation):
        _, weights, rounds = federation
        memory = Memory()
        for updates in rounds:
            memory.record(updates, {name: weights[name] for name in updates})
            total = torch.stack(list(memory.vectors.values())).sum(dim=0)
            torch.testing.assert_close(total, torch.zeros(SIZE, dtype=torch.float64), atol=1e-12, rtol=0)

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
            torch.testing.assert_close(vectors[row], by_formula(own, weights, "a") / (5 / 6))
            lengths = torch.stack([by_formula([each], weights, "a").norm() for each in own])
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
    assert again.norms(["ada"]) == pytest.approx([0.5 * (1e25**2 + 2e25**2) ** 0.5])  # half of (3, 4) - (2, 2)
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
