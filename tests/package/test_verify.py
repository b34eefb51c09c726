"""`python -m amp_kernels verify`, and that the shared cases and their error rule can fail."""

from __future__ import annotations

import builtins
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import WHY_NOT

from amp_kernels import reference, testing
from amp_kernels.testing import verify as command


def verify(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "amp_kernels", "verify", *arguments]
    return subprocess.run(line, env=os.environ | environment, capture_output=True, text=True, cwd=Path(__file__).parent)


def test_every_operator_on_every_backend_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenth of the cases: tests of the families run all of them."""
    monkeypatch.setattr(testing, "CASES", {op: cases[::10] for op, cases in testing.CASES.items()})
    assert command.verify() == 0
    table = capsys.readouterr().out
    assert all(op in table for op in testing.CASES) and "cases passed" in table


def test_the_command_line() -> None:
    run = verify("--backend", "reference", "--device", "cpu", "--op", "grad_norm")
    assert run.returncode == 0, run.stderr
    assert "grad_norm" in run.stdout and "sgd_" not in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_what_cannot_run_says_why() -> None:
    run = verify("--backend", "cuda")
    assert run.returncode == 2
    assert run.stderr.startswith("verify: cuda cannot run here: ") and "there is no CUDA device" in run.stderr


@pytest.mark.slow
def test_operators_on_the_interpreter() -> None:
    """One that reads lists and one that writes them; harness/test_triton_interpret.py tries the kernels."""
    if reason := WHY_NOT["triton-interpret"]():
        pytest.skip(reason)
    ops = ("--op", "grad_norm", "--op", "sgd_")
    run = verify("--backend", "triton", "--device", "cpu", *ops, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_wrong_backend_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def one_ulp_off(grads, *, inv_scale, found_inf):  # type: ignore[no-untyped-def]
        for grad in grads:
            product = (grad.float() * inv_scale).to(grad.dtype)
            grad.copy_(product.nextafter(torch.full_like(product, math.inf)))

    monkeypatch.setattr(reference, "unscale_", one_ulp_off)
    assert command.verify("reference", "cpu", ["unscale_"]) == 1
    printed = capsys.readouterr().out
    assert "NO (" in printed and "unscale_ on reference, fp32-sizes: grads[1]: error 1" in printed


def test_a_crashing_backend_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(reference, "unscale_", crash)
    assert command.verify("reference", "cpu", ["unscale_"]) == 1
    assert "ZeroDivisionError: boom" in capsys.readouterr().out


def test_the_table_without_tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name, *rest):  # type: ignore[no-untyped-def]
        if name == "tabulate":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    header, rule, row = command._table([["sgd_", "cpu", "fp32", "3", "exact", "exact", "yes"]]).splitlines()
    assert len(header.split("  ")) >= 7 and set(rule) == {"-", " "} and row.index("cpu") == header.index("backend")


# ------------------------------------------------------------------------------------------------- error rule
def test_the_rule_is_the_designs() -> None:
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    error, allowed = testing.error_and_allowed(truth + 3e-7, truth + torch.tensor([0.0, 1e-7]), truth)
    assert error == pytest.approx(3e-7) and allowed == pytest.approx(2 * 1e-7 + 1e-7 * 2, rel=1e-6)


@pytest.mark.parametrize("ours", [math.nan, math.inf])
def test_the_rule_refuses_what_is_not_finite(ours: float) -> None:
    error, allowed = testing.error_and_allowed(torch.tensor([ours]), torch.ones(1), torch.ones(1))
    assert not error <= allowed


def test_the_rule_wants_torchs_overflow() -> None:
    inf = torch.tensor([math.inf])
    assert testing.error_and_allowed(inf, inf, torch.tensor([1e40]).double()) == (0.0, 0.0)
    assert testing.error_and_allowed(torch.ones(1), inf, torch.tensor([1e40]).double())[0] == math.inf
    assert testing.error_and_allowed(torch.ones(1), inf, torch.tensor([1.00001]).double())[0] == math.inf
    assert testing.error_and_allowed(inf, torch.ones(1), torch.ones(1))[0] == math.inf


def test_the_rule_takes_what_is_right_for_torchs_overflow() -> None:
    ours, theirs, truth = torch.tensor([3e38, 1.0]), torch.tensor([math.inf, 1.0]), torch.tensor([3e38, 1.0]).double()
    assert testing.error_and_allowed(ours, theirs, truth) == (0.0, 1e-7)


def test_differing_tells_zeros_apart() -> None:
    assert testing.differing(torch.zeros(2), torch.tensor([0.0, -0.0])) == 1


def test_differing_takes_any_nan_for_another() -> None:
    assert (
        testing.differing(
            torch.tensor([math.nan]), torch.tensor([0xFFC00001 - 2**32]).to(torch.int32).view(torch.float32)
        )
        == 0
    )


def test_changed_sees_every_bit() -> None:
    nan = torch.tensor([math.nan])
    assert testing.changed(nan, (nan.view(torch.int32) + 1).view(torch.float32)) == 1


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts_keep_values_and_surround_them_with_nan(layout: str) -> None:
    x = testing.randn(*testing.SHAPE)
    view = testing.LAYOUTS[layout](x)
    assert torch.equal(view, x)
    assert testing.written_outside(view) == 0


@pytest.mark.parametrize("layout", ["sliced", "every_other", "misaligned"])
def test_a_write_beside_a_view_is_seen(layout: str) -> None:
    view = testing.LAYOUTS[layout](testing.randn(*testing.SHAPE))
    view._base.fill_(0.0)
    assert testing.written_outside(view) > 0
