import inspect

import pytest

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.registry import Method, method, methods, register
from expunge.unlearning.request import Request
from federation.small import clients, linear


def test_the_presets_and_the_gold_standard_are_there():
    known = methods()
    own = {
        name + more for name in ("hf-kcu-paper", "hf-kcu", "retrace", "retrace-krylov") for more in ("", "+recovery")
    }
    baselines = {"gradient-ascent", "projected-gradient-ascent", "fine-tuning", "not", "fed-osd"}
    controls = {"do-nothing", "fine-tuning-same-budget", "unfiltered+recovery"}
    assert own | baselines | controls | {"auto", "retrain"} <= set(known)
    for name, found in known.items():
        assert isinstance(found, Method)
        assert found.name == name
        assert found.summary
        assert list(inspect.signature(found.function).parameters) == ["engine", "state", "request", "options"]
        assert found is method(name)


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(RequestError) as caught:
        method("amnesia")
    assert "'amnesia'" in str(caught.value)
    assert all(name in str(caught.value) for name in methods())
    assert "\n" not in str(caught.value)


def test_a_name_is_given_once():
    taken = method("retrain")
    with pytest.raises(ValueError, match="registered already"):
        register(Method("retrain", taken.function, None, "again"))
    assert method("retrain") is taken


def test_what_was_lost_of_the_state_is_warned_of():
    engine = LocalEngine(linear(), CrossEntropy(), clients(ada=5, bob=6))
    state = ServerState(Snapshot.of(linear()), lost=("The vectors are missing.",))
    outcome = method("do-nothing")(engine, state, Request.of("ada"))
    assert outcome.warnings == ("The vectors are missing.",)


def test_the_list_is_a_copy():
    methods().clear()
    assert "retrain" in methods()


def test_the_control_and_the_printed_update_are_known_not_to_forget():
    remembering = {name for name, found in methods().items() if not found.forgets}
    assert remembering == {"do-nothing", "hf-kcu-paper", "hf-kcu-paper+recovery"}
