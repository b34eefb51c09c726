"""`python -m amp_kernels verify`, and that the shared cases and their error rule can fail."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
from conftest import TESTS, WHY_NOT

import amp_kernels
from amp_kernels import reference, report, testing
from amp_kernels.testing import common
from amp_kernels.testing import verify as command


def verify(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forks.command("-m", "amp_kernels", "verify", *arguments, **environment)


def test_every_operator_on_every_backend_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenth of the cases: tests of the families run all of them."""
    monkeypatch.setattr(testing, "CASES", {op: cases[::10] for op, cases in testing.CASES.items()})
    assert command.verify() == 0
    table = capsys.readouterr().out
    assert all(op in table for op in testing.CASES) and "cases passed" in table


def test_the_command_line() -> None:
    run = verify("--backend", "reference", "--device", "cpu", "--op", "grad_norm", "--dtype", "mixed", "--json")
    assert run.returncode == 0, run.stderr
    assert [row["operator"] for row in json.loads(run.stdout)["rows"]] == ["grad_norm"]
    assert run.stderr == "1 of 1 cases: grad_norm on reference\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_what_cannot_run_says_why() -> None:
    run = verify("--backend", "cuda")
    assert run.returncode == 2
    assert run.stderr.startswith("verify: cuda cannot run here: ") and "there is no CUDA device" in run.stderr


@pytest.mark.slow
def test_operators_on_the_interpreter() -> None:
    """One that reads and writes lists; harness/test_triton_interpret.py tries the kernels."""
    if reason := WHY_NOT["triton-interpret"]():
        pytest.skip(reason)
    ops = ("--op", "unscale_", "--dtype", "mixed")
    # Not in a fork: there the Triton kernels of an editable install are missing.
    words = [sys.executable, "-m", "amp_kernels", "verify", "--backend", "triton", "--device", "cpu", *ops]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(words, env=environment, cwd=TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_wrong_backend_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def one_ulp_off(grads, *, inv_scale, found_inf):  # type: ignore[no-untyped-def]
        for grad in grads:
            if not grad.isfinite().all():
                found_inf.fill_(1.0)
            product = (grad.float() * inv_scale).to(grad.dtype)
            grad.copy_(product.nextafter(torch.full_like(product, math.inf)))

    monkeypatch.setattr(reference, "unscale_", one_ulp_off)
    assert command.verify("reference", "cpu", ["unscale_"]) == 1
    printed = capsys.readouterr().out
    unscaled = testing.common.randn(1, seed=1) * torch.tensor(0.37)
    got, expected = unscaled.nextafter(torch.tensor(math.inf)).item(), unscaled.item()
    lines = printed.splitlines()
    first = lines.index(
        f"unscale_ on reference, dtype fp32, case sizes: grads[1] of shape [1], float32, at index [0] got {got}, "
        f"expected {expected}; error 1, allowed 0"
    )
    alone = "python -m amp_kernels verify --backend reference --device cpu --op unscale_ --dtype fp32 --case sizes"
    assert lines[first + 1] == f"  run it alone: {alone}"
    assert "NO (" in printed
    # One sentence for `grads` of all cases, however many.
    assert printed.count("run it alone") == 1 and re.search(r"  \d+ other cases fail in the same way", printed)


# A list of small tensors under one bound names the tensor, and its index in it.
@pytest.mark.parametrize(("size", "name"), [(2000, "grads[1]"), (50, "grads[1]")])
def test_the_farthest_element_is_told(size: int, name: str) -> None:
    truth = [torch.zeros(0).double(), torch.ones(2, size // 2).double(), torch.ones(7).double()]
    theirs = [x.float() for x in truth]
    ours = [x.clone() for x in theirs]
    ours[1][1, 3], ours[1][0, 2], ours[2][0] = 1.5, 1.25, 1.25
    wrong = [result for result in common.compare("grads", ours, theirs, truth) if not result.passed]
    assert wrong[0].name == name
    assert wrong[0].at == common.Difference((2, size // 2), "float32", (1, 3), 1.5, 1.0)
    ours[1][0, 2] = math.nan
    wrong = [result for result in common.compare("grads", ours, theirs, truth) if not result.passed]
    assert wrong[0].at is not None and wrong[0].at.index == (0, 2)


def test_a_shape_a_dtype_and_a_written_input_are_told() -> None:
    x = torch.zeros(2, 3)
    assert common.exact("y", x, x) == common.Result("y", 0, 0)
    wrong = common.exact("y", x.half(), torch.zeros(6))
    assert wrong.at == common.Difference((2, 3), "float16", None, "float16 (2, 3)", "float32 (6,)")
    assert (
        not common.same_kind("y", x, (2, 3), torch.float16).passed and common.same_kind("y", x, (2, 3), x.dtype).passed
    )
    written = x.clone()
    written[1, 0] = 2
    assert common.unchanged("x", [x, x], [x, written]).at == common.Difference((2, 3), "float32", (1, 0), 2.0, 0.0)


@pytest.mark.parametrize("op", ["unscale_", "clip_grad_norm_"])
def test_ten_crashes_are_one_sentence_and_a_number(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError("boom")

    cases = [case._replace(body=crash) for case in testing.CASES[op][:10]]
    monkeypatch.setitem(testing.CASES, op, tuple(cases))
    assert command.verify("reference", "cpu", [op]) == 1
    printed = capsys.readouterr().out
    assert printed.count("ZeroDivisionError: boom") == 1 and "  9 other cases fail in the same way" in printed
    assert "10 cases, 10 failed" in printed


def test_a_row_is_printed_when_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []

    def look(_: torch.device) -> list[testing.Result]:
        shown.append(capsys.readouterr())
        return [testing.Result("nothing", 0, 0)]

    cases = tuple(testing.Case("addmm", dtype, "look", look) for dtype in ("fp32", "fp16"))
    monkeypatch.setitem(testing.CASES, "addmm", cases)
    monkeypatch.setattr(command, "_SECONDS_IN_A_LOG", 0)
    assert command.verify("reference", "cpu", ["addmm"]) == 0
    assert "addmm" not in shown[0].out and shown[1].out.split()[:4] == ["addmm", "reference", "fp32", "1"]
    assert shown[1].err == "1 of 2 cases: addmm on reference\n"


def test_the_counter_stays_in_its_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    counter = command.Counter(2)
    counter.count("addmm on cpu")
    counter.clear()
    assert capsys.readouterr().err == "\r1 of 2 cases: addmm on cpu\x1b[K\r\x1b[K"


@pytest.mark.parametrize("says", ["CUDA error: an illegal memory access was encountered", "unspecified launch failure"])
def test_a_lost_context_ends_it_with_the_operators_name(
    says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(f"{says}\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.backends, "backend_reasons", lambda _: {"cuda": None})
    works = testing.Case("addmm", "fp16", "works", lambda _: iter([testing.Result("all", 0, 0)]))
    monkeypatch.setitem(testing.CASES, "addmm", (works, works._replace(name="bad", body=refuse), works))
    monkeypatch.setattr(testing.Case, "run", lambda case, *_: list(case.body(torch.device("cpu"))))
    # An exception alone is no reason to stop.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert command.verify("cuda", "cuda", ["addmm"]) == 1
    assert "3 cases, 1 failed" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    assert command.verify("cuda", "cuda", ["addmm", "linear"]) == 1
    printed = capsys.readouterr()
    assert "2 cases, 1 failed" in printed.out and "linear" not in printed.out
    assert printed.err.splitlines()[-1] == (
        f"verify: addmm on cuda lost the CUDA context in case fp16-bad, so nothing later could run: {says}"
    )


def test_json_holds_every_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nan = common.Difference((2,), "float16", (1,), math.nan, 0.5)
    for name in ("a case", "another"):
        case = testing.Case("addmm", "fp16", name, lambda _: iter([testing.Result("y", math.nan, 0.25, nan)]))
        monkeypatch.setitem(testing.CASES, "addmm", (*testing.CASES["addmm"][: name == "another"], case))
    assert command.verify("reference", "cpu", ["addmm"], seed=3, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["cases"] == told["failed"] == 2 and told["rows"][0]["passed"] is False
    assert list(told["environment"]) == ["amp_kernels", "torch", "CUDA", "GPU", "CPU", "threads"]
    first = told["failures"][0]
    assert first["at"] == {"shape": [2], "dtype": "float16", "index": [1], "got": "nan", "expected": 0.5}
    assert first["command"].endswith("--op addmm --dtype fp16 --case 'a case' --seed 3") and first["error"] == "nan"


def test_only_a_dtype_and_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.verify("reference", "cpu", ["sgd_", "grad_norm"], ["fp16/fp32", "mixed"], ["sizes", "plain"]) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[2:-2]]
    assert rows == [
        ["sgd_", "reference", "fp16/fp32", "1"], ["sgd_", "reference", "mixed", "1"],
        ["grad_norm", "reference", "mixed", "1"],
    ]  # fmt: skip
    with pytest.raises(report.CannotRun, match="no case has that operator, dtype and name"):
        command.verify("reference", "cpu", ["grad_norm"], ["int8"])


@pytest.mark.parametrize("op", ["unscale_", "int8_matmul"])
def test_a_seed_changes_inputs_and_is_gone_afterwards(op: str) -> None:
    make = partial(testing.common.randn, 5) if op == "unscale_" else partial(testing.int8.integers, 5)
    usual = make()
    seen = []
    case = testing.Case(op, "fp32", "look", lambda _: iter([seen.append(make()) or testing.Result("x", 0, 0)]))
    for seed in (0, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(testing.CASES, op, (case,))
            assert command.verify("reference", "cpu", [op], seed=seed) == 0
    assert torch.equal(seen[0], usual) and not torch.equal(seen[1], usual) and torch.equal(make(), usual)


def test_names_of_cases_tell_them_apart() -> None:
    """Else the command that repeats a failure would run another case too."""
    for op, cases in testing.CASES.items():
        assert len({(case.dtype, case.name) for case in cases}) == len(cases), op


# ----------------------------------------------------------------------------------------------- the environment
def test_the_environment_names_a_gpus_driver_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def output(command: list[str]) -> str:
        asked.append(command)
        return "570.86, 1980 MHz, 1980 MHz, 2619 MHz, 2619 MHz" if command[0] == "nvidia-smi" else ""

    monkeypatch.setattr(report, "_output", output)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="12-34"))
    told = "a GPU, driver 570.86, SM clock 1980 MHz (at most 1980 MHz), memory clock 2619 MHz (at most 2619 MHz)"
    assert report.environment()["GPU"] == told and asked[-1][-1] == "--id=GPU-12-34"
    monkeypatch.setattr(report, "_output", lambda _: "")
    assert report.environment()["GPU"] == "a GPU, driver and clocks unknown (no nvidia-smi)"


def test_the_commit_is_that_of_the_packages_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not of the repository around a virtual environment."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(report, "_output", lambda _: "abc123")
    for folder, told in (
        (tmp_path / "site-packages" / "amp_kernels", ""),
        (tmp_path / "amp_kernels", ", commit abc123"),
    ):
        monkeypatch.setattr(amp_kernels, "__path__", [str(folder)])
        assert report.environment()["amp_kernels"] == amp_kernels.__version__ + told


# ------------------------------------------------------------------------------------------------- error rule
def test_the_rule_is_the_designs() -> None:
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    error, allowed = testing.common.error_and_allowed(truth + 3e-7, truth + torch.tensor([0.0, 1e-7]), truth)
    assert error == pytest.approx(3e-7) and allowed == pytest.approx(2 * 1e-7 + 1e-7 * 2, rel=1e-6)


@pytest.mark.parametrize("ours", [math.nan, math.inf])
def test_the_rule_refuses_what_is_not_finite(ours: float) -> None:
    error, allowed = testing.common.error_and_allowed(torch.tensor([ours]), torch.ones(1), torch.ones(1))
    assert not error <= allowed


def test_the_rule_wants_torchs_overflow() -> None:
    inf = torch.tensor([math.inf])
    assert testing.common.error_and_allowed(inf, inf, torch.tensor([1e40]).double()) == (0.0, 0.0)
    assert testing.common.error_and_allowed(torch.ones(1), inf, torch.tensor([1e40]).double())[0] == math.inf
    assert testing.common.error_and_allowed(torch.ones(1), inf, torch.tensor([1.00001]).double())[0] == math.inf
    assert testing.common.error_and_allowed(inf, torch.ones(1), torch.ones(1))[0] == math.inf


def test_the_rule_takes_what_is_right_for_torchs_overflow() -> None:
    ours, theirs, truth = torch.tensor([3e38, 1.0]), torch.tensor([math.inf, 1.0]), torch.tensor([3e38, 1.0]).double()
    assert testing.common.error_and_allowed(ours, theirs, truth) == (0.0, 1e-7)


def test_differing_tells_zeros_apart() -> None:
    assert testing.common.differing(torch.zeros(2), torch.tensor([0.0, -0.0])) == 1


def test_differing_takes_any_nan_for_another() -> None:
    assert (
        testing.common.differing(
            torch.tensor([math.nan]), torch.tensor([0xFFC00001 - 2**32]).to(torch.int32).view(torch.float32)
        )
        == 0
    )


def test_changed_sees_every_bit() -> None:
    nan = torch.tensor([math.nan])
    assert testing.common.changed(nan, (nan.view(torch.int32) + 1).view(torch.float32)) == 1


@pytest.mark.parametrize("layout", testing.common.LAYOUTS)
def test_layouts_keep_values_and_surround_them_with_nan(layout: str) -> None:
    x = testing.common.randn(*testing.common.SHAPE)
    view = testing.common.LAYOUTS[layout](x)
    assert torch.equal(view, x)
    assert testing.common.written_outside(view) == 0


@pytest.mark.parametrize("layout", ["sliced", "every_other", "misaligned"])
def test_a_write_beside_a_view_is_seen(layout: str) -> None:
    view = testing.common.LAYOUTS[layout](testing.common.randn(*testing.common.SHAPE))
    view._base.fill_(0.0)
    assert testing.common.written_outside(view) > 0
