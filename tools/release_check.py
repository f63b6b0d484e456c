"""Everything about a release that can be checked before it is one: `python tools/release_check.py`.

Builds the sdist and, from it, the wheel; checks their metadata; installs the wheel into a bare environment without this
checkout, runs the command line there, and lets a consumer's mypy read the types.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSUMER = '''
import eagle3compat

report: eagle3compat.Report = eagle3compat.plan()
healthy: bool = report.healthy
words: list[str] = [outcome.reason for outcome in report]
try:
    eagle3compat.apply(strict=True, skip=["memory"])
except eagle3compat.IncompatibleError as error:
    remedy: str = error.remedy
'''
WRONG = "import eagle3compat\n\nnumber: int = eagle3compat.plan().headline\n"


class CheckFailedError(RuntimeError):
    """Something about the release is not as it should be."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="eagle3compat-release-") as folder:
        place = Path(folder)
        try:
            check(place)
        except CheckFailedError as error:
            print(f"not ready: {error}", file=sys.stderr)
            return 1
    print("ready")
    return 0


def check(place: Path) -> None:
    """Each step in order. Raises CheckFailedError."""
    dist = place / "dist"
    execute("build", [sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)])
    wheel, sdist = only(dist, "*.whl"), only(dist, "*.tar.gz")
    check_contents(wheel, sdist)
    version = check_metadata(wheel)
    execute("metadata", [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    bare = place / "bare"
    venv.create(bare, with_pip=True)
    python = str(bare / "bin" / "python")
    execute("install", [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
    check_command(bare, version, place)
    check_types(python, place)


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise CheckFailedError(f"{len(found)} files of {pattern} were built, not one")
    return found[0]


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel has the package with its type marker and nothing else; the sdist can be worked on."""
    names = zipfile.ZipFile(wheel).namelist()
    strays = [name for name in names if not name.startswith(("eagle3compat/", "eagle3compat-"))]
    if strays or "eagle3compat/py.typed" not in names:
        raise CheckFailedError(f"the wheel has {strays or 'no py.typed'}")
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    if modules - set(names):
        raise CheckFailedError(f"the wheel lacks {sorted(modules - set(names))}")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    wanted = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "mkdocs.yml", "docs", "tests", "tools")
    missing = [name for name in wanted if name not in inside]
    if missing:
        raise CheckFailedError(f"the sdist lacks {missing}")
    print("contents: ok")


def check_metadata(wheel: Path) -> str:
    """The version, which package, metadata and changelog agree on."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    version = str(metadata["Version"])
    required = [str(line) for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in str(line)]
    if [line.split(">")[0] for line in required] != ["rich"]:
        raise CheckFailedError(f"it requires {required}, and rich alone was wanted")
    if f'__version__ = "{version}"' not in (ROOT / "src/eagle3compat/__init__.py").read_text():
        raise CheckFailedError(f"eagle3compat.__version__ is not {version}, which pyproject.toml says")
    if f"## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        raise CheckFailedError(f"the changelog has no heading for {version}")
    print(f"version: {version}")
    return version


def check_command(bare: Path, version: str, place: Path) -> None:
    """The command line, where neither vLLM nor speculators is installed."""
    command = str(bare / "bin" / "eagle3compat")
    if version not in execute("--version", [command, "--version"], cwd=place):
        raise CheckFailedError(f"`eagle3compat --version` does not say {version}")
    found = json.loads(execute("doctor", [command, "doctor", "--json"], cwd=place, code=1))
    if not any("vLLM is not installed" in problem for problem in found["problems"]):
        raise CheckFailedError(f"doctor in a bare environment says {found['problems']}")
    if not found["workers"]["entry_point"]:
        raise CheckFailedError("the plugin's entry point is not found")
    if str(ROOT) in found["eagle3compat"]["directory"]:
        raise CheckFailedError("the bare environment uses this checkout, not the wheel")
    execute("plan", [command, "plan"], cwd=place, code=1)
    execute("explain", [command, "explain", "capture"], cwd=place)


def check_types(python: str, place: Path) -> None:
    """A consumer's mypy takes right use and refuses wrong use, so that it does read the types."""
    for name, code, expected in (("consumer.py", CONSUMER, 0), ("wrong.py", WRONG, 1)):
        (place / name).write_text(code)
        arguments = ["--strict", "--python-executable", python, "--no-incremental", name]
        execute(f"mypy {name}", [sys.executable, "-m", "mypy", *arguments], cwd=place, code=expected)


def execute(name: str, command: list[str], cwd: Path = ROOT, code: int = 0) -> str:
    """Standard output of a command that is to end with `code`. Raises CheckFailedError."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "EAGLE3COMPAT"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise CheckFailedError(f"{name} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    print(f"{name}: ok")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
