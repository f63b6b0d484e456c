"""`eagle3compat run`: a program runs as under plain python, but adapted."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import eagle3compat

SRC = Path(eagle3compat.__file__).parents[1]
NOTHING = "nothing to adapt: speculators is not installed"
Python = Callable[..., "subprocess.CompletedProcess[str]"]

ABOUT_MAIN = """\
import sys
main = sys.modules["__main__"]
print(__name__, vars(main) is globals(), __file__, __package__, __spec__ and __spec__.name)
print(sys.argv, sys.path[0], repr(__doc__), sorted(k for k in globals() if k != "__annotations__"))
"""
STATE = "import os, eagle3compat; print(eagle3compat.status().headline, os.environ.get('EAGLE3COMPAT'))\n"
CHILD = """\
import multiprocessing, sys
import eagle3compat
print("imported as", __name__, "-", eagle3compat.status().headline, flush=True)
class Point:
    def __init__(self, x): self.x = x
def work(point, answers):
    answers.put((Point(point.x + 1), __name__, sys.argv, sys.path[0]))
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.Queue()
    process = context.Process(target=work, args=(Point(1), answers))
    process.start()
    point, *rest = answers.get(timeout=240)
    process.join()
    print(point.x, type(point) is Point, process.exitcode, *rest)
"""


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Runs `python ARGUMENTS` in `tmp_path`."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE3COMPAT")}
        environment |= {"PYTHONPATH": str(SRC), **variables}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    return run


RUN = ("-m", "eagle3compat", "run")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class TestMain:
    @pytest.mark.parametrize("arguments", [("sub/script.py", "a", "--b", "-m"), ("-m", "sub.script", "a", "--help")])
    def test_is_what_plain_python_makes_it(self, python: Python, tmp_path: Path, arguments: tuple[str, ...]) -> None:
        write(tmp_path / "sub" / "script.py", f'"""About."""\n{ABOUT_MAIN}')
        plain, adapted = python(*arguments), python(*RUN, *arguments)
        assert plain.returncode == 0, plain.stderr
        assert adapted.stdout == plain.stdout

    def test_of_a_package_is_its_main_module(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "tool" / "__init__.py", "")
        write(tmp_path / "tool" / "__main__.py", ABOUT_MAIN + "from . import other\n")
        write(tmp_path / "tool" / "other.py", "")
        adapted = python(*RUN, "-m", "tool", "x")
        assert adapted.stdout == python("-m", "tool", "x").stdout
        assert adapted.returncode == 0, adapted.stderr

    def test_is_still_there_when_the_interpreter_exits(self, python: Python, tmp_path: Path) -> None:
        say = "lambda: print(sys.modules['__main__'].x)"
        write(tmp_path / "s.py", f"import atexit, sys\natexit.register({say})\nx = 5\n")
        assert python(*RUN, "s.py").stdout == "5\n"

    def test_script_behind_a_link_finds_its_neighbours(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "real" / "s.py", "import neighbour\nprint(neighbour.__file__)\n")
        write(tmp_path / "real" / "neighbour.py", "")
        (tmp_path / "link.py").symlink_to(tmp_path / "real" / "s.py")
        assert python(*RUN, "link.py").stdout == f"{tmp_path / 'real' / 'neighbour.py'}\n"

    def test_does_not_inherit_future_imports_of_the_runner(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "s.py", "def f(x: int): ...\nprint(f.__annotations__['x'])\n")
        assert python(*RUN, "s.py").stdout == "<class 'int'>\n"


class TestAdapted:
    def test_before_the_program_starts_and_for_its_children(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "s.py", STATE)
        result = python(*RUN, "s.py")
        assert result.stdout == f"{NOTHING} strict\n"
        assert result.stderr == f"eagle3compat: {NOTHING}\n"

    def test_as_the_environment_says(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "s.py", STATE)
        assert python(*RUN, "s.py", EAGLE3COMPAT="warn").stdout == f"{NOTHING} warn\n"
        assert python(*RUN, "s.py", EAGLE3COMPAT="off").stdout == "switched off by EAGLE3COMPAT=off off\n"

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    @pytest.mark.parametrize("program", [("s.py",), ("-m", "s")])
    def test_spawned_processes_have_the_programs_definitions_and_are_adapted_first(
        self, python: Python, tmp_path: Path, method: str, program: tuple[str, ...]
    ) -> None:
        write(tmp_path / "s.py", CHILD)
        result = python(*RUN, *program, method)
        lines = result.stdout.splitlines()
        assert lines[:2] == [f"imported as __main__ - {NOTHING}", f"imported as __mp_main__ - {NOTHING}"], result.stderr
        plain = python(*program, method).stdout.splitlines()
        assert lines[2:] == plain[2:]
        assert lines[2].startswith("2 True 0 __mp_main__")

    def test_spawned_processes_of_the_installed_command_do_not_run_the_command_again(
        self, python: Python, tmp_path: Path
    ) -> None:
        write(tmp_path / "s.py", CHILD)
        command = write(tmp_path / "bin" / "eagle3compat", "print('command')\n")
        with command.open("a") as file:
            file.write("import sys\nfrom eagle3compat.cli import main\nif __name__ == '__main__': sys.exit(main())\n")
        lines = python(str(command), "run", "s.py", "spawn").stdout.splitlines()
        assert lines[:3] == ["command", f"imported as __main__ - {NOTHING}", f"imported as __mp_main__ - {NOTHING}"]
        assert lines[3:] == python("s.py", "spawn").stdout.splitlines()[2:]

    def test_forked_processes_inherit_the_adapters(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "s.py", CHILD)
        lines = python(*RUN, "s.py", "fork").stdout.splitlines()
        assert lines[0] == f"imported as __main__ - {NOTHING}"
        assert lines[1].startswith("2 True 0 __main__")

    def test_spawned_processes_of_spawned_processes_are_adapted(self, python: Python, tmp_path: Path) -> None:
        write(
            tmp_path / "s.py",
            "import multiprocessing, eagle3compat\ncontext = multiprocessing.get_context('spawn')\n"
            "def leaf(): print('leaf', eagle3compat.status().headline)\n"
            "def branch():\n    p = context.Process(target=leaf)\n    p.start()\n    p.join()\n"
            "if __name__ == '__main__':\n    p = context.Process(target=branch)\n    p.start()\n    p.join()\n",
        )
        assert python(*RUN, "s.py").stdout == f"leaf {NOTHING}\n"


class TestEnd:
    @pytest.mark.parametrize("code", [0, 1, 7])
    def test_exit_codes_pass_through(self, python: Python, tmp_path: Path, code: int) -> None:
        write(tmp_path / "s.py", f"import sys\nsys.exit({code})\n")
        assert python(*RUN, "s.py").returncode == code

    def test_an_exit_with_a_message_prints_it(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "s.py", "raise SystemExit('no data')\n")
        result = python(*RUN, "s.py")
        assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "no data")

    @pytest.mark.parametrize(
        "text",
        ["def f():\n    1 / 0\nf()\n", "try:\n    1 / 0\nexcept Exception:\n    raise ValueError('b')\n", "x = = 1\n"],
    )
    def test_an_exception_is_shown_as_python_shows_it(self, python: Python, tmp_path: Path, text: str) -> None:
        write(tmp_path / "s.py", text)
        plain, adapted = python("s.py"), python(*RUN, "s.py")
        assert adapted.stderr == f"eagle3compat: {NOTHING}\n{plain.stderr}"
        assert adapted.returncode == plain.returncode == 1

    @pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit('early')", "Own('x')"])
    def test_what_is_no_exception_is_shown_as_python_shows_it(
        self, python: Python, tmp_path: Path, raised: str
    ) -> None:
        own = "class Own(BaseException): ...\nimport atexit\natexit.register(print, 'ended')\n"
        write(tmp_path / "s.py", f"{own}def f():\n    raise {raised}\nf()\n")
        plain, adapted = python("s.py"), python(*RUN, "s.py")
        assert adapted.stderr == f"eagle3compat: {NOTHING}\n{plain.stderr}"
        assert (adapted.returncode, adapted.stdout) == (plain.returncode, plain.stdout)

    def test_the_programs_own_exception_hook_is_used(self, python: Python, tmp_path: Path) -> None:
        hook = "lambda kind, error, trace: print('hooked', error)"
        write(tmp_path / "s.py", f"import sys\nsys.excepthook = {hook}\nraise ValueError('x')\n")
        result = python(*RUN, "s.py")
        assert (result.returncode, result.stdout) == (1, "hooked x\n")

    def test_an_error_of_this_library_ends_with_its_message(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "s.py", "from eagle3compat import InputError as E\nraise E('prompt 3 is empty. Drop it.')\n")
        result = python(*RUN, "s.py")
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].endswith("eagle3compat: prompt 3 is empty. Drop it.")

    def test_a_failing_import_of_a_package_is_the_programs_fault(self, python: Python, tmp_path: Path) -> None:
        write(tmp_path / "pack" / "__init__.py", "import absent_dependency\n")
        write(tmp_path / "pack" / "tool.py", "")
        result = python(*RUN, "-m", "pack.tool")
        assert result.returncode == 1
        assert "No module named 'absent_dependency'" in result.stderr.splitlines()[-1]


class TestUsage:
    @pytest.mark.parametrize("missing", ["absent.py", "."])
    def test_a_missing_script_exits_2(self, python: Python, missing: str) -> None:
        result = python(*RUN, missing)
        assert result.returncode == 2
        assert result.stderr == (
            f"eagle3compat: there is no script {missing}. Check the path; for a module: run -m MODULE.\n"
        )

    @pytest.mark.parametrize("missing", ["absent", "absent.tool", "json.absent", "json"])
    def test_a_missing_module_exits_2(self, python: Python, missing: str) -> None:
        result = python(*RUN, "-m", missing)
        assert result.returncode == 2
        assert f"there is no module {missing} that can be run" in result.stderr

    def test_an_archive_is_told_from_a_script(self, python: Python, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("__main__.py", "print('started')")
        result = python(*RUN, "a.zip")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == (
            "eagle3compat: a.zip is an archive, not a script. Put it on PYTHONPATH and name the module in it: "
            "run -m MODULE.\n"
        )

    @pytest.mark.parametrize("name", [".pkg", ".", "..pkg.tool"])
    def test_a_relative_module_exits_2(self, python: Python, name: str) -> None:
        result = python(*RUN, "-m", name)
        assert result.returncode == 2
        assert result.stderr == (
            f"eagle3compat: {name} is relative, and there is no package that it is in. Give its full name.\n"
        )

    @pytest.mark.parametrize("words", [(), ("-m",), ("--fast", "s.py")])
    def test_no_program_exits_2_with_the_usage(self, python: Python, words: tuple[str, ...]) -> None:
        result = python(*RUN, *words)
        assert result.returncode == 2
        assert "usage: eagle3compat run SCRIPT" in result.stderr

    def test_vllm_missing_under_a_speculators_that_needs_it_is_one_line(self, python: Python, tmp_path: Path) -> None:
        generator = tmp_path / "site" / "speculators" / "data_generation" / "vllm_hidden_states_generator.py"
        write(generator, "")
        write(tmp_path / "site" / "speculators" / "__init__.py", "")
        write(tmp_path / "s.py", "print('started')\n")
        result = python(*RUN, "s.py", PYTHONPATH=os.pathsep.join([str(SRC), str(tmp_path / "site")]))
        assert (result.returncode, result.stdout) == (1, "")
        assert "Install vLLM" in result.stderr
        assert "Traceback" not in result.stderr
