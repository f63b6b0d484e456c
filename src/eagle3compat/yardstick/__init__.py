"""What extraction is measured against: tiny models made on the spot, and what transformers says of them.

Both files are run as scripts, by path, in processes of their own: they import nothing of this library, of vLLM or of
speculators, so that what they say is independent of it.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
TINY, REFERENCE = FOLDER / "tiny.py", FOLDER / "reference.py"
