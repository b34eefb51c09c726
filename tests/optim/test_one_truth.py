"""State and checkpoints belong to the user: what a step reads there counts, however it got there, and is not lost."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from optim_cases import DAMPENED, FULL, OF_TORCH
from torch import Tensor
from torch.testing import assert_close

from amp_kernels import GradScaler, amp, use_backend
from amp_kernels.ops.table import STATE_DTYPES
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD, fp32_state_dict, load_fp32_state_dict
from amp_kernels.optim._base import FusedOptimizer

optimizers = pytest.mark.parametrize("family", OF_TORCH, ids=lambda family: family.__name__)
DTYPES = (torch.float16, torch.bfloat16)
MANY = 3 * 65536 + 5  # elements in several chunks of any kernel


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Parameter(values.to(dtype))


def step(optimizer: torch.optim.Optimizer, grad: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, grad)
    optimizer.step()


def saved_by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def contents(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of everything that a checkpoint and a step depend on."""
    states = {p: dict(state) for p, state in optimizer.state.items()}
    # assert_close compares no dtypes
    groups = [{**group, "state_dtype": STATE_DTYPES[group["state_dtype"]]} for group in optimizer.param_groups]
    return copy.deepcopy(([p.detach() for p in states], list(states.values()), groups))


def assert_unchanged(optimizer: torch.optim.Optimizer, before: Any) -> None:
    torch.testing.assert_close(contents(optimizer), before, rtol=0, atol=0, equal_nan=True)


# --------------------------------------------------------------------------------------- row 1: keys of somebody else
SAVES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda saved: saved,
    "deepcopy": copy.deepcopy,
    "torch.save": saved_by_torch,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@optimizers
def test_keys_of_others_survive_a_checkpoint(family, dtype, save):
    p = leaf(5, dtype=dtype)
    optimizer = family([p], **FULL[family])
    optimizer.state[p]["early"] = torch.arange(5.0)  # before the first step
    step(optimizer)
    optimizer.state[p] |= {"slow": torch.full((5,), 0.1), "count": 7, "history": [torch.ones(2)]}
    optimizer.load_state_dict(save(optimizer.state_dict()))
    assert optimizer.state[p]["count"] == 7
    assert torch.equal(optimizer.state[p]["history"][0], torch.ones(2).to(dtype))  # torch casts what it does not know
    assert torch.equal(optimizer.state[p]["slow"], torch.full((5,), 0.1).to(dtype))
    assert torch.equal(optimizer.state[p]["early"], torch.arange(5.0).to(dtype))
    step(optimizer)
    assert int(optimizer.state[p]["step"]) == 2 and "slow" in optimizer.state[p]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_keys_that_begin_like_the_remainder_belong_to_others(early):
    p = leaf(5, dtype=torch.bfloat16)
    optimizer = FusedAdam([p], lr=0.1)
    own = {"remainder_codes": torch.ones(5), "remainder_scale": torch.ones(1)}
    if not early:
        step(optimizer)
    optimizer.state[p].update(own)
    for _ in range(3):
        step(optimizer)
    assert all(optimizer.state[p][key] is value for key, value in own.items())


@optimizers
def test_a_loaded_state_has_its_keys_in_the_order_of_a_saved_one(family):
    p = leaf(5, dtype=torch.bfloat16)
    optimizer = family([p], **FULL[family])
    step(optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert list(optimizer.state_dict()["state"][0]) == list(saved["state"][0])


def test_keys_of_others_survive_dcp_and_amp(tmp_path):
    import torch.distributed.checkpoint as checkpoint

    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    step(optimizer)
    optimizer.state[model.weight]["slow"] = torch.arange(6.0).view(2, 3)
    saved = {"optimizer": dcp.get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    saved["optimizer"]["state"]["weight"]["slow"] = torch.zeros(2, 3)
    checkpoint.load(saved, checkpoint_id=tmp_path, no_dist=True)
    del optimizer.state[model.weight]["slow"]
    dcp.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    assert torch.equal(optimizer.state[model.weight]["slow"], torch.arange(6.0).view(2, 3))


def test_keys_of_others_survive_amp_initialize():
    """Which turns an optimizer of torch into one of ours."""
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(optimizer)
    optimizer.state[model.weight]["slow"] = torch.arange(6.0).view(2, 3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert isinstance(optimizer, FusedAdam)
    assert torch.equal(optimizer.state[model.weight]["slow"].float(), torch.arange(6.0).view(2, 3))


def test_lookahead_resumes_where_it_was():
    """timm's keeps its slow weights in the state of the optimizer in it."""

    def train(optimizer: torch.optim.Optimizer, p: Tensor, steps: range) -> None:
        for i in steps:
            step(optimizer, math.sin(i))
            slow = optimizer.state[p].setdefault("slow_buffer", p.detach().clone())
            if i % 5 == 4:
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)

    whole, p = [], []
    for resumes in (False, True):
        p = leaf(7)
        optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
        train(optimizer, p, range(7))
        if resumes:
            saved, p = copy.deepcopy(optimizer.state_dict()), torch.nn.Parameter(p.detach().clone())
            optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
            optimizer.load_state_dict(saved)
        train(optimizer, p, range(7, 20))
        whole.append(p.detach())
    assert torch.equal(*whole)


def test_parameters_of_a_group_may_be_a_tuple():
    p = leaf(5)
    optimizer = FusedSGD([p], lr=0.5)
    before = p.detach().clone()
    step(optimizer)
    optimizer.param_groups[0]["params"] = (p,)
    step(optimizer)
    assert torch.equal(p.detach(), before - 0.5 - 0.5)


# ------------------------------------------------------------------------------------------ row 2: reads change nothing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@optimizers
def test_a_read_in_fp32_changes_nothing(family, dtype):
    """Masters live through a cast to fp32 and back, around a save every five steps."""
    model = torch.nn.Linear(33, 9).to(dtype)
    twin = copy.deepcopy(model)
    optimizer, control = (family(m.parameters(), **{**FULL[family], "lr": 1e-4}) for m in (model, twin))
    for i in range(20):
        for optim in (optimizer, control):
            step(optim, 1.0)
        if i % 5 == 4:
            before = [optimizer.master(p) for p in model.parameters()]
            model.float()
            saved = saved_by_torch(optimizer.state_dict())
            assert all(torch.equal(saved["state"][k]["master"], master) for k, master in enumerate(before))
            fp32_state_dict(model, optimizer)
            model.to(dtype)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.master(p), control.master(q))


@pytest.mark.parametrize("odd", [0.3, math.nan])
def test_a_read_in_fp32_of_two_dtypes(odd):
    """fp16 and bf16 in one optimizer, and a weight that is no number."""
    params = [torch.nn.Parameter(torch.cat([leaf(99).detach(), torch.tensor([odd])]).to(dtype)) for dtype in DTYPES]
    optimizer = FusedSGD(params, lr=0.1)
    step(optimizer, 0.7)
    masters = [optimizer.master(p) for p in params]
    for p in params:
        p.grad, p.data = None, p.data.float()
    saved = optimizer.state_dict()["state"]
    for i, master in enumerate(masters):
        assert torch.equal(saved[i]["master"][:99], master[:99])


def test_momentum_that_no_step_has_set_is_set_by_the_next():
    """The first step is skipped, the second has no momentum."""
    results = []
    for family in (FusedSGD, torch.optim.SGD):
        p = torch.nn.Parameter(torch.zeros(1))
        optimizer = family([p], lr=1.0, momentum=0.9, dampening=0.5)
        scaler = GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        for grad, momentum in ((math.inf, 0.9), (1.0, 0.0), (1.0, 0.9)):
            optimizer.param_groups[0]["momentum"] = momentum
            p.grad = torch.full_like(p, grad)
            scaler.step(optimizer)
            scaler.update()
        results.append(p.item())
    assert results[0] == results[1]


def test_what_was_written_in_fp32_is_the_master():
    p = leaf(64, dtype=torch.bfloat16)
    optimizer = FusedAdam([p], lr=1e-3)
    step(optimizer)
    master = optimizer.master(p)
    p.data = p.data.float()
    p.data[0] = 0.1  # no bf16 number
    saved = optimizer.state_dict()["state"][0]["master"]
    assert saved[0] == p.data[0] and torch.equal(saved[1:], master[1:])
    step(optimizer)  # in fp32, where a parameter is its own master
    assert "master" not in optimizer.state_dict()["state"][0]


# -------------------------------------------------------------------------------- rows 3, 4, 9, 18: one count of steps
WRITES: dict[str, Callable[[Tensor, int], Any]] = {
    "data": lambda step, n: step.data.fill_(n),
    "in place": lambda step, n: step.fill_(n),
    "detach": lambda step, n: step.detach().copy_(torch.tensor(n)),
    "numpy": lambda step, n: step.numpy().fill(n),
    "dlpack": lambda step, n: torch.from_dlpack(step.detach()).fill_(n),
    "storage": lambda step, n: torch.tensor([], dtype=torch.int32).set_(step.untyped_storage()).fill_(n),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_count_that_is_written_counts_for_the_whole_tensor(write):
    p, expected = leaf(MANY), leaf(MANY)
    ours, theirs = FusedAdam([p], lr=0.1), torch.optim.Adam([expected], lr=0.1)
    for optimizer in (ours, theirs):
        step(optimizer)
        step(optimizer)
    write(ours.state[p]["step"], 0)
    theirs.state[expected]["step"].zero_()
    step(ours)
    step(theirs)
    assert_close(p, expected)
    assert ours.state[p]["step"].item() == 1


@pytest.mark.parametrize(
    "value", [torch.tensor(7.0), 7, torch.tensor([7]), torch.tensor(7, dtype=torch.int64)], ids=repr
)
def test_a_count_of_another_kind_is_converted(value):
    p, expected = leaf(5), leaf(5)
    ours, theirs = FusedAdam([p], lr=0.1), torch.optim.Adam([expected], lr=0.1)
    for optimizer in (ours, theirs):
        step(optimizer)
    ours.state[p]["step"], theirs.state[expected]["step"] = value, torch.tensor(7.0)
    step(ours)
    step(theirs)
    assert_close(p, expected)
    assert ours.state[p]["step"].item() == 8


def run_forked(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter's threads do not live through a fork")
@optimizers
def test_processes_that_share_state_step_in_turn(family):
    """A3C's shared Adam."""
    p, expected = leaf(9), leaf(9)
    ours, theirs = family([p], **FULL[family]), OF_TORCH[family]([expected], **FULL[family])
    ours.init_state()
    p.share_memory_()
    for value in ours.state[p].values():
        value.share_memory_()
    torch.set_num_threads(threads := 1)
    assert threads == 1
    for _ in range(3):
        run_forked(lambda: step(ours))
        step(theirs)
    assert_close(p, expected)
    assert ours.state[p]["step"].item() == 3
    step(ours)
    step(theirs)
    assert_close(p, expected)


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_shared_state_that_would_be_replaced_is_refused(key):
    p = leaf(9)
    optimizer = FusedAdam([p], lr=0.1)
    step(optimizer)
    optimizer.state[p][key] = optimizer.state[p][key].double().share_memory_()
    before = contents(optimizer)
    with pytest.raises(RuntimeError, match=rf"{key} of .* is in shared memory"):
        step(optimizer)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("value", [2**31 - 1, -5, 2**40, 1.5, math.nan])
def test_a_count_that_is_none_is_refused(value):
    p = leaf(5)
    optimizer = FusedAdam([p], lr=0.1)
    step(optimizer)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(value, dtype=torch.float64)
    before = contents(optimizer)
    with pytest.raises(ValueError, match=r"step of .* must be a whole number from 0 to 2\^31 - 2, got"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)
    optimizer.state[p]["step"] = value  # and where it stands
    p.grad = torch.ones(5)
    with pytest.raises(ValueError, match=r"step of .* must be a whole number"):
        optimizer.step()
    assert torch.equal(p.detach(), before[0][0])


def test_counts_of_2_to_the_31_go_on(backend_of_here):
    """As int32 shows them: no NaN, and the checkpoint has the number."""
    for value in (2**31 - 1, -5):
        p = leaf(5)
        optimizer = FusedAdam([p], lr=0.1)
        step(optimizer)
        optimizer.state[p]["step"].fill_(value)
        before = p.detach().clone()
        step(optimizer)
        # Bias corrections are 1 after so many steps: m = 0.1 + 0.09, v = 1e-3 + 0.999e-3
        assert_close(p.detach(), before - 0.1 * 0.19 / math.sqrt(1.999e-3), rtol=1e-5, atol=1e-6)
        assert optimizer.state_dict()["state"][0]["step"] == float((value + 1) % 2**32)


@pytest.fixture(params=["cpu", "reference"])
def backend_of_here(request):
    try:
        with use_backend(request.param):
            torch.ops  # noqa: B018
            yield request.param
    except RuntimeError as error:
        pytest.skip(str(error))


@optimizers
def test_updates_of_empty_parameters_count(family, backend_of_here):
    params = [
        torch.nn.Parameter(torch.zeros(0, 3)),
        leaf(5, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.zeros(0).half()),
    ]
    optimizer = family(params, **FULL[family])
    step(optimizer)
    step(optimizer)
    params[0].grad = None
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 3, 3]


# --------------------------------------------------------------------------- rows 5, 6, 7: checkpoints that do not fit
def needed(family: type[FusedOptimizer]) -> list[str]:
    """The states of `FULL` that torch's optimizer cannot do without."""
    return [name for name in family._family.states if name != family._set_at_first_step]


@optimizers
def test_a_checkpoint_without_a_state_is_refused(family):
    p = leaf(5, dtype=torch.float16)
    optimizer = family([p], **FULL[family])
    for _ in range(3):
        step(optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 99.0
    before = contents(optimizer)
    for name in needed(family):
        for lacking in ({name: None}, {}):
            entry = {k: v for k, v in saved["state"][0].items() if k != name} | lacking
            with pytest.raises(ValueError, match=rf"{name} of .* must be in the state dict"):
                optimizer.load_state_dict({**saved, "state": {0: entry}})
    if needed(family):
        entry = {k: v for k, v in saved["state"][0].items() if k != "step"}
        with pytest.raises(ValueError, match=r"step of .* must be in the state dict"):
            optimizer.load_state_dict({**saved, "state": {0: entry}})
    assert_unchanged(optimizer, before)


def test_torchs_own_sgd_may_have_no_buffer_yet():
    p = leaf(5)
    theirs = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
    optimizer.load_state_dict(theirs.state_dict())
    step(theirs)
    saved = theirs.state_dict()
    saved["state"][0]["momentum_buffer"] = None
    optimizer.load_state_dict(saved)
    step(optimizer)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones(5))


PAIRS = [(a, b) for a in OF_TORCH for b in OF_TORCH if a._family is not b._family]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "torch"])
@pytest.mark.parametrize(("into", "of"), PAIRS, ids=lambda family: family.__name__)
def test_a_checkpoint_of_another_family_is_refused(into, of, theirs, stepped):
    other = (OF_TORCH[of] if theirs else of)([leaf(5)], lr=0.3)
    if stepped:
        step(other)
    optimizer = into([leaf(5)], **FULL[into])
    step(optimizer)
    before = contents(optimizer)
    names = rf"{into.__name__}.*must be from {into._family.name}, got one from {of._family.name}"
    with pytest.raises(ValueError, match=names):
        optimizer.load_state_dict(other.state_dict())
    assert_unchanged(optimizer, before)


OTHERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and torch.optim.Optimizer in kind.__mro__[1:] and kind not in OF_TORCH.values()
]


@pytest.mark.parametrize("other", OTHERS)
@optimizers
def test_a_checkpoint_of_any_other_optimizer_of_torch_is_refused(family, other):
    """ASGD has RMSprop's alpha, RAdam has Adam's betas, and Adadelta has no option that only one family has."""
    optimizer = family([leaf(2, 2)], **FULL[family])
    step(optimizer)
    before = contents(optimizer)
    names = rf"^{family.__name__}.*must be from {family._family.name}, got one from {other.__name__} "
    with pytest.raises(ValueError, match=names):
        optimizer.load_state_dict(other([leaf(2, 2)], lr=0.3).state_dict())
    with pytest.raises(ValueError, match="got one from another optimizer"):  # of another package
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0], "lr": 0.3, "trust": 1.0}]})
    assert_unchanged(optimizer, before)


ADAMS = {"DeepSpeed": {"bias_correction": True}, "transformers": {"correct_bias": True}, "plain": {}}


def from_another_package(**options: Any) -> dict[str, Any]:
    group = {"lr": 0.3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, **options, "params": [0]}
    return {"state": {0: {"step": 3, "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}}, "param_groups": [group]}


@pytest.mark.parametrize("own", ADAMS.values(), ids=ADAMS)
@optimizers
def test_an_adam_without_amsgrad_of_another_package_is_an_adam(family, own):
    optimizer = family([leaf(5)], lr=0.1)
    if family not in (FusedAdam, FusedAdamW):
        with pytest.raises(ValueError, match=f"must be from {family._family.name}, got one from adam"):
            optimizer.load_state_dict(from_another_package(**own))
        return
    optimizer.load_state_dict(from_another_package(**own))
    (group,), (p,) = optimizer.param_groups, optimizer.state
    assert (group["betas"], group["amsgrad"]) == ((0.8, 0.9), False) and own.items() <= group.items()
    assert int(optimizer.state[p]["step"]) == 3 and torch.equal(optimizer.state[p]["exp_avg_sq"], torch.ones(5))
    step(optimizer)


@pytest.mark.parametrize(
    "options",
    [{"momentum_decay": 4e-3}, {"foreach": None, "differentiable": False}, {"foreach": None, "maximize": False}],
    ids=["NAdam", "RAdam", "Adamax"],
)
@optimizers
def test_optimizers_with_betas_of_an_older_torch_are_refused(family, options):
    names = f"must be from {family._family.name}, got one from (SparseAdam|another optimizer) "
    with pytest.raises(ValueError, match=names):
        family([leaf(5)], lr=0.1).load_state_dict(from_another_package(**options))


def test_adam_and_adamw_load_each_other():
    p = leaf(5)
    adam, adamw = FusedAdam([p], lr=0.1), FusedAdamW([p], lr=0.1)
    step(adam)
    adamw.load_state_dict(adam.state_dict())
    assert int(adamw.state[p]["step"]) == 1


BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "step None": ("step", lambda: None),
    "step NaN": ("step", lambda: math.nan),
    "step of floats that is NaN": ("step", lambda: torch.tensor(math.nan)),
    "a vector of steps": ("step", lambda: torch.ones(3)),
    "a list of steps": ("step", lambda: [1]),
    "step 2^40": ("step", lambda: 2**40),
    "step infinite": ("step", lambda: torch.tensor(math.inf)),
    "step meta": ("step", lambda: torch.tensor(1.0, device="meta")),
    "master int": ("master", lambda: torch.ones(5, dtype=torch.int32)),
    "master complex": ("master", lambda: torch.ones(5, dtype=torch.complex64)),
    "master sparse": ("master", lambda: torch.ones(5).to_sparse()),
    "master meta": ("master", lambda: torch.ones(5, device="meta")),
    "master of another shape": ("master", lambda: torch.ones(6)),
    "a number for a master": ("master", lambda: 1.0),
    "a sparse state": ("state", lambda: torch.ones(5).to_sparse()),
    "a state of another shape": ("state", lambda: torch.ones(5, 1)),
    "a list for a state": ("state", lambda: [1.0] * 5),
    "a quantized state": ("state", lambda: torch.ones(5, dtype=torch.int8)),
}


@pytest.mark.parametrize(("key", "bad"), BAD.values(), ids=BAD)
@optimizers
def test_a_refused_checkpoint_changes_nothing(family, key, bad):
    good, p = leaf(4, dtype=torch.bfloat16), leaf(5, dtype=torch.bfloat16)
    optimizer = family([{"params": [good]}, {"params": [p]}], **FULL[family])
    step(optimizer)
    optimizer.state[p]["theirs"] = 1
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 99.0
    saved["state"][0]["master"] = torch.zeros(4)  # which would be loaded first
    saved["state"][1][family._family.states[0] if key == "state" else key] = bad()
    before = contents(optimizer)
    with pytest.raises(ValueError, match=r"load_state_dict: \w+ of .* must (be|have)"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)
    step(optimizer)


def test_a_load_that_fails_later_changes_nothing():
    p = leaf(5)
    optimizer = FusedAdam([p], lr=0.1)
    step(optimizer)
    saved, before = optimizer.state_dict(), contents(optimizer)
    saved["param_groups"][0]["lr"] = 99.0

    def fail(_: Any) -> None:
        raise OSError("a hook of the user")

    handle = optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(OSError, match="hook of the user"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)
    handle.remove()
    step(optimizer)
    assert int(optimizer.state[p]["step"]) == 2


# ------------------------------------------------------------------------------------------------ row 10: constructors
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_grad_norm": -1}, ValueError),
        ({"max_grad_norm": True}, TypeError),
        ({"foreach": True, "fused": True}, RuntimeError),
        ({"lr": -1.0}, ValueError),
    ],
    ids=str,
)
@optimizers
def test_a_constructor_that_fails_leaves_the_groups(family, options, error):
    p, q = leaf(3), leaf(3)
    groups = [{"params": [p]}, {"params": [q], "lr": 0.5}]
    with pytest.raises(error):
        family(groups, **{"lr": 0.1, **options})
    assert groups == [{"params": [p]}, {"params": [q], "lr": 0.5}]
    optimizer = family(groups, lr=0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.5]


@optimizers
def test_a_group_that_is_refused_is_left_as_it_was(family):
    p, q = leaf(3), leaf(3)
    for spoiled in ({"params": [q], "max_grad_norm": -1.0}, {"params": [q, p]}):
        groups = [{"params": [p]}, dict(spoiled)]
        with pytest.raises(ValueError):
            family(groups, lr=0.1)
        assert groups == [{"params": [p]}, spoiled]
        optimizer = family([p], lr=0.1)
        with pytest.raises(ValueError):
            optimizer.add_param_group(groups[1])
        assert groups[1] == spoiled and len(optimizer.param_groups) == 1


# -------------------------------------------------------------------------------- row 11: states carried to new tensors
@pytest.mark.parametrize("keeps_step", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_states_carried_over_to_a_pruned_parameter(dtype, keeps_step):
    """As Gaussian splatting prunes: the state's dict goes on, with two of its tensors cut."""
    mask = torch.arange(12) % 3 != 0
    results = []
    for family, cast in ((FusedAdam, dtype), (torch.optim.Adam, torch.float32)):
        p = torch.nn.Parameter(leaf(12, 2, dtype=dtype).detach().to(cast))
        optimizer = family([p], lr=0.1)
        step(optimizer)
        state = optimizer.state.pop(p)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key][mask]
        if not keeps_step:
            state["step"] = torch.zeros_like(state["step"])
        pruned = torch.nn.Parameter(p.detach()[mask].clone())
        optimizer.param_groups[0]["params"][0] = pruned
        optimizer.state[pruned] = state
        step(optimizer)
        results.append(pruned.detach().float())
    assert_close(*results, rtol=2e-2, atol=2e-2)  # the weights are rounded


def test_a_remainder_alone_is_dropped_with_its_shape():
    p = leaf(12, dtype=torch.bfloat16)
    optimizer = FusedSGD([p], lr=0.5)
    step(optimizer)
    p.grad, p.data = None, p.data[:7].clone()
    before = p.detach().float()
    step(optimizer)
    assert_close(optimizer.master(p), before - 0.5, rtol=0, atol=1e-7)  # a tie is kept as its neighbour
    assert optimizer.state[p]["remainder"].shape == (7,)


def test_a_remainder_of_another_shape_and_as_many_elements_is_refused():
    """A pruned parameter has fewer elements. Dropping the remainder of any other one would move its master."""
    p = leaf(2, 3, dtype=torch.bfloat16)
    optimizer = FusedSGD([p], lr=0.1)
    step(optimizer)
    state, good = optimizer.state[p], optimizer.state[p]["remainder"]
    for wrong, error in ((good.view(3, 2), RuntimeError), (good.view(6), RuntimeError), ([0] * 6, TypeError)):
        state["remainder"] = wrong
        weight = p.detach().clone()
        with pytest.raises(error, match=r"; delete 'remainder', and the weight is its master"):
            step(optimizer)
        assert state["remainder"] is wrong and torch.equal(p, weight)
    state["remainder"] = good
    p.grad, p.data = None, p.data.view(3, 2)  # or the parameter has another shape
    with pytest.raises(RuntimeError, match=r"must have the parameter's shape \(3, 2\), got \(2, 3\)"):
        step(optimizer)
    assert state["remainder"] is good


@pytest.mark.parametrize("key", ["remainder", "master", "exp_avg"])
def test_a_state_of_another_shape_is_named(key):
    p = leaf(4, 6, dtype=torch.bfloat16)
    optimizer = FusedAdam([p], lr=0.1)
    step(optimizer)
    optimizer.state[p][key] = torch.zeros(6, 4, dtype=torch.int16 if key == "remainder" else torch.float32)
    with pytest.raises(RuntimeError, match=rf"{key} of \S+ must have the parameter's shape \(4, 6\), got \(6, 4\)"):
        step(optimizer)


# ---------------------------------------------------------------------------------------------------- resets of states
def reset(optimizer: torch.optim.Optimizer, *kept: str) -> None:
    """The way of docs/guides/optimizers.md."""
    for state in optimizer.state.values():
        for key in state.keys() - {"remainder", *kept}:
            del state[key]


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=["fp32", "bf16", "fp16"])
@optimizers
def test_a_reset_keeps_masters_and_nothing_else(family, dtype, state_dtype):
    p, q = leaf(5000, dtype=dtype), leaf(5000, dtype=dtype)
    optimizer = family([p], **{**FULL[family], "state_dtype": state_dtype})
    for grad in (0.7, -0.3, 0.2):
        step(optimizer, grad)
    master = optimizer.master(p)
    reset(optimizer)
    assert torch.equal(optimizer.master(p), master)
    other = family([q], **{**FULL[family], "state_dtype": state_dtype})
    load_fp32_state_dict(torch.nn.ParameterList([q]), other, {"0": master})
    for o in (optimizer, other):
        step(o, 0.5)
        step(o, 0.1)
    assert torch.equal(optimizer.master(p), other.master(q))
    assert_close(optimizer.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@optimizers
def test_states_without_which_the_count_was_kept_can_be_saved(family, state_dtype, compact):
    options = {**DAMPENED[family], "lr": 0.01, "state_dtype": state_dtype}
    results = []
    for resumes in (False, True):
        p = leaf(5000, dtype=torch.bfloat16)
        optimizer = family([p], **options)
        for grad in (0.7, -0.3, 0.2):
            step(optimizer, grad)
        reset(optimizer, "step")
        if resumes:
            master, keys = optimizer.master(p), optimizer.state[p].keys()
            saved = saved_by_torch(optimizer.state_dict(compact=compact))
            assert optimizer.state[p].keys() == keys
            q = torch.nn.Parameter(p.detach().clone())
            optimizer, p = family([q], **options), q
            optimizer.load_state_dict(saved)
            assert torch.equal(optimizer.master(p), master)
        for grad in (0.5, 0.1):
            step(optimizer, grad)
        results.append((optimizer.master(p), optimizer.state_dict()["state"]))
    assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        (FusedSGD, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.5}),
        (FusedRMSprop, {"momentum": 0.0}, {"momentum": 0.9}),
        (FusedRMSprop, {"centered": False}, {"centered": True}),
        (FusedAdamW, {"amsgrad": False}, {"amsgrad": True}),
    ],
)
def test_options_that_need_another_state_can_be_saved_before_the_next_step(family, before, after):
    results = []
    for of in (family, family, OF_TORCH[family]):
        p = leaf(50)
        optimizer = family([p], lr=0.01, **before)
        step(optimizer)
        optimizer.param_groups[0].update(after)
        if results:
            saved, p = saved_by_torch(optimizer.state_dict()), torch.nn.Parameter(p.detach().clone())
            optimizer = of([p], lr=0.01)
            optimizer.load_state_dict(saved)
        step(optimizer, 0.5)
        step(optimizer, 0.1)
        results.append(p.detach())
    assert torch.equal(results[0], results[1])
    assert_close(results[0], results[2])


@pytest.mark.parametrize("key", ["exp_avg_codes", "exp_avg_scale"])
def test_codes_or_scales_of_0_are_a_state_of_0(key):
    p, q = leaf(5000), leaf(5000)
    ours, theirs = FusedAdam([p], lr=0.1, state_dtype="int8"), torch.optim.Adam([q], lr=0.1)
    for optimizer, param, name in ((ours, p, key), (theirs, q, "exp_avg")):
        step(optimizer)
        optimizer.state[param][name].zero_()
        step(optimizer, 0.5)
    assert_close(p, q, rtol=0, atol=2e-3)  # the second moment has a code of 8 bits


def test_errors_name_a_reset_that_keeps_masters():
    p = leaf(5, dtype=torch.bfloat16)
    optimizer = FusedAdam([p], lr=1e-3)
    step(optimizer)
    master = optimizer.master(p)
    for wrong in (torch.ones(6), torch.ones(5, dtype=torch.int32), 3.0):
        optimizer.state[p]["exp_avg"] = wrong
        remedy = r"; delete everything except 'remainder' from optimizer\.state\[parameter\] to reset it$"
        with pytest.raises((RuntimeError, TypeError), match=remedy):
            step(optimizer)
        reset(optimizer)
        assert torch.equal(optimizer.master(p), master)
    step(optimizer)


LOST = r"1 16-bit parameters \(\S+ is the first\) have no entry in the state dict.*requires_grad_\(\)"


def two_layers() -> tuple[torch.nn.Module, FusedOptimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)).bfloat16()
    return model, FusedAdamW(model.named_parameters(), lr=1e-3)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
def test_masters_of_frozen_parameters_that_dcp_leaves_out(frozen, is_new):
    model, optimizer = two_layers()
    for _ in range(3):
        step(optimizer)
    masters = [optimizer.master(p) for p in model.parameters()]
    saved = copy.deepcopy((model.state_dict(), dcp.get_optimizer_state_dict(model, optimizer)))
    if is_new:
        model, optimizer = two_layers()
        model.load_state_dict(saved[0])
    p = model[frozen].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=LOST):
        dcp.set_optimizer_state_dict(model, optimizer, saved[1])
    assert torch.equal(optimizer.master(p), p.float() if is_new else masters[frozen])
    assert torch.equal(optimizer.master(model[1 - frozen].weight), masters[1 - frozen])
    p.requires_grad_()  # as the warning says
    dcp.set_optimizer_state_dict(model, optimizer, saved[1])
    assert all(map(torch.equal, map(optimizer.master, model.parameters()), masters))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@optimizers
def test_masters_of_a_frozen_backbone_below_an_fp32_head(family, dtype, recwarn):
    def network(of: type[torch.optim.Optimizer]) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False, dtype=dtype), torch.nn.Linear(3, 3, bias=False))
        return model, of(model.named_parameters(), lr=1e-3)

    model, optimizer = network(family)
    step(optimizer)
    masters = [optimizer.master(p) for p in model.parameters()]
    saved = copy.deepcopy((model.state_dict(), dcp.get_optimizer_state_dict(model, optimizer)))
    model, optimizer = network(family)
    model.load_state_dict(saved[0])
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=LOST):
        dcp.set_optimizer_state_dict(model, optimizer, saved[1])
    model[0].requires_grad_()  # as the warning says
    dcp.set_optimizer_state_dict(model, optimizer, saved[1])
    assert all(map(torch.equal, map(optimizer.master, model.parameters()), masters))

    model, theirs = network(OF_TORCH[family])  # torch has no masters
    model[1].weight.grad = torch.ones(3, 3)
    theirs.step()
    optimizer.load_state_dict(theirs.state_dict())
    assert len(recwarn) == 0


def test_an_entry_that_an_incomplete_checkpoint_lacks_leaves_the_master():
    """StateDictOptions(strict=False) leaves parameters out that train."""
    model, optimizer = two_layers()
    step(optimizer)
    masters = [optimizer.master(p) for p in model.parameters()]
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    del saved["state"]["1.weight"]
    with pytest.warns(UserWarning, match=LOST):
        dcp.set_optimizer_state_dict(model, optimizer, saved, options=dcp.StateDictOptions(strict=False))
    assert all(map(torch.equal, map(optimizer.master, model.parameters()), masters))
    whole = optimizer.state_dict()
    del whole["state"][1]  # as if it had had no gradient before it was saved: no warning
    optimizer.load_state_dict(whole)
    assert torch.equal(optimizer.master(model[1].weight), model[1].weight.float())


# ----------------------------------------------------------------------------- states that other code writes at step 0
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("is_made", [False, True], ids=["no state", "init_state"])
@optimizers
def test_states_written_before_the_first_step_are_saved(family, is_made, state_dtype):
    results = []
    for resumes in (False, True):
        p = leaf(5000)
        optimizer = family([p], **{**FULL[family], "state_dtype": state_dtype})
        name = needed(family)[0] if needed(family) else "momentum_buffer"
        if is_made and needed(family):
            optimizer.init_state()
        optimizer.state[p][name] = torch.full_like(p, 4.0)
        if resumes:
            saved = saved_by_torch(optimizer.state_dict())
            assert torch.equal(saved["state"][0][name], torch.full((5000,), 4.0))
            optimizer = family([p], **{**FULL[family], "state_dtype": state_dtype})
            optimizer.load_state_dict(saved)
        step(optimizer)
        results.append((p.detach(), optimizer.state_dict()["state"]))
    assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0][0], after_a_first_step(family))


def after_a_first_step(family: type[FusedOptimizer]) -> Tensor:
    p = leaf(5000)
    step(family([p], **FULL[family]))
    return p.detach()


def test_a_momentum_buffer_without_a_count_is_read_as_torch_reads_it():
    results = []
    for family in (FusedSGD, torch.optim.SGD):
        p = leaf(5)
        optimizer = family([p], lr=0.1, momentum=0.9, dampening=0.5)
        optimizer.state[p]["momentum_buffer"] = torch.full((5,), 4.0)
        step(optimizer)
        results.append(p.detach())
    assert_close(*results)


def test_states_that_no_step_and_nobody_has_written_are_not_saved():
    p = leaf(5)
    for family in OF_TORCH:
        optimizer = family([p], **FULL[family])
        optimizer.init_state()
        assert optimizer.state_dict()["state"] == {0: {}}


# ------------------------------------------------------------------------------------------------ row 18: wrong masters
@optimizers
def test_a_wrong_master_in_the_state_changes_nothing(family):
    p = leaf(5, dtype=torch.bfloat16)
    optimizer = family([p], **FULL[family])
    step(optimizer)
    for wrong in (torch.ones(6), torch.ones(5, dtype=torch.int32)):
        optimizer.state[p]["master"] = wrong
        before = contents(optimizer)
        with pytest.raises((RuntimeError, TypeError), match="master of"):
            step(optimizer)
        assert_unchanged(optimizer, before)
