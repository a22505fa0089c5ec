"""A deployment's requests, worked on inside its ServerApp: a site dies in between, and the receipt is the same."""

import pytest
import torch

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.ledger import desk
from expunge.ledger.ledger import Ledger
from expunge.ledger.receipt import verify
from flower.example import CONFIG, EXAMPLE, grid, run
from flower_app.task import ATTACKER, Net
from traces import Traces, remembering

FILE = f"""
import sys
sys.path.insert(0, {str(EXAMPLE)!r})
from expunge import Federation
from flower_app.task import TARGET, TEST_IMAGES, Net, load_images, stamped


def unseen():
    return tuple(part[:TEST_IMAGES] for part in load_images())


federation = Federation(model=Net, unseen=unseen, trigger=stamped, target=TARGET)
"""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Trained for a few rounds, with a request."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "federation.py").write_text(FILE)
    ledger = Ledger.create(folder / "ledger", "the desk")
    run(grid(), folder / "store", num_server_rounds=CONFIG["num-server-rounds"])
    desk.add(ledger, desk.Filing((ATTACKER,), checked_by="the clerk"))
    return folder


@pytest.mark.slow
def test_a_site_dies_in_between_and_the_request_ends_with_a_receipt(deployed, caplog):
    ledger, file = Ledger(deployed / "ledger", "the desk"), deployed / "federation.py"
    state = StateStore(deployed / "store").load(Net())
    before, old = state.model, Traces(remembering(state, [ATTACKER]), Snapshot.of(Net()).parameters)
    stored = {f"{own}.safetensors" for own in ("model", "memory", "checkpoints")}
    assert old.kinds_in(deployed) == {*stored, "vectors"}
    on = grid()
    on.stop(102)  # the leaver has gone
    answer, seen = on.handle, []

    def dying(message):
        seen.append(message)
        if message.metadata.dst_node_id == 103 and "task" in message.metadata.message_type:
            on.stop(103)
        return answer(message)

    on.handle = dying
    with pytest.raises(RequestError, match="R-0001: No answer from 'hospital-3'"):
        run(on, deployed / "store", requests=str(file), deadline=2.0)
    assert ledger.case("R-0001").state == "running"
    assert StateStore(deployed / "store").load(Net()).model.digest == before.digest
    on.handle = answer
    on.restart(103)
    run(on, deployed / "store", requests=str(file), deadline=60.0)
    case = ledger.case("R-0001")
    assert case.facts["audited"]["by"] == "evidence"
    assert case.facts["audited"]["word"] == "SUPPORTED", case.facts["audited"]
    assert case.erased
    assert len(case.facts["forgotten"]["answered"]) == 3
    assert any("SuperLink's database" in own for own in case.facts["erased"]["left"])
    desk.tell(ledger, "R-0001", ())
    desk.close(ledger, "R-0001")
    folder = ledger.folder
    found = verify(folder / "receipts" / "R-0001.intoto.jsonl", folder / "key.pub", folder / "log.jsonl")
    assert "EXPUNGE_EVIDENCE_SUPPORTED" in found.properties
    assert not old.found_in(deployed)
    assert torch.isfinite(StateStore(deployed / "store").load(Net()).model.parameters).all()
    run(grid(), deployed / "store", num_server_rounds=1)  # it is back, and the training goes on without it
    assert ATTACKER not in StateStore(deployed / "store").load(Net()).memory.clients
    assert "site 'hospital-2' has left" in caplog.text
