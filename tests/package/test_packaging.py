"""The wheel, the sentences of a build and of a broken install."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import amp_kernels

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def run_installed(installed: Path, *arguments: str, cwd: Path) -> str:
    """Like a machine where only this wheel is installed: -S hides an editable install of the package."""
    path = os.pathsep.join([str(installed), *(folder for folder in sys.path if folder.endswith("-packages"))])
    result = run("-S", *arguments, cwd=cwd, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # bdist_wheel and not pip: its folders can be chosen, so that nothing is written into the sources.
    arguments = ["egg_info", "--egg-base", folder, "build", "--build-base", folder / "build"]
    arguments += ["bdist_wheel", "--dist-dir", folder, "--bdist-dir", folder / "bdist"]
    result = run("setup.py", "-q", *arguments, cwd=ROOT, AMP_KERNELS_BUILD="none")
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
    present |= {"benchmarks/common.py", "benchmarks/bench_sgd.py"}
    assert present <= {name.removeprefix("amp_kernels/") for name in names}
    assert not [name for name in names if name.endswith((".csv", ".png"))]  # results stay in the clone


def test_installed_wheel_works_from_another_directory(installed: Path, tmp_path: Path) -> None:
    code = "import sys, amp_kernels.__main__ as command, amp_kernels.triton_kernels; print(amp_kernels.__file__); "
    code += "sys.argv[1:] = ['--version']; command.main()"
    file, version = run_installed(installed, "-c", code, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(installed)
    assert version == f"amp_kernels {amp_kernels.__version__}"


def test_info_says_why_nothing_was_compiled(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(installed, "-m", "amp_kernels", "info", cwd=tmp_path)
    assert "compiled kernels: nothing was compiled because AMP_KERNELS_BUILD=none was set; unset it" in printed


@pytest.mark.slow
def test_bench_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(installed, "-m", "amp_kernels", "bench", "overhead", cwd=tmp_path)
    (folder,) = (tmp_path / "amp_kernels-bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {"overhead.csv", "overhead.png"}
    assert "torch._fused_sgd_" in printed and f"{folder.relative_to(tmp_path)}: CSV and PNG" in printed


def test_installed_package_shadowed_by_its_sources(installed: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for source in (ROOT / "amp_kernels").rglob("*.py"):
        target = clone / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
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
    result = run("setup.py", "--version", cwd=ROOT, AMP_KERNELS_BUILD=wanted, CXX="no-such-compiler")
    assert result.returncode != 0
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_setup_without_a_compiler_builds_nothing() -> None:
    result = run("setup.py", "--version", cwd=ROOT, AMP_KERNELS_BUILD="auto", CXX="no-such-compiler")
    assert result.returncode == 0, result.stderr
    assert "nothing was compiled because there was no no-such-compiler" in result.stdout


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ("torch.version.hip = '7.0'", "is of ROCm, which is not supported"),
        ("platform.system = lambda: 'Windows'", "nothing was compiled because there is no build for Windows; use WSL"),
    ],
)
def test_setup_on_another_platform(patch: str, sentence: str) -> None:
    code = f"import platform, runpy, torch; {patch}; runpy.run_path('setup.py', run_name='__main__')"
    result = run("-c", code, "--version", cwd=ROOT, AMP_KERNELS_BUILD="auto")
    assert result.returncode == 0, result.stderr
    assert sentence in result.stdout


def test_the_clone_has_no_other_top_level_entry() -> None:
    listed = run_git("ls-files")
    if listed is None:
        pytest.skip("this is no clone")
    expected = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "setup.py", "pyproject.toml", "Makefile"}
    expected |= {"csrc", "triton_kernels", "amp_kernels", "tests", "benchmarks", ".ci", ".clang-format", ".gitignore"}
    assert {name.split("/")[0] for name in listed.splitlines()} == expected


def run_git(*arguments: str) -> str | None:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
