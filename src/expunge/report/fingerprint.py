"""Which results a picture was made from, written into the picture: a stale one is found without comparing pixels."""

import json
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from expunge.bench.results import Results

KEY = "results"
"""The name of the PNG text chunk."""


def fingerprint(results: Results) -> str:
    """The SHA-256 of the file that `Results.save` writes, without what was not measured: a new measure spoils none.

    Example:
        >>> empty = Results("demo", {}, {}, [], {})
        >>> fingerprint(empty) == fingerprint(empty), len(fingerprint(empty))
        (True, 64)
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        results.save(file)
        content = json.loads(file.read_text(encoding="utf-8"))
    rows = [{name: value for name, value in row.items() if value is not None} for row in content["rows"]]
    return sha256(json.dumps({**content, "rows": rows}).encode()).hexdigest()


def read_fingerprint(picture: str | Path) -> str | None:
    """The fingerprint in a PNG; None where there is none, or no such PNG."""
    try:
        with Image.open(picture) as image:
            found = image.info.get(KEY)
    except OSError:
        return None
    return found if isinstance(found, str) else None
