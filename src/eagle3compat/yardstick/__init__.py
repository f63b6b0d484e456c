"""What extraction is measured against: tiny models made on the spot, and what transformers and vLLM alone say of them.

Each file is run as a script, by path, in a process of its own, and uses nothing else of this library, so that what it
says is independent of it. `tiny` and `reference` import no vLLM, and none imports speculators.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
TINY, REFERENCE, TAP = FOLDER / "tiny.py", FOLDER / "reference.py", FOLDER / "tap.py"
