"""The option `state_dtype` of the optimizers: what is stored under which name, conversions, checkpoints, refusals.

tests/update/test_lean_states.py has the numbers.
"""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from optim_cases import OF_TORCH, randn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from amp_kernels import GradScaler, amp, use_backend
from amp_kernels.ops.table import LEAST_LEAN
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD, _sweep, ema_, fp32_state_dict
from amp_kernels.reference.states import GROUP

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
OPTIONS: dict[Any, dict[str, Any]] = {
    FusedSGD: {"lr": 0.01, "momentum": 0.9},
    FusedRMSprop: {"lr": 0.01, "momentum": 0.9},
    FusedAdam: {"lr": 0.01},
    FusedAdamW: {"lr": 0.01},
}
lean = pytest.mark.parametrize("state_dtype", [INT8, BF16], ids=["int8", "bf16"])
four = pytest.mark.parametrize("kind", OPTIONS)
SIZES = (LEAST_LEAN - 1, LEAST_LEAN, 5003)


def parameters(dtype: torch.dtype = BF16) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(randn(size, seed=i, dtype=dtype)) for i, size in enumerate(SIZES)]


def set_to(params: list[Any], grads: list[Any]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


def set_grads(optimizer: Any, step: int, scale: float = 1.0) -> None:
    for i, p in enumerate(params_of(optimizer)):
        grad = scale * randn(*p.shape, seed=1000 * step + i)
        grad.view(-1)[200:400] *= 1e-22  # their squares are subnormal or 0
        p.grad = grad.to(p.dtype)


def train(optimizer: Any, first: int, steps: int, scale: float = 1.0) -> None:
    for step in range(first, first + steps):
        set_grads(optimizer, step, scale)
        optimizer.step()


def trained(kind: Any, state_dtype: torch.dtype, dtype: torch.dtype = BF16, steps: int = 3, **options: Any) -> Any:
    optimizer = kind(parameters(dtype), state_dtype=state_dtype, **{**OPTIONS[kind], **options})
    train(optimizer, 0, steps)
    return optimizer


def params_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def like(optimizer: Any, state_dtype: torch.dtype | None = None) -> Any:
    """A new optimizer with the same weights."""
    group = optimizer.param_groups[0]
    params = [torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]
    return type(optimizer)(params, state_dtype=state_dtype or group["state_dtype"], **OPTIONS[type(optimizer)])


def assert_same(a: Any, b: Any) -> None:
    """Weights, and every entry of their states."""
    for p, q in zip(params_of(a), params_of(b), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=0)
        assert a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            assert torch.equal(value, b.state[q][key]) and value.stride() == b.state[q][key].stride(), key


# ----------------------------------------------------------------------------------------------------- what is stored
@four
def test_large_parameters_have_codes_and_small_ones_fp32(kind):
    optimizer = trained(kind, INT8)
    small, *large = params_of(optimizer)
    names = [name for name in optimizer._state_names(optimizer.param_groups[0]) if name]
    assert {k: v.dtype for k, v in optimizer.state[small].items() if k in names} == dict.fromkeys(names, FP32)
    for p in large:
        state = optimizer.state[p]
        assert state.keys() == {"step", "remainder", *(f"{n}_codes" for n in names), *(f"{n}_scale" for n in names)}
        for name in names:
            codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
            assert codes.dtype is (torch.uint8 if "sq" in name else INT8) and codes.shape == p.shape
            assert scale.dtype is FP32 and scale.shape == (-(-p.numel() // GROUP),)


@pytest.mark.parametrize(("kind", "option"), [(FusedAdam, "amsgrad"), (FusedRMSprop, "centered")])
def test_a_second_moment_that_is_compared_stays_fp32(kind, option):
    optimizer = trained(kind, INT8, **{option: True})
    dtypes = {key: value.dtype for key, value in optimizer.state[params_of(optimizer)[1]].items()}
    momentum, others = {
        FusedAdam: ("exp_avg", ("exp_avg_sq", "max_exp_avg_sq")),
        FusedRMSprop: ("momentum_buffer", ("square_avg", "grad_avg")),
    }[kind]
    assert dtypes.pop("step") is torch.int32 and dtypes.pop("remainder") is torch.int16
    assert dtypes == {f"{momentum}_codes": INT8, f"{momentum}_scale": FP32, **dict.fromkeys(others, FP32)}


def test_each_group_has_its_own(monkeypatch):
    params = parameters()
    optimizer = FusedAdam([{"params": params[:2], "state_dtype": BF16}, {"params": params[2:]}], state_dtype=INT8)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5000))], "state_dtype": FP32})
    train(optimizer, 0, 2)
    assert optimizer.state[params[1]]["exp_avg"].dtype is BF16
    assert "exp_avg_codes" in optimizer.state[params[2]]
    assert optimizer.state[params_of(optimizer)[3]]["exp_avg"].dtype is FP32
    assert [group["state_dtype"] for group in optimizer.param_groups] == [BF16, INT8, FP32]
    monkeypatch.setattr(type(optimizer._plans[0]), "_read_columns", None, raising=False)  # compiled code reads them all
    if _sweep.sweep() is not _sweep._IN_PYTHON:
        train(optimizer, 2, 1)


@lean
@pytest.mark.parametrize(
    ("kind", "option"), [(FusedAdam, "amsgrad"), (FusedRMSprop, "centered"), (FusedSGD, "momentum")]
)
def test_parameters_with_other_states_in_each_form(kind, option, state_dtype):
    """A launch is for tensors with the same states."""
    optimizers = []
    for together in (True, False):
        first, second = parameters(), parameters()
        groups = [{"params": first, option: 0.9 if option == "momentum" else True}, {"params": second, option: 0}]
        optimizer = kind(groups, lr=0.01, state_dtype=state_dtype)
        for step in range(2):
            set_grads(optimizer, step)
            if not together:
                kept = [p.grad for p in second]
                set_to(second, [None] * len(second))
                optimizer.step()
                set_to([*first, *second], [*[None] * len(first), *kept])
            optimizer.step()
        optimizers.append(optimizer)
    assert_same(*optimizers)


@pytest.mark.parametrize("prefix", ["", "torch."])
@pytest.mark.parametrize("dtype", [FP32, BF16, INT8], ids=str)
def test_names_of_dtypes(dtype, prefix):
    """Configuration files and command lines have nothing else."""
    name = prefix + str(dtype).removeprefix("torch.")
    optimizer = FusedAdam([{"params": parameters()}, {"params": parameters(), "state_dtype": name}], state_dtype=name)
    optimizer.add_param_group({"params": parameters(), "state_dtype": name})
    assert [group["state_dtype"] for group in (optimizer.defaults, *optimizer.param_groups)] == [dtype] * 4
    optimizer.param_groups[0]["state_dtype"] = name  # later too
    train(optimizer, 0, 1)
    p = params_of(optimizer)[2]
    assert ("exp_avg_codes" in optimizer.state[p]) == (dtype is INT8)
    assert {group["state_dtype"] for group in optimizer.state_dict()["param_groups"]} == {str(dtype)}


@pytest.mark.parametrize("value", [torch.float16, torch.uint8, "int4"])
def test_other_dtypes_are_refused(value):
    with pytest.raises(ValueError, match=r"^FusedAdam: state_dtype must be torch\.float32, .*, got (torch\.|'int4'$)"):
        FusedAdam(parameters(), state_dtype=value)
    optimizer = FusedAdam(parameters())
    with pytest.raises(ValueError, match=r"^FusedAdam: state_dtype must be torch\.float32"):
        optimizer.add_param_group({"params": parameters(), "state_dtype": value})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["state_dtype"] = value
    with pytest.raises(ValueError, match=r"state_dtype must be torch\.float32"):
        train(optimizer, 0, 1)
    with pytest.raises(TypeError, match=r"^FusedAdam: state_dtype must be a torch\.dtype such as"):
        FusedAdam(parameters(), state_dtype=8)


# ---------------------------------------------------------------------------------------------------------- checkpoints
@lean
@four
@pytest.mark.parametrize("compact", [False, True], ids=["fp32", "compact"])
@pytest.mark.parametrize("scale", [1.0, 1e-18])
def test_resuming_is_bit_equal(kind, state_dtype, compact, scale):
    optimizer = kind(parameters(), state_dtype=state_dtype, **OPTIONS[kind])
    train(optimizer, 0, 3, scale)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(compact=compact), file)
    file.seek(0)
    other = like(optimizer)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(optimizer, other)
    train(optimizer, 3, 3, scale)
    train(other, 3, 3, scale)
    assert_same(optimizer, other)


def test_a_compact_checkpoint_is_small():
    def size(compact: bool) -> int:
        states = optimizer.state_dict(compact=compact)["state"].values()
        tensors = (t for state in states for key, t in state.items() if key.startswith("exp_avg"))
        return sum(t.numel() * t.element_size() for t in tensors)

    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1 << 16))], state_dtype=INT8)
    train(optimizer, 0, 1)
    assert size(True) == (1 << 16) * (2 + 8 / GROUP)
    assert size(False) == 8 << 16


def test_codes_of_another_memory_format_are_saved_in_fp32():
    """Other programs may save them in row-major order, and then neighbours in memory would be others."""
    weight = torch.nn.Parameter(randn(16, 8, 8, 8, seed=1).to(memory_format=torch.channels_last))
    optimizer = FusedAdam([weight], lr=0.01, state_dtype=INT8)
    train(optimizer, 0, 2)
    saved = optimizer.state_dict(compact=True)
    assert saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(saved["state"][0][key], value) for key, value in optimizer.state_dict()["state"][0].items())
    plain = trained(FusedAdam, INT8)
    entry = plain.state_dict(compact=True)["state"][2]
    permuted = {**entry, "exp_avg_codes": torch.stack([entry["exp_avg_codes"]] * 2, 1)[:, 0]}
    saved = plain.state_dict(compact=True)
    saved["state"][2] = permuted
    with pytest.raises(ValueError, match=r"exp_avg_codes of .*\[2\] must (be contiguous|have the shape)"):
        plain.load_state_dict(saved)


def test_flattened_codes_are_refused_in_words():
    optimizer = trained(FusedAdam, INT8, FP32)
    saved = optimizer.state_dict()
    del saved["state"][1]["exp_avg"]
    saved["state"][1]["exp_avg_codes"] = {}
    with pytest.raises(ValueError, match=r"exp_avg of .*\[1\] must be in the state dict.*flatten_optimizer_state_dict"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("compact", [False, True])
def test_a_state_that_was_set_by_its_name_is_saved_without_codes(compact):
    optimizer = trained(FusedAdam, INT8)
    p = params_of(optimizer)[2]
    optimizer.state[p]["exp_avg"] = randn(*p.shape, seed=99)
    saved = optimizer.state_dict(compact=compact)["state"][2]
    assert torch.equal(saved["exp_avg"], randn(*p.shape, seed=99)) and "exp_avg_codes" not in saved


@lean
@four
def test_torchs_optimizers_load_the_state_dict(kind, state_dtype):
    optimizer = trained(kind, state_dtype, FP32)
    names = [name for name in optimizer._state_names(optimizer.param_groups[0]) if name]
    theirs = OF_TORCH[kind]([torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)], lr=0.1)
    theirs.load_state_dict(optimizer.state_dict())
    for p in theirs.param_groups[0]["params"]:
        assert all(theirs.state[p][name].dtype is FP32 and theirs.state[p][name].any() for name in names)
        assert not [key for key in theirs.state[p] if "codes" in key or "scale" in key]
        p.grad = torch.ones_like(p)
    theirs.step()


@lean
@four
def test_state_dicts_of_fp32_states_are_loaded(kind, state_dtype):
    """How states are stored is an option of the optimizer that loads, whatever the checkpoint has."""
    exact = trained(kind, FP32)
    ours = like(exact, state_dtype)
    ours.load_state_dict(exact.state_dict())
    assert ours.param_groups[0]["state_dtype"] is state_dtype
    names = [name for name in exact._state_names(exact.param_groups[0]) if name]
    for p, saved in zip(params_of(exact), ours.state_dict()["state"].values(), strict=True):
        for name in names:
            error = (saved[name] - exact.state[p][name]).abs().max() / exact.state[p][name].abs().max()
            assert error < 0.01 and (p.numel() < LEAST_LEAN) == (error == 0)
    again = like(exact, FP32)
    again.load_state_dict(ours.state_dict(compact=True))
    assert again.param_groups[0]["state_dtype"] is FP32
    for p, saved in zip(params_of(again), ours.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(again.state[p][name], saved[name]) for name in names)


SPOILED = {
    "another dtype": (lambda e: e.update(exp_avg_codes=e["exp_avg_codes"].float()), "must be a tensor of torch.int8"),
    "no sign": (
        lambda e: e.update(exp_avg_codes=e["exp_avg_codes"].view(torch.uint8)),
        "must be a tensor of torch.int8",
    ),
    "another shape": (lambda e: e.update(exp_avg_codes=e["exp_avg_codes"][1:]), r"must have the shape \(4096,\)"),
    "a short scale": (
        lambda e: e.update(exp_avg_scale=e["exp_avg_scale"][1:]),
        r"must be fp32 of shape \(32,\), got \(31",
    ),
    "no scale": (lambda e: e.pop("exp_avg_scale"), r"must be fp32 of shape \(32,\), got a NoneType"),
    "no codes": (lambda e: e.pop("exp_avg_codes"), "must be a tensor of torch.int8 codes, got a NoneType"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_codes_that_do_not_fit_are_refused(spoil, message):
    optimizer = trained(FusedAdam, INT8)
    saved = copy.deepcopy(optimizer.state_dict(compact=True))
    spoil(saved["state"][1])
    before = copy.deepcopy([dict(state) for state in optimizer.state.values()])
    with pytest.raises(ValueError, match=rf"^FusedAdam\.load_state_dict: exp_avg_\w+ of .*\[1\] {message}"):
        optimizer.load_state_dict(saved)
    spoiled = like(optimizer)
    train(spoiled, 0, 1)
    q = params_of(spoiled)[1]
    spoil(spoiled.state[q])
    weights = [p.detach().clone() for p in params_of(spoiled)]
    remedy = r"delete everything except 'remainder' from optimizer\.state"
    with pytest.raises(RuntimeError, match=rf"^FusedAdam: exp_avg_\w+ of .*\[1\] {message}.*{remedy}"):
        train(spoiled, 1, 1)
    assert all(map(torch.equal, weights, params_of(spoiled)))
    for state, old in zip(optimizer.state.values(), before, strict=True):
        assert all(torch.equal(state[key], old[key]) for key in old)


# ---------------------------------------------------------------------------------------------------------- conversions
@four
@pytest.mark.parametrize("to", [FP32, BF16, INT8])
@pytest.mark.parametrize("state_dtype", [FP32, BF16, INT8])
def test_the_option_of_a_running_optimizer_may_change(kind, state_dtype, to):
    optimizer = trained(kind, state_dtype)
    expected = like(optimizer, to)
    expected.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["state_dtype"] = to
    train(optimizer, 3, 2)
    train(expected, 3, 2)
    assert_same(optimizer, expected)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_refused_step_converts_nothing(backend):
    optimizer = trained(FusedAdam, FP32)
    optimizer.param_groups[0]["state_dtype"] = INT8
    before = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
    set_grads(optimizer, 3)
    params_of(optimizer)[2].grad = params_of(optimizer)[2].grad.to_sparse()
    with use_backend(backend) if backend else contextlib.nullcontext(), pytest.raises(RuntimeError, match="be dense"):
        optimizer.step()
    for state, old in zip(optimizer.state.values(), before, strict=True):
        assert state.keys() == old.keys() and all(torch.equal(state[key], value) for key, value in old.items())


def test_a_state_that_was_set_by_its_name_replaces_codes():
    """So other code changes a state: in fp32, under its own name."""
    optimizer = trained(FusedAdam, INT8)
    p = params_of(optimizer)[2]
    value = randn(*p.shape, seed=99)
    expected = like(optimizer)
    saved = optimizer.state_dict()
    saved["state"][2]["exp_avg"] = value
    expected.load_state_dict(saved)
    optimizer.state[p]["exp_avg"] = value.clone()
    train(optimizer, 3, 1)
    train(expected, 3, 1)
    assert_same(optimizer, expected)


def test_a_pruned_parameter_is_refused():
    optimizer = trained(FusedAdam, INT8)
    p = params_of(optimizer)[2]
    p.data = p.data[:4500].clone()
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"exp_avg_codes of .*\[2\] must have the shape \(4500,\).*, got \(5003,\)"):
        optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = torch.ones(4500)
        del optimizer.state[p][f"{name}_codes"], optimizer.state[p][f"{name}_scale"]
    optimizer.step()
    assert optimizer.state[p]["exp_avg_codes"].shape == (4500,)


SCALES = {
    "NaN": lambda scale: scale.clone().index_fill_(0, torch.tensor([3]), torch.nan),
    "negative": lambda scale: -scale,
    "infinite": lambda scale: scale / 0,
    "meta": lambda scale: scale.to("meta"),
    "sparse": lambda scale: scale.to_sparse(),
    "no tensor": lambda scale: 1.0,
}


@pytest.mark.parametrize("key", ["exp_avg_scale", "exp_avg_sq_scale"])
@pytest.mark.parametrize("bad", SCALES.values(), ids=SCALES)
def test_a_checkpoint_with_bad_scales_is_refused(bad, key):
    optimizer = trained(FusedAdam, INT8)
    saved, before = optimizer.state_dict(compact=True), copy.deepcopy(optimizer.state_dict()["state"])
    saved["state"][2][key] = bad(saved["state"][2][key])
    with pytest.raises(ValueError, match=rf"^FusedAdam\.load_state_dict: {key} of .*\[2\] must be (fp32|finite)"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("key", ["exp_avg_scale", "exp_avg_codes", "step"])
@pytest.mark.parametrize("bad", ["meta", "sparse"])
def test_a_step_with_states_without_memory_is_refused(bad, key):
    optimizer = trained(FusedAdam, INT8)
    p = params_of(optimizer)[2]
    optimizer.state[p][key] = wrong = SCALES[bad](optimizer.state[p][key])
    before = [q.detach().clone() for q in params_of(optimizer)]
    with pytest.raises(ValueError, match=rf"^FusedAdam: {key} of .*\[2\] must be "):
        train(optimizer, 3, 1)
    assert optimizer.state[p][key] is wrong and all(map(torch.equal, params_of(optimizer), before))


@lean
def test_another_memory_format(state_dtype):
    weight = torch.nn.Parameter(randn(16, 8, 8, 8, seed=1))
    optimizer = FusedAdam([weight], state_dtype=state_dtype)
    train(optimizer, 0, 1)
    before = optimizer.state_dict()["state"][0]
    weight.data = weight.data.to(memory_format=torch.channels_last)
    optimizer.init_state()
    after = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        # Codes are rounded again, because groups of neighbours in memory are others.
        assert (after[name] - before[name]).abs().max() <= 0.02 * before[name].abs().max()
    train(optimizer, 1, 1)
    key = "exp_avg_codes" if state_dtype is INT8 else "exp_avg"
    assert optimizer.state[weight][key].is_contiguous(memory_format=torch.channels_last)


# -------------------------------------------------------------------------------------------------------------- company
@lean
def test_a_scaler_and_clipping(state_dtype):
    """Skipped steps change neither states nor the random numbers of later steps."""
    params = [parameters(torch.float16) for _ in range(2)]
    one, other = (FusedAdamW(p, lr=0.01, max_grad_norm=1.0, state_dtype=state_dtype) for p in params)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1000, backoff_factor=0.999999)
    for step in range(4):
        for i, (p, q) in enumerate(zip(*params, strict=True)):
            q.grad = randn(*p.shape, seed=10 * step + i, dtype=torch.float16)
            p.grad = q.grad * (torch.inf if step == 2 else 8.0)
        scaler.scale(torch.ones(()))
        scaler.step(one)
        scaler.update(8.0)
        if step != 2:
            other.step()
    assert_same(one, other)


def test_copies_and_averages():
    optimizer = trained(FusedAdamW, INT8)
    for other in (copy.deepcopy(optimizer), like(optimizer)):
        other.load_state_dict(optimizer.state_dict()) if other.state == {} else None
        train(other, 3, 1)
        assert other.param_groups[0]["state_dtype"] is INT8
    train(optimizer, 3, 1)
    assert_same(optimizer, other)
    averages = [optimizer.master(p) for p in params_of(optimizer)]
    ema_(averages, optimizer, decay=0.5)
    model = torch.nn.ParameterList(params_of(optimizer))
    assert all(value.dtype is FP32 for value in fp32_state_dict(model, optimizer).values())


def test_amp_initialize_takes_no_option_from_torchs_optimizer():
    """torch's optimizer has the option as a string after it has loaded a state dict of ours."""
    model = torch.nn.Linear(80, 80)
    ours = FusedAdamW(model.parameters(), lr=0.01, state_dtype=INT8)
    train(ours, 0, 1)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs.load_state_dict(ours.state_dict())
    _, converted = amp.initialize(model, theirs, opt_level="O0", verbosity=0)
    assert converted.param_groups[0]["state_dtype"] is FP32
    train(converted, 1, 1)
    assert converted.state[model.weight]["exp_avg"].dtype is FP32


def test_pickles_of_a_release_without_the_option_are_fp32():
    optimizer = trained(FusedAdam, FP32)
    state = optimizer.__getstate__()
    state["defaults"] = {k: v for k, v in state["defaults"].items() if k != "state_dtype"}
    state["param_groups"] = [{k: v for k, v in g.items() if k != "state_dtype"} for g in state["param_groups"]]
    other = FusedAdam.__new__(FusedAdam)
    other.__setstate__(state)
    train(other, 3, 1)
    assert other.param_groups[0]["state_dtype"] is FP32


@lean
def test_gradients_of_another_dtype_are_unscaled_in_place(state_dtype):
    p = torch.nn.Parameter(torch.ones(5000))
    p.grad_dtype = torch.float16
    p.grad = torch.full((5000,), 8.0, dtype=torch.float16)
    optimizer, scaler = FusedAdam([p], state_dtype=state_dtype), GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.ones(5000, dtype=torch.float16))


def test_memory_that_codes_share_is_found():
    optimizer = trained(FusedAdam, INT8, FP32)
    p = params_of(optimizer)[2]
    memory = torch.zeros(2 * 5003, dtype=INT8)
    optimizer.state[p]["exp_avg_codes"] = memory[:5003]
    optimizer.state[p]["exp_avg_sq_codes"] = memory[5003:].view(torch.uint8)
    train(optimizer, 3, 1)
    optimizer.state[p]["exp_avg_sq_codes"] = memory[5002:-1].view(torch.uint8)
    with pytest.raises(RuntimeError, match="must not share memory"):
        train(optimizer, 4, 1)
    scale = optimizer.state[p]["exp_avg_scale"]
    optimizer.state[p]["exp_avg_sq_codes"] = scale.view(torch.uint8).repeat(40)[:5003]
    train(optimizer, 4, 1)
    optimizer.state[p]["exp_avg_sq_scale"] = scale
    with pytest.raises(RuntimeError, match="must not share memory"):
        train(optimizer, 5, 1)


def test_shared_codes_that_would_be_replaced_are_refused():
    optimizer = trained(FusedAdam, INT8)
    p = params_of(optimizer)[1]
    optimizer.state[p]["exp_avg_codes"].share_memory_()
    train(optimizer, 3, 1)
    optimizer.param_groups[0]["state_dtype"] = FP32
    with pytest.raises(RuntimeError, match=r"exp_avg_codes of .* since it is in shared memory"):
        train(optimizer, 4, 1)
    assert "exp_avg" not in optimizer.state[p]


def test_a_shard_has_groups_of_its_own(mesh):
    values = randn(96, 64, seed=3)
    sharded = torch.nn.Parameter(DTensor.from_local(values.clone(), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(values.clone())
    optimizers = [FusedAdamW([p], state_dtype=INT8) for p in (sharded, plain)]
    for step in range(2):
        grad = randn(96, 64, seed=10 + step)
        sharded.grad, plain.grad = DTensor.from_local(grad, mesh, [Shard(0)]), grad
        for optimizer in optimizers:
            optimizer.step()
    ours, theirs = (optimizer.state[p] for optimizer, p in zip(optimizers, (sharded, plain), strict=True))
    assert isinstance(ours["exp_avg_codes"], DTensor) and not isinstance(ours["exp_avg_scale"], DTensor)
    assert torch.equal(ours["exp_avg_codes"].to_local(), theirs["exp_avg_codes"])
    assert torch.equal(ours["exp_avg_scale"], theirs["exp_avg_scale"])
    saved = optimizers[0].state_dict()
    assert isinstance(saved["state"][0]["exp_avg"], DTensor)
    with pytest.raises(RuntimeError, match=r"^FusedAdamW\.state_dict: compact must be False, since .*is a DTensor"):
        optimizers[0].state_dict(compact=True)
    # Shards of other ranks may be large, so a small one is refused too.
    small = FusedAdamW([DTensor.from_local(torch.ones(4), mesh, [Shard(0)]).requires_grad_()], state_dtype=INT8)
    with pytest.raises(RuntimeError, match="compact must be False"):
        small.state_dict(compact=True)
    again = FusedAdamW([sharded], state_dtype=INT8)
    again.load_state_dict(saved)
    for key in ("exp_avg_codes", "exp_avg_sq_codes"):
        assert torch.equal(again.state[sharded][key].to_local(), ours[key].to_local())
