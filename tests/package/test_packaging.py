"""The wheel, the sentences of a build and of a broken install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import forks
import pytest

import amp_kernels
from amp_kernels import __main__

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def run_installed(installed: Path, *arguments: str, cwd: Path) -> str:
    """Run a command line in a fork, where no other install of the package is visible."""
    result = forks.python(*arguments, cwd=cwd, PYTHONPATH=str(installed))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # bdist_wheel and not pip: its folders can be chosen, so that nothing is written into the sources.
    arguments = ["egg_info", "--egg-base", folder, "build", "--build-base", folder / "build"]
    arguments += ["bdist_wheel", "--dist-dir", folder, "--bdist-dir", folder / "bdist"]
    result = forks.python("setup.py", "-q", *arguments, cwd=ROOT, AMP_KERNELS_BUILD="none")
    assert result.returncode == 0, result.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)  # all that installing a wheel of pure Python is
    return folder


def test_wheel_has_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"amp_kernels"}
    present = {"py.typed", "optim/__init__.py", "reference/__init__.py", "triton_kernels/__init__.py"}
    assert present <= {name.removeprefix("amp_kernels/") for name in names}
    # Results, experiments, the demo and gpu-check stay in the clone.
    benchmarks = {name for name in names if name.startswith("amp_kernels/benchmarks/")}
    assert benchmarks == {f"amp_kernels/{path.relative_to(ROOT)}" for path in (ROOT / "benchmarks").glob("*.py")}


def test_installed_wheel_works_from_another_directory(installed: Path, tmp_path: Path) -> None:
    code = "import sys, amp_kernels.__main__ as command, amp_kernels.triton_kernels; print(amp_kernels.__file__); "
    code += "sys.argv[1:] = ['--version']; command.main()"
    file, version = run_installed(installed, "-c", code, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(installed)
    assert version == f"amp_kernels {amp_kernels.__version__}"


def test_info_says_why_nothing_was_compiled(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(installed, "-m", "amp_kernels", "info", cwd=tmp_path)
    assert "compiled kernels: nothing was compiled because AMP_KERNELS_BUILD=none was set; unset it" in printed


# The operator reaches the reference through the dispatcher, the optimizer by a plan.
WARNS = """
import warnings, torch, amp_kernels
tensor = torch.ones(3, requires_grad=True)
tensor.grad = torch.ones(3)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    amp_kernels.unscale_([tensor.grad], inv_scale=torch.ones(()), found_inf=torch.zeros(()))
    print(len(caught))
    for optimizer in (amp_kernels.optim.FusedSGD([tensor], lr=1), amp_kernels.optim.FusedAdamW([tensor])):
        optimizer.step()
    print(len(caught), caught[0].message)
"""


def test_the_reference_warns_once_where_nothing_was_compiled(installed: Path, tmp_path: Path) -> None:
    first, last = run_installed(installed, "-c", WARNS, cwd=tmp_path).splitlines()
    assert first == "1"
    assert last.startswith("1 amp_kernels runs its slow reference on CPU tensors: cpu: nothing was compiled because")


def test_wheel_has_the_command_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        (scripts,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "amp-kernels = amp_kernels.__main__:main" in scripts
    assert {"License-Expression: MIT", "License-File: LICENSE"} <= set(metadata.splitlines())


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        (["--versoin"], "error: unknown --versoin; did you mean --version?\n"),
        (["verfy"], "error: unknown verfy; did you mean verify?\n"),
        (["verify", "--devcie=cpu"], "error: unknown --devcie; did you mean --device?\n"),
        (["info", "--bogus"], "unrecognized arguments: --bogus\n"),
    ],
)
def test_a_mistyped_option_suggests_the_right_one(
    typed: list[str], suggestion: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/amp-kernels", *typed])
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    said = capsys.readouterr().err
    assert suggestion in said and said.count("did you mean") == suggestion.count("did you mean")
    assert said.startswith("usage: amp-kernels ")


def test_the_command_alone_prints_its_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/amp-kernels"])
    assert __main__.main() == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: amp-kernels ") and "bench" in said.out and said.err == ""


def test_a_reader_that_stops_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "amp_kernels", "info"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as info:
        assert info.stdout is not None
        assert info.stderr is not None
        info.stdout.close()
        assert info.stderr.read() == ""
    assert info.returncode == 1


@pytest.mark.slow
def test_bench_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(installed, "-m", "amp_kernels", "bench", "overhead", cwd=tmp_path)
    (folder,) = (tmp_path / "amp_kernels-bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {"overhead.csv", "overhead.png"}
    assert "torch._fused_sgd_" in printed and f"{folder.relative_to(tmp_path)}: CSV and PNG" in printed
    assert "unscale_ of 1000" in printed and "GB/s" in printed and "other run, ms" not in printed
    assert re.search(r"\d \(\d[\d.,]* to \d[\d.,]*\)", printed)  # a ratio and its spread


def test_installed_package_shadowed_by_its_sources(installed: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for source in (ROOT / "amp_kernels").rglob("*.py"):
        target = clone / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    metadata = clone / "amp_kernels.egg-info"  # as an install leaves it in the clone
    metadata.mkdir()
    (metadata / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: amp-kernels\nVersion: 0.1.0\n")
    code = "from amp_kernels import _loader; print(_loader.load_error())"
    printed = run_installed(installed, "-c", code, cwd=clone)
    assert "is shadowed by the source folder" in printed
    assert "pip install --no-build-isolation -e ." in printed


def test_triton_kernels_is_no_top_level_package() -> None:
    result = run("-c", "import triton_kernels", cwd=ROOT)
    assert result.returncode != 0
    assert "must be imported as amp_kernels.triton_kernels" in result.stderr


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("gpu", "AMP_KERNELS_BUILD must be auto, cpu, cuda or none, got 'gpu'"),
        ("cuda", "AMP_KERNELS_BUILD=cuda cannot be done: "),
    ],
)
def test_setup_refuses_in_a_sentence(wanted: str, sentence: str) -> None:
    result = forks.python("setup.py", "--version", cwd=ROOT, AMP_KERNELS_BUILD=wanted, CXX="no-such-compiler")
    assert result.returncode != 0
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_setup_without_a_compiler_builds_nothing() -> None:
    result = forks.python("setup.py", "--version", cwd=ROOT, AMP_KERNELS_BUILD="auto", CXX="no-such-compiler")
    assert result.returncode == 0, result.stderr
    assert "nothing was compiled because there was no no-such-compiler" in result.stdout


NO_TORCH = "importlib.util.find_spec = lambda name: None"
ISOLATED = "the build was isolated and could not see your torch; run `pip install --no-build-isolation .`"


def run_setup(patch: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import importlib.util, platform, runpy, setuptools; {patch}; "
    code += "runpy.run_path('setup.py', run_name='__main__')"
    return forks.python("-c", code, *arguments, cwd=ROOT, **{"AMP_KERNELS_BUILD": "auto"} | environment)


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        (
            "import torch; torch.version.hip = '7.0'",
            "is a ROCm build, which is not supported; install a CUDA build of torch",
        ),
        ("platform.system = lambda: 'Windows'", "nothing was compiled because there is no build for Windows; use WSL"),
        (f"{NO_TORCH}; setuptools.__file__ = '/tmp/pip-build-env-x1/overlay/setuptools/__init__.py'", ISOLATED),
        (f"{NO_TORCH}; setuptools.__file__ = '/root/.cache/uv/builds-v0/.tmpx/setuptools/__init__.py'", ISOLATED),
    ],
    ids=["ROCm", "Windows", "isolated by pip", "isolated by uv"],
)
def test_setup_says_why_it_compiles_less(patch: str, sentence: str) -> None:
    result = run_setup(patch, "--version")
    assert result.returncode == 0, result.stderr
    assert sentence in result.stdout


@pytest.mark.parametrize(
    ("patch", "got"), [(NO_TORCH, "none"), ("import torch; torch.__version__ = '2.9.1+cu128'", "2.9.1+cu128")]
)
def test_setup_needs_torch_to_compile(patch: str, got: str) -> None:
    result = run_setup(patch, "bdist_wheel")
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert sentence == (
        f"amp_kernels: torch >= 2.10 must be installed before the build, got {got}; "
        "run `pip install -U torch setuptools ninja`, then run `pip install --no-build-isolation .`"
    )


def test_setup_says_what_a_cuda_build_is_for_and_how_to_shorten_it(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'TOP={tmp_path}\n-D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0' >&2\n")
    nvcc.chmod(0o755)
    result = run_setup("import torch; torch.version.cuda = '13.0'", "--version", CUDA_HOME=str(tmp_path), MAX_JOBS="1")
    assert f"amp_kernels: compiling for the CPU and CUDA with {tmp_path}/bin/nvcc" in result.stdout, result.stderr
    assert re.search(r"GPU architectures 7\.5;8\.0\S+: about \d+ minutes with 1 job\b", result.stdout)
    assert re.search(r"TORCH_CUDA_ARCH_LIST=9\.0.*MAX_JOBS.*pip install -v", result.stdout)


@pytest.mark.parametrize("command", ["import sys; sys.path.insert(0, 'csrc'); import build_backend", "import setup"])
@pytest.mark.parametrize("found", ["none", "65.5.0"])
def test_the_build_needs_setuptools(found: str, command: str, tmp_path: Path) -> None:
    if found != "none":
        (tmp_path / "setuptools").mkdir()
        (tmp_path / "setuptools" / "__init__.py").write_text(f"__version__ = {found!r}")
    result = run("-S", "-c", command, cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith(
        f"amp_kernels: setuptools >= 77 must be installed before the build, got {found}; run `pip"
    )


def test_the_clone_has_no_other_top_level_entry() -> None:
    listed = run_git("ls-files")
    if listed is None:
        pytest.skip("this is no clone")
    expected = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "setup.py", "pyproject.toml", "Makefile"}
    expected |= {"csrc", "triton_kernels", "amp_kernels", "tests", "benchmarks", ".ci", ".clang-format", ".gitignore"}
    expected |= {"CITATION.cff", "SECURITY.md", ".github", "docs", "mkdocs.yml"}
    assert {name.split("/")[0] for name in listed.splitlines()} <= expected


def run_git(*arguments: str) -> str | None:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
