"""Run the README's own code, as a newcomer who installed nothing but expunge; `make test-install` calls it."""

import importlib.util
import re
import sys
from pathlib import Path

import expunge

EXTRAS = ("sklearn", "matplotlib", "flwr", "cryptography", "pytest")

if __name__ == "__main__":
    found = [name for name in EXTRAS if importlib.util.find_spec(name)]
    if found or Path(expunge.__file__).is_relative_to(Path.cwd()):
        sys.exit(f"This is no bare installation: {expunge.__file__}, {found}")
    blocks = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        if "expunge.flower" not in block:
            exec(block, names)
