"""Judge the committed results again by what is stored in them, and keep the verdicts that they had.

A file that was judged by the rule of version 0.2.0 has its verdicts written to results/verdicts-0.2.0.json first; one
that was judged again already is only brought up to the rule of today. Then `make docs` puts both into the documents.

Usage: python benchmarks/rejudge.py [RESULTS]       the folder with one folder an experiment; results/ unless told
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from expunge.bench.rejudging import judged_again, verdicts_of
from expunge.bench.results import Results
from expunge.errors import RequestError

BEFORE = "verdicts-0.2.0.json"


def rejudge(folder: Path) -> list[str]:
    """Judge every results file of a folder again; says of each what was done."""
    kept = folder / BEFORE
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    said = []
    for path in sorted(folder.glob("*/results.json")):
        results, name = Results.load(path), path.parent.name
        try:
            again = judged_again(results)
        except RequestError as error:
            said.append(f"{name}: left alone. {error}")
            continue
        if again.judged is None:
            said.append(f"{name}: left alone, there is nothing to judge again.")
            continue
        if results.judged is None:
            before[name] = verdicts_of(results)
        again.save(path)
        moved = sum(old.verdict != new.verdict for old, new in zip(results.rows, again.rows, strict=True))
        said.append(f"{name}: {moved} of {len(again.rows)} rows have another verdict.")
    kept.write_text(json.dumps(dict(sorted(before.items())), indent=1) + "\n", encoding="utf-8")
    return said


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "results"
    print("\n".join(rejudge(Path(sys.argv[1]) if len(sys.argv) > 1 else default)))
