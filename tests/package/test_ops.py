"""Schemas, fakes, errors, compilation and the choice of a backend."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch

import amp_kernels
from amp_kernels import backends, testing
from amp_kernels.families import FAMILIES, Family
from amp_kernels.ops.library import DEFINITIONS, Kernels
from amp_kernels.ops.lists import gradient_pass, update
from amp_kernels.testing.updates import UPDATES, Update

OPS = torch.ops.amp_kernels
F16 = torch.float16


def one(value: float = 1.0) -> Tensor:
    return torch.tensor(value)


def sgd_arguments(momentum: float = 0.9, **rest: Any) -> dict[str, Any]:
    return {
        "lr": 0.1, "momentum": momentum, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False,
        "maximize": False, "is_first_step": True, **rest,
    }  # fmt: skip


def rmsprop_arguments(**rest: Any) -> dict[str, Any]:
    return {
        "lr": 0.1,
        "alpha": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "maximize": False,
        **rest,
    }


def lists(op: str) -> tuple[list[Tensor], ...]:
    """A 16-bit and an fp32 parameter, their gradients, states and the master."""
    params = [testing.common.randn(5).to(F16), testing.common.randn(2, 3)]
    grads = [testing.common.randn(5, dtype=F16), testing.common.randn(2, 3)]
    states = [[torch.zeros(p.shape) for p in params] for _ in FAMILIES[op.removesuffix("_")].states]
    return params, grads, *states, [params[0].float()]


# ---------------------------------------------------------------------------------------------------- opcheck
def update_arguments(family: Family, example: str = "full", *, is_scaled: bool = False) -> tuple[Any, ...]:
    """Those of the operator that all updates share."""
    update = UPDATES[family.name]
    options = update.examples[example]
    kept = update.states(options)
    params, grads, *states, masters = lists(f"{family.name}_")
    present = [state if name in kept else None for name, state in zip(family.states, states, strict=True)]
    scalars = (one(0.1), 1, one(2.0), one(0.0)) if is_scaled else (None, 1, None, None)
    hyper = list(family.hyper_of({**update.defaults(), **options}))
    return family.name, params, grads, *present, *[None] * (3 - len(states)), masters, hyper, 0.1, *scalars


def op_samples() -> Iterator[Any]:
    grads = lambda: [testing.common.randn(5), testing.common.randn(3, 4, dtype=F16).mT, testing.common.randn(0)]  # noqa: E731
    yield pytest.param("unscale_", (grads(), one(0.5), one(0.0)), {}, id="unscale_")
    yield pytest.param("grad_norm", (grads(), None, one(0.0)), {}, id="grad_norm")
    yield pytest.param("grad_norm", (grads(), one(0.5), one(0.0)), {}, id="grad_norm-checked")
    tensors = grads()
    results = testing.exponents.results_for(tensors, torch.device("cpu"))
    yield pytest.param("count_exponents_", (tensors, *results), {}, id="count_exponents_")
    for family in FAMILIES.values():
        yield pytest.param("update_", update_arguments(family), {}, id=family.name)
        yield pytest.param("update_", update_arguments(family, is_scaled=True), {}, id=f"{family.name}-scaled")
        yield pytest.param("update_", update_arguments(family, "plain"), {}, id=f"{family.name}-plain")


@pytest.mark.parametrize(("op", "arguments", "options"), list(op_samples()))
def test_opcheck(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.library.opcheck(getattr(OPS, op).default, arguments, options)


class Checked:
    """A backend whose table ops are checked at each call, while the memory that its table names is alive."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def check(*args: Any) -> Any:
            self.called.append(name)
            torch.library.opcheck(getattr(OPS, name).default, args, test_utils=["test_schema"])
            return getattr(OPS, name).default(*args) if name.startswith("_load_") else None

        return check


# Table ops write through addresses that no schema can show, so they are never traced and have no fake: only
# what the schema says of their arguments is checked. `_send_` has no CPU kernel.
@pytest.mark.skipif(backends.backend_reasons("cpu")["cpu"] is not None, reason="there are no C++ kernels here")
@pytest.mark.parametrize("op", ["_unscale_table_", "_update_table_"])
def test_table_ops_write_only_what_their_schema_says(op: str) -> None:
    checked: Any = Checked()
    if op == "_unscale_table_":
        gradient_pass(checked, [testing.common.randn(5)], one(0.5), one(0.0), write=True)
    else:
        for family in FAMILIES.values():
            update(checked, *update_arguments(family))
    assert op in checked.called


@pytest.mark.parametrize("name", ["cpu", "cuda", "triton"])
def test_a_backend_has_the_kernels_that_its_type_names(name: str) -> None:
    if backends.backend_reasons("cuda" if name == "triton" else name)[name] not in (None, "there is no CUDA device"):
        pytest.skip(f"{name} is not here")
    ops: Any = backends.kernels(name)
    declared = set(Kernels.__annotations__)
    assert set(ops.__all__) == declared if name == "triton" else set(vars(ops)) < declared


WITHOUT_TRITON = {
    "count_exponents_": lambda x: (None, ([x], *testing.exponents.results_for([x], x.device))),
    "matmul": lambda x: ((x, x), (x, x, None, 1.0, 0.0, None, F16, False, False)),
    "padded_matmul": lambda x: ((x, x, x, x), (x, x, None, 1.0, 0.0, None, F16, False, False, 0, 0)),
    "padded_linear_backward": lambda x: ((x, x, x), (x, x, x, None, None, True, True, False, 8, 0)),
}


@pytest.mark.parametrize("name", WITHOUT_TRITON)
def test_triton_leaves_what_it_has_no_kernel_for_to_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {op._opname for op, known in DEFINITIONS.items() if known.launch is None} == set(WITHOUT_TRITON)
    op, called = getattr(OPS, name).default, []
    result, arguments = WITHOUT_TRITON[name](torch.ones(8, 8, dtype=F16))
    reference = lambda *args: called.append(args) or result  # noqa: E731
    monkeypatch.setitem(DEFINITIONS, op, DEFINITIONS[op]._replace(reference=reference))
    monkeypatch.setattr(backends, "refuse", lambda *_: None)  # this process does not interpret
    with backends._Interceptor("triton"):
        op(*arguments)
    assert len(called) == 1


# ------------------------------------------------------------------------------------------------------ fakes
def test_fakes_of_the_norm_have_its_dtype_and_shape() -> None:
    with torch._subclasses.FakeTensorMode():
        norm = amp_kernels.grad_norm([torch.empty(5, dtype=F16)], inv_scale=torch.empty(()))
    assert norm.dtype == torch.float32 and norm.shape == ()


def test_a_forced_backend_leaves_fakes_alone() -> None:
    """They have no memory that a backend could serve, or not."""
    with torch._subclasses.FakeTensorMode(), amp_kernels.use_backend("cpu"):
        norm = amp_kernels.grad_norm([torch.empty(5, device="cuda")])
        codes = amp_kernels.quantize_int8(torch.empty(4, 8, device="cuda")).values
    assert norm.device.type == codes.device.type == "cuda"


def test_fakes_check_arguments() -> None:
    with (
        torch._subclasses.FakeTensorMode(),
        pytest.raises(TypeError, match=r"unscale_: grads\[0\] must be float32"),
    ):
        amp_kernels.unscale_([torch.empty(5, dtype=torch.int32)], inv_scale=torch.empty(()), found_inf=torch.empty(()))


# ----------------------------------------------------------------------------------------------------- errors
def unscale(grads: Any, inv_scale: Any = one(0.5), found_inf: Any = one(0.0)) -> None:  # noqa: B008
    amp_kernels.unscale_(grads, inv_scale=inv_scale, found_inf=found_inf)


def sgd(params: Any, grads: Any, buffers: Any, masters: Any = (), **options: Any) -> None:
    amp_kernels.sgd_(params, grads, buffers, masters, **sgd_arguments(**options))


def rmsprop(params: Any, grads: Any, square: Any, buffers: Any = (), avgs: Any = (), **options: Any) -> None:
    amp_kernels.rmsprop_(params, grads, square, buffers, avgs, **rmsprop_arguments(**options))


def f(*shape: int) -> Tensor:
    return torch.ones(shape)


D64, HALF = f(2).double(), f(2).half()
ERRORS: dict[str, tuple[Callable[..., None], tuple[Any, ...], type[Exception], str]] = {
    # id: (function, arguments, exception, sentence)
    "grads_dtype": (
        unscale,
        ([f(2), D64],),
        TypeError,
        r"unscale_: grads\[1\] must be float32, .*got torch.float64",
    ),
    "grads_none": (
        unscale,
        ([f(2), None],),
        TypeError,
        r"unscale_: grads\[1\] must be a Tensor, got NoneType",
    ),
    "no_grads": (unscale, (None,), TypeError, "unscale_: grads must be a list of Tensors, got NoneType; pass a"),
    "grads_scalar": (unscale, (f(2)[0],), TypeError, "unscale_: grads must be a list of Tensors, got Tensor; pass a"),
    "inv_scale_none": (unscale, ([f(2)], None), TypeError, "unscale_: inv_scale must be a Tensor, got NoneType"),
    "found_inf_none": (unscale, ([f(2)], one(0.5), None), TypeError, "unscale_: found_inf must be a Tensor, got None"),
    "grads_sparse": (
        unscale,
        ([f(2), f(2).to_sparse()],),
        ValueError,
        r"unscale_: grads\[1\] must be a dense .*got torch.sparse_coo; call",
    ),
    "grads_expanded": (
        unscale,
        ([f(2), f(1).expand(2)],),
        ValueError,
        r"unscale_: grads\[1\] must not be an expanded",
    ),
    "inv_scale_dtype": (
        unscale,
        ([f(2)], D64[0]),
        ValueError,
        r"unscale_: inv_scale must be one float32 .*float64",
    ),
    "inv_scale_shape": (
        unscale,
        ([f(2)], f(2)),
        ValueError,
        r"unscale_: inv_scale must be one .*shape \(2,\)",
    ),
    "inv_scale_float": (
        unscale,
        ([f(2)], 0.5),
        TypeError,
        r"unscale_: inv_scale must be a Tensor, got float",
    ),
    "found_inf_dtype": (
        unscale,
        ([f(2)], one(0.5), D64[0]),
        ValueError,
        r"unscale_: found_inf must be one float32",
    ),
    "norm_dtype": (
        lambda g: amp_kernels.grad_norm(g),
        ([f(2), D64],),
        TypeError,
        r"grad_norm: grads\[1\] must be float32, .*float64",
    ),
    "norm_none": (
        lambda g: amp_kernels.grad_norm(g),
        ([None],),
        TypeError,
        r"grad_norm: grads\[0\] must be a Tensor, got NoneType",
    ),
    "fewer_grads": (
        sgd,
        ([f(2), f(2)], [f(2)], []),
        ValueError,
        r"sgd_: grads must hold one .*of the 2 params, got 1",
    ),
    "grad_none": (
        sgd,
        ([f(2)], [None], [f(2)]),
        TypeError,
        r"sgd_: grads\[0\] must be a Tensor, got NoneType",
    ),
    "param_dtype": (
        sgd,
        ([D64], [f(2)], [f(2)]),
        TypeError,
        r"sgd_: params\[0\] must be float32, .*got torch.float64",
    ),
    "param_expanded": (
        sgd,
        ([f(1).expand(2)], [f(2)], [f(2)]),
        ValueError,
        r"sgd_: params\[0\] must not be an expanded",
    ),
    "grad_shape": (
        sgd,
        ([f(2), f(3)], [f(2), f(2)], [f(2), f(3)]),
        ValueError,
        r"sgd_: grads\[1\] must have shape \(3,\).*got \(2,\)",
    ),
    "buffers_missing": (
        sgd,
        ([f(2)], [f(2)], []),
        ValueError,
        r"sgd_: momentum_buffers must hold one .*got 0",
    ),
    "buffer_dtype": (
        sgd,
        ([HALF], [f(2)], [HALF], [f(2)]),
        TypeError,
        r"sgd_: momentum_buffers\[0\] must be float32, got torch.float16",
    ),
    "masters_missing": (
        sgd,
        ([HALF], [f(2)], [f(2)]),
        ValueError,
        r"sgd_: masters must hold 1 .*each 16-bit param.*got 0",
    ),
    "masters_too_many": (
        sgd,
        ([f(2)], [f(2)], [f(2)], [f(2)]),
        ValueError,
        r"sgd_: masters must hold .*got 1",
    ),
    "master_dtype": (
        sgd,
        ([HALF], [f(2)], [f(2)], [HALF]),
        TypeError,
        r"sgd_: masters\[0\] must be float32 or int16, got torch.float16",
    ),
    "square_avgs_missing": (
        rmsprop,
        ([f(2)], [f(2)], []),
        ValueError,
        r"rmsprop_: square_avgs must hold one .*got 0",
    ),
    "grad_avgs_shape": (
        rmsprop,
        ([f(2)], [f(2)], [f(2)], [f(2)], [f(3)]),
        ValueError,
        r"rmsprop_: grad_avgs\[0\] must have shape \(2,\)",
    ),
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (tuple, list)) else []


@pytest.mark.parametrize(("function", "arguments", "exception", "sentence"), ERRORS.values(), ids=ERRORS)
def test_error(
    function: Callable[..., None], arguments: tuple[Any, ...], exception: type[Exception], sentence: str
) -> None:
    before = [t.clone() for t in tensors_in(arguments)]
    with pytest.raises(exception, match=sentence):
        function(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_in(arguments), strict=True))


@pytest.mark.parametrize("name", ["lr", "grad_scale", "found_inf"])
def test_scalars_of_an_update_are_checked(name: str) -> None:
    p = f(2)
    with pytest.raises(ValueError, match=rf"sgd_: {name} must be one float32 element, got torch.float64"):
        sgd([p], [f(2)], [f(2)], **{name: D64[0]})
    assert p.tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------ use_backend
def test_use_backend_names_the_backends() -> None:
    with (
        pytest.raises(ValueError, match=r"use_backend: name must be one of cuda, .*got 'gpu'"),
        amp_kernels.use_backend("gpu"),
    ):
        pass


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_reason", lambda *_: "the disk is full")
    with (
        pytest.raises(RuntimeError, match="use_backend: triton cannot run here: the disk is full"),
        amp_kernels.use_backend("triton"),
    ):
        pass


def test_a_forced_backend_refuses_the_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_reason", lambda _, device: {"cpu": "no CPU", "cuda": None}[device.type])
    with (
        amp_kernels.use_backend("cuda"),
        pytest.raises(RuntimeError, match="'cuda' cannot serve cpu tensors: no CPU"),
    ):
        unscale([f(2)])


def test_kernels_for_cuda_cannot_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_why_not_compiled", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        pytest.raises(RuntimeError, match=r"use_backend: cuda cannot run here: .*there is no CUDA device"),
        amp_kernels.use_backend("cuda"),
    ):
        pass


@pytest.mark.skipif(backends.backend_reasons("cpu")["cpu"] is not None, reason="nothing was compiled here")
def test_a_gpu_that_nothing_was_compiled_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = importlib.import_module("amp_kernels._C")
    answers = ["", "no kernel image is available"]
    monkeypatch.setattr(compiled, "why_no_kernel", answers.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["H100", "Tesla V100"].__getitem__)
    monkeypatch.setattr(backends, "_why_not_compiled", lambda _: None)
    backends._why_not_on.cache_clear()
    try:
        for device in ("cuda", "cuda:1"):
            reason = backends.backend_reasons(device)["cuda"]
            assert reason.startswith("amp_kernels._C cannot run on Tesla V100 (no kernel image is available); build")
        assert backends.backend_reasons("cuda:0")["cuda"] is None
        assert backends.backend_reasons("cpu")["cpu"] is None
    finally:
        backends._why_not_on.cache_clear()


@pytest.mark.parametrize("says", [True, False], ids=["", "a torch that names no modes"])
def test_use_backend_is_undone_also_by_an_error(says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not says:
        monkeypatch.delattr(_python_dispatch, "_get_current_dispatch_mode_stack")
    monkeypatch.setattr(backends, "_reason", lambda *_: None)
    with amp_kernels.use_backend("reference"):
        with pytest.raises(KeyError), amp_kernels.use_backend("cpu"):
            assert backends.select(torch.device("cpu")) == "cpu"
            raise KeyError
        assert backends.select(torch.device("cpu")) == "reference"
    assert backends.forced() is None


def test_the_reference_runs_where_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(amp_kernels.reference, "unscale_", lambda *_, **__: called.append(True))
    with amp_kernels.use_backend("reference"):
        unscale([f(2)])
    assert called


def test_cuda_tensors_on_the_reference_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_reason", lambda *_: "it is off")
    backends.automatic.cache_clear()
    try:
        with pytest.warns(UserWarning, match="slow reference on CUDA tensors: cuda: it is off; triton: it is off"):
            assert backends.select(torch.device("cuda")) == "reference"
        assert backends.select(torch.device("cuda")) == "reference"  # a second warning would be an error
    finally:
        backends.automatic.cache_clear()


# ---------------------------------------------------------------------------------------------------- compile
def compiled_unscale(grads: list[Tensor], factor: Tensor, flag: Tensor) -> Tensor:
    scaled = [g * 2 for g in grads]
    amp_kernels.unscale_(scaled, inv_scale=factor, found_inf=flag)
    amp_kernels.unscale_(grads, inv_scale=factor, found_inf=flag)
    return scaled[0] + grads[0]


def compiled_norm(grads: list[Tensor], factor: Tensor, flag: Tensor) -> Tensor:
    return amp_kernels.grad_norm([g * 2 for g in grads], inv_scale=factor, found_inf=flag) + flag


def compiled_count(tensors: list[Tensor]) -> Tensor:
    results = testing.exponents.results_for(tensors, torch.device("cpu"))
    OPS.count_exponents_([t * 2 for t in tensors], *results)
    return torch.cat([x.flatten().double() for x in results]) * 2


def compiled_clip(params: list[Tensor]) -> Tensor:
    return amp_kernels.clip_grad_norm_(params, 0.5) * 2


def compiled_update(update: Update) -> Callable[..., Tensor]:
    arguments = update.arguments(update.examples["full"])

    def step(params: list[Tensor], grads: list[Tensor], *states_and_masters: list[Tensor]) -> Tensor:
        update.function(params, grads, *states_and_masters, **arguments, grad_scale=torch.full((), 2.0))
        return params[0] * 2

    return step


def gradients() -> list[Tensor]:
    return [testing.common.randn(9), testing.common.randn(3, 4, dtype=F16)]


def with_grads() -> list[Tensor]:
    params = [torch.zeros_like(g, requires_grad=True) for g in gradients()]
    for param, grad in zip(params, gradients(), strict=True):
        param.grad = grad
    return params


COMPILED: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = {
    "unscale_": (compiled_unscale, lambda: (gradients(), one(0.5), one(0.0))),
    "unscale_-overflow": (compiled_unscale, lambda: ([*gradients(), f(3) * torch.inf], one(0.5), one(0.0))),
    "grad_norm": (compiled_norm, lambda: ([*gradients(), f(3) * torch.inf], one(0.5), one(0.0))),
    "count_exponents_": (compiled_count, lambda: ([*gradients(), f(3) * torch.inf],)),
    "clip_grad_norm_": (compiled_clip, lambda: (with_grads(),)),
    **{f"{name}_": (compiled_update(update), partial(lists, f"{name}_")) for name, update in UPDATES.items()},
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted process compiles nothing")
def test_autograd_notices_what_a_compiled_graph_writes() -> None:
    torch.compiler.reset()
    grad, x = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (x * grad).sum()  # which keeps grad for x's gradient
    torch.compile(unscale, fullgraph=True)([grad], one(0.5), one(0.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted process compiles nothing")
@pytest.mark.parametrize(("function", "make"), COMPILED.values(), ids=COMPILED)
def test_compiled_is_eager(function: Callable[..., Tensor], make: Callable[[], tuple[Any, ...]]) -> None:
    torch.compiler.reset()
    eager, traced = make(), make()
    expected = function(*eager)
    result = torch.compile(function, fullgraph=True)(*traced)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(tensors_in(traced), tensors_in(eager), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
