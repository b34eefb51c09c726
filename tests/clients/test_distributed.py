"""Several processes: ranks stay bit-equal, and are no further from one process than with torch's optimizers.

Every test trains the same once with ours and once with torch's, on two ranks (one of them on four).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from isolated import backends, case, isolated, ranks
from optim_cases import FULL, TORCH, randn, started
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import amp_kernels
from amp_kernels import testing
from amp_kernels.optim import FusedRMSprop, FusedSGD

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")
CPU = torch.device("cpu")
STEPS = 4
OVERFLOW = 2  # the step in which one rank finds inf, where a scaler is there


def full(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).float()


def compare(ours: list[list[Tensor]], theirs: list[list[Tensor]], truth: Sequence[Tensor]) -> None:
    """Of each rank its parameters in fp32; `truth` is one process in fp64."""
    for rank in ours[1:]:
        for x, y in zip(ours[0], rank, strict=True):
            assert torch.equal(x, y), "ranks part ways"
    for i, (x, y, t) in enumerate(zip(ours[0], theirs[0], truth, strict=True)):
        error, allowed = testing.error_and_allowed(x, y, t)
        assert error <= allowed + 1e-6, f"parameter {i}: {error} > {allowed}"


# ------------------------------------------------------------------------------------------------------------- DTensors
SIZES = ((6, 5), (3, 4))  # even and uneven shards
FEW_ROWS = (1, 2)  # one rank has none; torch takes these where placements agree
ONE_DIM = {
    "replicated, replicated": ([Replicate()], [Replicate()]),
    "replicated, partial": ([Replicate()], [Partial()]),
    "replicated, sharded": ([Replicate()], [Shard(0)]),
    "sharded, sharded": ([Shard(0)], [Shard(0)]),
    "sharded, partial": ([Shard(0)], [Partial()]),
    "sharded, replicated": ([Shard(0)], [Replicate()]),
    "sharded, columns": ([Shard(0)], [Shard(1)]),
    "columns, partial": ([Shard(1)], [Partial()]),
    "sharded, an average": ([Shard(0)], [Partial("avg")]),
}
TWO_DIMS = {
    "replicas of shards": ([Replicate(), Shard(0)], [Partial(), Shard(0)]),
    "all partial": ([Replicate(), Shard(0)], [Partial(), Partial()]),
    "a grid": ([Shard(0), Shard(1)], [Partial(), Replicate()]),
    "the other way round": ([Shard(0), Replicate()], [Replicate(), Shard(1)]),
}


def sizes_for(placements: Any) -> tuple[tuple[int, ...], ...]:
    return (*SIZES, FEW_ROWS) if placements[0] == placements[1] else SIZES


def value(size: tuple[int, ...], i: int) -> Tensor:
    return (8 * randn(*size, seed=i)).round() / 8


def gradient(size: tuple[int, ...], step: int, i: int, rank: int) -> Tensor:
    """Rank's part of a sum, exact in 16 bits."""
    return (4 * randn(*size, seed=1000 * rank + 10 * step + i)).round() / 4


def whole_gradient(size: tuple[int, ...], step: int, i: int, world: int, placements: Sequence[Placement]) -> Tensor:
    """What the ranks' gradients are together: parts that are summed are different ones."""
    parts = [gradient(size, step, i, rank) for rank in range(world)]
    if not any(p.is_partial() for p in placements):
        return parts[0]
    total = torch.stack(parts).sum(0)
    return total / world if Partial("avg") in placements else total


def as_dtensor(size: tuple[int, ...], step: int, i: int, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    """A gradient whose local part is what its placements ask for, unreduced where they are partial."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if all(p.is_partial() for p in placements):
        return DTensor.from_local(gradient(size, step, i, rank), mesh, placements)
    whole = whole_gradient(size, step, i, world, placements)
    settled = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(whole, mesh, settled).to_local()
    for dim, p in enumerate(placements):
        if p.is_partial():  # one rank has it all, the others nothing
            local = local * (mesh.get_local_rank(dim) == 0)
    return DTensor.from_local(local, mesh, placements, shape=torch.Size(size), stride=whole.stride())


def train_dtensors(
    family: type, dtype: torch.dtype, mesh: Any, placements: Any, mode: str, options: dict[str, Any]
) -> list[Tensor]:
    is_ours = family in TORCH
    of_params, of_grads = placements
    sizes = sizes_for(placements)
    params = [Parameter(distribute_tensor(value(s, i).to(dtype), mesh, of_params)) for i, s in enumerate(sizes)]
    optimizer = family([(f"layer{i}.weight", p) for i, p in enumerate(params)], **options)
    scaler = started(CPU, enabled=mode != "step" and is_ours)
    for step in range(STEPS):
        overflow = step == OVERFLOW and mode != "step"
        if overflow and not is_ours:
            continue
        for i, (p, size) in enumerate(zip(params, sizes, strict=True)):
            p.grad = (scaler.get_scale() * as_dtensor(size, step, i, mesh, of_grads)).to(dtype)
        is_last = [mesh.get_local_rank(d) == mesh.size(d) - 1 for d in range(mesh.ndim)]
        if overflow and all(last or p.is_replicate() for last, p in zip(is_last, of_grads, strict=True)):
            params[0].grad.to_local().view(-1)[:1] = torch.inf
        if mode == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [full(optimizer.master(p) if is_ours else p) for p in params]


def dtensors_in_one_process(family: type, world: int, placements: Any, mode: str) -> list[Tensor]:
    sizes = sizes_for(placements)
    params = [Parameter(value(size, i).double()) for i, size in enumerate(sizes)]
    optimizer = TORCH[family](params, **FULL[family], foreach=False)
    for step in range(STEPS):
        if step == OVERFLOW and mode != "step":
            continue
        for i, (p, size) in enumerate(zip(params, sizes, strict=True)):
            p.grad = whole_gradient(size, step, i, world, placements[1]).double()
        optimizer.step()
    return [p.detach() for p in params]


def check_dtensors(mesh_shape: tuple[int, ...], placements: Any) -> None:
    world = functools.reduce(int.__mul__, mesh_shape)
    runs = [(FusedSGD, torch.float16), (FusedRMSprop, torch.float32)]
    runs = [(*run, mode) for run in runs for mode in ("step", "scaler", "unscale_")]

    def body(rank: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        mesh = init_device_mesh("cpu", mesh_shape)
        results = []
        for family, dtype, mode in runs:
            with case(family.__name__, dtype, mode):
                ours = train_dtensors(family, dtype, mesh, placements, mode, FULL[family])
                options = {**FULL[family], "foreach": False}
                theirs = train_dtensors(TORCH[family], torch.float32, mesh, placements, mode, options)
                results.append((ours, theirs))
        return results

    results = ranks(world, body)
    for (family, dtype, mode), *of_ranks in zip(runs, *results, strict=True):
        with case(family.__name__, dtype, mode):
            truth = dtensors_in_one_process(family, world, placements, mode)
            compare([ours for ours, _ in of_ranks], [theirs for _, theirs in of_ranks], truth)


@isolated
@backends
@pytest.mark.parametrize("placements", ONE_DIM)
def test_dtensors(backend, placements):
    check_dtensors((2,), ONE_DIM[placements])


@isolated
@pytest.mark.parametrize("placements", TWO_DIMS)
def test_dtensors_on_four_ranks(placements):
    check_dtensors((2, 2), TWO_DIMS[placements])


# --------------------------------------------------------------------------------------------------------------- models
class Block(torch.nn.Module):
    """A residual block whose parts can be parallelized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).to(dtype)


def batch(step: int) -> Tensor:
    return randn(4, 6, 8, seed=50 + step)


def half_of_batch(step: int, rank: int) -> Tensor:
    return batch(step)[2 * rank : 2 * rank + 2]


Make = Callable[[Any], torch.optim.Optimizer]


def makers(**options: Any) -> list[Make]:
    """Ours, and torch's default, which has no options but its own."""
    return [
        lambda params: FusedSGD(params, **FULL[FusedSGD], **options),
        lambda params: torch.optim.SGD(params, **FULL[FusedSGD], foreach=False),
    ]


def train(
    net: torch.nn.Module,
    optimizer: Any,
    inputs: Callable[[int], Tensor],
    scaler: Any = None,
    overflow_on: int | None = None,
    clip: float | None = None,
) -> None:
    """A mean over the whole batch is what ranks that average gradients minimise."""
    for step in range(STEPS):
        if step == OVERFLOW and overflow_on is None and scaler == "skip":
            continue
        optimizer.zero_grad()
        x = inputs(step)
        loss = net(x.to(next(net.parameters()).dtype)).square().mean()
        if scaler is None or scaler == "skip":
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            continue
        if step == OVERFLOW and overflow_on == dist.get_rank():
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def one_process(skips: bool, clip: float | None = None) -> list[Tensor]:
    net = model(torch.float64)
    train(net, makers()[1](net.parameters()), batch, "skip" if skips else None, clip=clip)
    return [p.detach() for p in net.parameters()]


def check_models(body: Callable[[int, Make], list[Tensor]], skips: bool = False) -> None:
    results = ranks(2, lambda rank: [body(rank, make) for make in makers()])
    compare([ours for ours, _ in results], [theirs for _, theirs in results], one_process(skips))


def scaler_of(make: Make) -> Any:
    """Ours for ours; torch's for torch's."""
    is_ours = isinstance(make([Parameter(torch.ones(1))]), FusedSGD)
    return started(CPU) if is_ours else torch.amp.GradScaler("cpu", init_scale=4.0)


@isolated
def test_sequence_and_tensor_parallel():
    """The gradients of the norms are partial: each rank has seen its part of the sequence."""

    def body(rank: int, make: Make) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        net = model()
        for block in net:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)
        optimizer = make(net.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            (net(batch(step).chunk(2, 1)[rank]).square().sum() / batch(step).numel()).backward()
            optimizer.step()
        return [full(p) for p in net.parameters()]

    check_models(body)


@isolated
@pytest.mark.parametrize("with_scaler", [False, True])
def test_gradients_that_are_still_on_their_way(with_scaler):
    """Functional collectives return tensors that wait when they are read."""

    def body(rank: int, make: Make) -> list[Tensor]:
        net = model()
        optimizer = make(net.parameters())
        scaler = scaler_of(make)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = net(half_of_batch(step, rank)).square().mean()
            if with_scaler and step == OVERFLOW and rank == 1:
                loss = loss * torch.inf
            (scaler.scale(loss) if with_scaler else loss).backward()
            for p in net.parameters():
                p.grad = all_reduce(p.grad / 2, "sum", dist.group.WORLD)
                assert isinstance(p.grad, AsyncCollectiveTensor)
            if with_scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return [full(p) for p in net.parameters()]

    check_models(body, skips=with_scaler)


@isolated
@pytest.mark.parametrize("with_scaler", [False, True])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp(with_scaler, bucket_view):
    def body(rank: int, make: Make) -> list[Tensor]:
        net = DistributedDataParallel(model(), gradient_as_bucket_view=bucket_view)
        scaler = scaler_of(make) if with_scaler else None
        train(net, make(net.parameters()), lambda step: half_of_batch(step, rank), scaler, overflow_on=1)
        return [full(p) for p in net.parameters()]

    check_models(body, skips=with_scaler)


@isolated
@pytest.mark.parametrize("with_scaler", [False, True])
def test_fsdp2(with_scaler):
    def body(rank: int, make: Make) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        net = model()
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        scaler = scaler_of(make) if with_scaler else None
        train(net, make(net.parameters()), lambda step: half_of_batch(step, rank), scaler, overflow_on=1)
        return [full(p) for p in net.parameters()]

    check_models(body, skips=with_scaler)


def fsdp1(use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model(), use_orig_params=use_orig_params, device_id=CPU)


def gathered(net: FullyShardedDataParallel) -> list[Tensor]:
    with FullyShardedDataParallel.summon_full_params(net):
        return [v.detach().clone() for v in net.state_dict().values()]


@isolated
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_fsdp1(use_orig_params, with_scaler):
    """An overflow in the shards of one rank: all ranks skip."""

    def body(rank: int, make: Make) -> list[Tensor]:
        net = fsdp1(use_orig_params)
        optimizer = make(net.parameters())
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = net(half_of_batch(step, rank)).square().mean()
            (scaler.scale(loss) if with_scaler else loss).backward()
            if with_scaler:
                shards = [p for p in net.parameters() if p.grad is not None and p.grad.numel()]
                if step == OVERFLOW and rank == 1:
                    shards[0].grad.view(-1)[0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return gathered(net)

    check_models(body, skips=with_scaler)


@isolated
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_parameters_do_not_take_scales(use_orig_params):
    """ShardedGradScaler agrees on a skip over all ranks only where it makes the decision."""

    def body(rank: int) -> bool:
        net = fsdp1(use_orig_params)
        net(batch(0)).sum().backward()
        return FusedSGD(net.parameters(), lr=0.1)._step_supports_amp_scaling

    assert ranks(2, body) == [False, False]


@isolated
def test_sums_in_fp32_under_ddp():
    """The recipe of the README: DDP does not average gradients of another dtype, `no_sync` and a sum by hand do."""

    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 8).bfloat16()
        for p in net.parameters():
            p.grad_dtype = torch.float32
        ddp = DistributedDataParallel(net)
        optimizer = FusedSGD(net.parameters(), lr=0.1)
        with ddp.no_sync():
            for step in range(3):
                ddp(randn(4, 8, seed=2 * step + rank).bfloat16()).float().sum().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        results = [optimizer.master(p) for p in net.parameters()]
        with pytest.raises(RuntimeError, match="Expected BFloat16, got Float"):
            ddp(randn(4, 8, seed=0).bfloat16()).float().sum().backward()
        return results

    first, second = ranks(2, body)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------------ optimizers of shards
@isolated
@pytest.mark.parametrize("with_scaler", [False, True])
def test_zero_redundancy_optimizer(with_scaler):
    def body(rank: int, make: Make) -> list[Tensor]:
        net = DistributedDataParallel(model())
        kind = type(make([Parameter(torch.ones(1))]))
        optimizer = ZeroRedundancyOptimizer(net.parameters(), kind, **FULL[FusedSGD])
        scaler = scaler_of(make) if with_scaler else None
        train(net, optimizer, lambda step: half_of_batch(step, rank), scaler, overflow_on=1)
        return [full(p) for p in net.parameters()]

    check_models(body, skips=with_scaler)


@isolated
def test_post_local_sgd():
    """Ranks average their parameters every other step, and the averages stay."""

    def body(rank: int, make: Make) -> list[Tensor]:
        net = model()
        inner = make(net.parameters())
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=0))
        for step in range(5):
            optimizer.zero_grad()
            net(half_of_batch(step, rank)).square().mean().backward()
            optimizer.step()
        return [full(p) for p in net.parameters()]

    results = ranks(2, lambda rank: [body(rank, make) for make in makers()])
    compare([ours for ours, _ in results], [theirs for _, theirs in results], [t.double() for t in results[0][1]])


@isolated
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("kind", ["ours", "torch", "no gradient elsewhere"])
def test_a_process_group_agrees_on_skips(kind, unscale):
    """Plain tensors with gradients of their own: a skip anywhere is a skip everywhere."""

    def body(rank: int) -> list[Any]:
        p = Parameter(torch.ones(8))
        make = torch.optim.SGD if kind == "torch" else FusedSGD
        optimizer = make([p], lr=0.1)
        scaler = amp_kernels.GradScaler("cpu", init_scale=4.0, growth_interval=100, process_group=dist.group.WORLD)
        scales = []
        for step in range(4):
            scaler.scale(torch.ones(()))
            p.grad = torch.full_like(p, 4.0)
            if step == 1 + rank:
                p.grad[0] = torch.inf
            elif step == 1 + (1 - rank) and kind == "no gradient elsewhere":
                p.grad = None
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [scales, p.detach().clone(), int(scaler.skipped_steps)]

    for scales, p, skipped in ranks(2, body):
        assert scales == [4.0, 2.0, 1.0, 1.0] and skipped == 2
        torch.testing.assert_close(p, torch.full((8,), 1.0 - 0.1 * (1.0 + 4.0)))


@isolated
def test_a_group_that_cannot_reduce_here_is_refused():
    def body(rank: int) -> str:
        group = dist.new_group(backend="cpu:gloo")
        with pytest.raises(ValueError, match="process_group must reduce tensors of cuda, got one of cpu:gloo; make"):
            amp_kernels.GradScaler("cuda", process_group=group)
        return "refused"

    assert ranks(2, body) == ["refused"] * 2


@isolated
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_broadcast_that_no_counter_shows(dtype):
    """A collective on a detached parameter raises no version: what came stays."""

    def body(rank: int) -> list[Tensor]:
        finals = []
        for family in TORCH:
            param = Parameter(torch.full((64,), 0.25, dtype=dtype) if rank else randn(64, seed=0, dtype=dtype))
            optimizer = family([param], lr=0.1)
            param.grad = torch.ones_like(param)
            optimizer.step()
            version = param._version
            dist.broadcast(param.detach(), 0)
            assert param._version == version
            expected = param.detach().clone()
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
            assert torch.equal(param, expected)
            finals.append(param.detach().clone())
        return finals

    first, second = ranks(2, body)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


# -------------------------------------------------------------------------------------------------------- max_grad_norm
def assert_clips_globally_or_raises(body: Callable[[int, Make, list[Any]], list[Tensor]]) -> None:
    """`body` puts what a step raised, and the parameters before and after it, into its list."""

    def run(rank: int) -> tuple[Any, list[Tensor]]:
        raised: list[Any] = []
        return raised, body(rank, makers(max_grad_norm=0.05)[0], raised)

    results = ranks(2, run)
    if any(raised for raised, _ in results):
        for raised, _ in results:  # on every rank, or others would wait for this one
            message, before, after = raised[0]
            assert re.search(r"max_grad_norm.* must ", message), message
            for x, y in zip(before, after, strict=True):
                assert torch.equal(x, y), "a parameter changed"
    else:
        truth = one_process(False, clip=0.05)
        for _, params in results:
            for x, t in zip(params, truth, strict=True):
                torch.testing.assert_close(x.double(), t, rtol=1e-5, atol=1e-6)


def try_to_train(net: torch.nn.Module, make: Callable[[], Any], rank: int, raised: list[Any]) -> None:
    def local() -> list[Tensor]:
        return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in net.parameters()]

    before = local()
    try:
        train(net, make(), lambda step: half_of_batch(step, rank))
    except (RuntimeError, TypeError, ValueError) as error:
        raised.append((str(error), before, local()))


@isolated
@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp1", "fsdp1, original parameters", "zero"])
def test_max_grad_norm_is_global_or_raises(how):
    def body(rank: int, make: Make, raised: list[Any]) -> list[Tensor]:
        if how.startswith("fsdp1"):
            net = fsdp1(use_orig_params=how != "fsdp1")
        elif how == "fsdp2":
            net = model()
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        else:
            net = DistributedDataParallel(model())
        if how == "zero":
            options = {**FULL[FusedSGD], "max_grad_norm": 0.05}
            try_to_train(net, lambda: ZeroRedundancyOptimizer(net.parameters(), FusedSGD, **options), rank, raised)
        else:
            try_to_train(net, lambda: make(net.named_parameters()), rank, raised)
        if raised:
            return []
        return gathered(net) if how.startswith("fsdp1") else [full(p) for p in net.parameters()]

    assert_clips_globally_or_raises(body)
