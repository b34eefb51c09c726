"""Several processes: ranks stay bit-equal, and are no further from one process than with torch's optimizers.

Every test trains the same once with ours and once with torch's, on two ranks (one of them on four).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from isolated import backends, case, isolated, ranks
from optim_cases import FULL, OF_TORCH, TORCH, randn, started
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
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
from amp_kernels.integrations import ddp as ddp_integration
from amp_kernels.integrations.ddp import fp32_accumulation
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD
from amp_kernels.quantization import quantize_

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
        error, allowed = testing.common.error_and_allowed(x, y, t)
        assert error <= allowed + 1e-6, f"parameter {i}: {error} > {allowed}"


Run = tuple[Any, ...]


def check_runs(
    world: int,
    runs: Sequence[Run],
    train: Callable[..., tuple[list[Tensor], list[Tensor]]],
    truth: Callable[..., Sequence[Tensor]],
) -> None:
    """`train(rank, *run)` does the same with ours and with torch's, `truth(*run)` in one process."""

    def named(run: Run) -> Any:
        return case(*(getattr(x, "__name__", x) for x in run))

    def body(rank: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        results = []
        for run in runs:
            with named(run):
                results.append(train(rank, *run))
        return results

    for run, *of_ranks in zip(runs, *ranks(world, body), strict=True):
        with named(run):
            compare([ours for ours, _ in of_ranks], [theirs for _, theirs in of_ranks], truth(*run))


@functools.cache  # of a rank, which is a process
def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape)


# ------------------------------------------------------------------------------------------------------------- DTensors
MODES = ("step", "scaler", "unscale_")
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

    def train(rank: int, family: Any, dtype: torch.dtype, mode: str) -> tuple[list[Tensor], list[Tensor]]:
        mesh, options = mesh_of(*mesh_shape), FULL[family]
        ours = train_dtensors(family, dtype, mesh, placements, mode, options)
        options = {**options, "foreach": False}
        return ours, train_dtensors(TORCH[family], torch.float32, mesh, placements, mode, options)

    runs = [(*run, mode) for run in ((FusedSGD, torch.float16), (FusedRMSprop, torch.float32)) for mode in MODES]
    check_runs(world, runs, train, lambda family, _, mode: dtensors_in_one_process(family, world, placements, mode))


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
        mesh = mesh_of(2)
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
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ddp_of_scripts_for_apex(level, bucket_view):
    """Two losses a step, of which DDP would write the second one's gradients over the first one's; an overflow on one
    rank skips on both."""

    def loss_of(net: torch.nn.Module, step: int, rank: int, half: int) -> Tensor:
        loss = net(half_of_batch(step, rank)[half : half + 1]).square().mean()
        return loss * torch.inf if (step, rank, half) == (OVERFLOW, 1, 0) else loss

    def body(rank: int) -> tuple[list[Tensor], list[Tensor], float]:
        net = model()
        optimizer = FusedSGD(net.parameters(), **FULL[FusedSGD])
        net, optimizer = amp_kernels.amp.initialize(net, optimizer, opt_level=level, max_loss_scale=16.0, verbosity=0)
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=bucket_view)
        sums = []
        for step in range(STEPS):
            for p in net.parameters():
                p.grad = None
            apart = []
            for half in (0, 1):
                with amp_kernels.amp.scale_loss(loss_of(ddp, step, rank, half), optimizer) as scaled:
                    scaled.backward()
                apart.append([p.grad.clone() for p in net.parameters()])
            if step == 0:  # alone, the second loss has the gradient that it added
                for p in net.parameters():
                    p.grad = None
                with amp_kernels.amp.scale_loss(loss_of(ddp, step, rank, 1), optimizer) as scaled:
                    scaled.backward()
                for p, first, both in zip(net.parameters(), *apart, strict=True):
                    sums.append(torch.equal(first + p.grad, both))
                    p.grad = both
            optimizer.step()
        assert all(sums)
        scale = amp_kernels.amp.state_dict()["loss_scaler0"]["scale"]
        return [optimizer.master(p) for p in net.parameters()], [p.detach() for p in net.parameters()], scale

    (masters, weights, scale), (other_masters, _, other_scale) = ranks(2, body)
    assert scale == other_scale == 8
    for x, y, weight in zip(masters, other_masters, weights, strict=True):
        assert torch.equal(x, y) and x.isfinite().all()
        assert weight.dtype is (torch.float16 if level == "O2" else torch.float32)


@isolated
@pytest.mark.parametrize("with_scaler", [False, True])
def test_fsdp2(with_scaler):
    def body(rank: int, make: Make) -> list[Tensor]:
        mesh = mesh_of(2)
        net = model()
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        scaler = scaler_of(make) if with_scaler else None
        train(net, make(net.parameters()), lambda step: half_of_batch(step, rank), scaler, overflow_on=1)
        return [full(p) for p in net.parameters()]

    check_models(body, skips=with_scaler)


@isolated
def test_int8_layers():
    """Their parameters are biases. DDP sends codes of rank 0 to the others; FSDP2 shards the biases alone."""

    class Net(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.table, self.first, self.last = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
            quantize_(self)

        def forward(self, index: Tensor) -> Tensor:
            return self.last(self.first(self.table(index) + self.table.weight[: index.shape[-1]]))

    def gradients(net: torch.nn.Module, index: Tensor) -> list[Tensor]:
        net(index).square().mean().backward()
        return [full(p.grad) for p in net.parameters()]

    index = torch.arange(16).view(4, 4)
    whole = Net(0)
    expected = [*gradients(whole, index), whole.first.weight.clone(), whole.table.weight.clone()]
    assert [name for name, _ in whole.named_parameters()] == ["first.bias", "last.bias"]
    assert torch.equal(whole.table.weight[index], whole.table(index))

    def body(rank: int) -> list[list[Tensor]]:
        mesh, sharded = mesh_of(2), Net(0)
        for layer in (sharded.first, sharded):
            fully_shard(layer, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        nets = Net(rank), sharded
        results = []
        for inside, net in zip(nets, (DistributedDataParallel(nets[0]), sharded), strict=True):
            mine = gradients(net, index[2 * rank : 2 * rank + 2])
            results.append([*mine, inside.first.weight.clone(), inside.table.weight.clone()])
        return results

    for result in (result for results in ranks(2, body) for result in results):
        torch.testing.assert_close(result, expected)


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


# ---------------------------------------------------------------------------------------- sums of gradients in fp32
MICRO = 3  # batches of a rank in a step


class Branches(torch.nn.Module):
    """`extra` is used by the second rank alone, `unused` by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.extra, self.unused = torch.nn.Linear(8, 16), torch.nn.Linear(2, 2)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        return self.second(torch.tanh(self.first(x) + (self.extra(x) if rank == 1 else 0)))


def micro_loss(net: Any, rank: int, number: int, *args: int) -> Tensor:
    """Scaled, so that the gradients of fp16 weights do not become subnormal."""
    dtype = next(net.parameters()).dtype
    return net(randn(4, 8, seed=2 * number + rank).to(dtype), *args).float().square().mean() * 2**6


@isolated
@pytest.mark.parametrize("bucket", [25 * 2**20, 600], ids=["one-bucket", "buckets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_in_fp32_under_ddp(dtype: torch.dtype, bucket: int) -> None:
    """Two processes have the gradients that one process gets from all batches, to 1e-6. Both step to the same bits."""

    def body(rank: int) -> list[Tensor]:
        ddp_integration._BUCKET_BYTES = bucket
        net = Branches().to(dtype)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = FusedSGD(net.parameters(), lr=1e-3)
        results: list[Tensor] = []
        for step in range(2):
            optimizer.zero_grad()
            with fp32_accumulation(model):
                for number in range(MICRO):
                    micro_loss(model, rank, 3 * step + number, rank).backward()
            assert net.unused.weight.grad is None
            results += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
        return [*results, *(optimizer.master(p) for p in net.parameters())]

    def alone() -> list[Tensor]:
        net = Branches().to(dtype)
        optimizer = FusedSGD(net.parameters(), lr=1e-3)
        results: list[Tensor] = []
        for p in net.parameters():
            p.grad_dtype = torch.float32
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(2):
                for number in range(MICRO):
                    (micro_loss(net, rank, 3 * step + number, rank) / 2).backward()
            results += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
        return [*results, *(optimizer.master(p) for p in net.parameters())]

    first, second = ranks(2, body)
    for i, (x, y, want) in enumerate(zip(first, second, alone(), strict=True)):
        assert torch.equal(x, y) and x.dtype is torch.float32, i
        assert (x - want).abs().max() <= 1e-6 * want.abs().max(), i


@isolated
def test_sums_in_fp32_are_refused_before_anything_changes() -> None:
    def body(rank: int) -> None:
        net = Branches().bfloat16()
        model = DistributedDataParallel(net)
        with pytest.raises(TypeError, match="must be a DistributedDataParallel, got a Branches"):
            fp32_accumulation(net).__enter__()
        with pytest.raises(ValueError, match="must have static_graph=False, got True"):
            fp32_accumulation(DistributedDataParallel(Branches(), static_graph=True)).__enter__()
        net.second.bias.grad = torch.ones_like(net.second.bias)
        with pytest.raises(RuntimeError, match=r"gradient of second.bias must be None or fp32 before the block"):
            fp32_accumulation(model).__enter__()
        assert all(p.grad_dtype is torch.bfloat16 for p in net.parameters())
        net.second.bias.grad = None
        with pytest.raises(RuntimeError, match=r"got none for extra.weight"), fp32_accumulation(model):
            micro_loss(model, rank, 0).backward()
        local = net.first.weight.grad.clone()
        with pytest.raises(ZeroDivisionError), fp32_accumulation(model):  # an error of the user: no average
            micro_loss(model, rank, 0).backward()
            print(1 // 0)
        assert torch.equal(net.first.weight.grad, 2 * local) and model.require_backward_grad_sync

    ranks(2, body)


@isolated
def test_sums_in_fp32_skip_and_send_buffers_as_ddp_does() -> None:
    """An overflow of one rank skips the step of both. Before the next block, batch norms agree with the first rank."""

    def body(rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).half()
        model = DistributedDataParallel(net)
        optimizer = FusedSGD(net.parameters(), lr=0.1)
        scaler = amp_kernels.GradScaler("cpu", init_scale=4.0)
        means = []
        for step in range(3):
            optimizer.zero_grad()
            with fp32_accumulation(model):
                for number in range(2):
                    loss = micro_loss(model, rank, 2 * step + number)
                    means.append(net[1].running_mean.clone())
                    scaler.scale(loss * torch.inf if (rank, step) == (1, 1) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped_steps == 1 and scaler.get_scale() == 2
        with torch.no_grad():
            model(torch.zeros(2, 8).half())
        return [optimizer.master(p) for p in net.parameters()], torch.stack(means), net[1].running_mean.clone()

    (first, means, last), (second, other_means, other_last) = ranks(2, body)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y) and torch.isfinite(x).all()
    assert torch.equal(last, other_last) and not torch.equal(means, other_means)


@isolated
def test_ddp_resumes_with_the_same_bits() -> None:
    """Each process loads what the first one saved, also after a skipped step."""

    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).half())
        optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0)
        return model, optimizer, amp_kernels.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def run(rank: int, steps: Iterable[int], model: Any, optimizer: Any, scaler: Any) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss = micro_loss(model, rank, step)
            scaler.scale(loss * torch.inf if (rank, step) == (1, 1) else loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def body(rank: int) -> list[list[Tensor]]:
        whole, again = start(), start()
        run(rank, range(2), *whole)
        saved = [[part.state_dict() for part in whole] if rank == 0 else None]
        dist.broadcast_object_list(saved)
        for part, state in zip(again, saved[0], strict=True):
            part.load_state_dict(state)
        for parts in (whole, again):
            run(rank, range(2, 5), *parts)
        assert whole[2].state_dict() == again[2].state_dict() and whole[2].skipped_steps == 1
        return [[optimizer.master(p) for p in model.parameters()] for model, optimizer, _ in (whole, again)]

    results = [masters for of_rank in ranks(2, body) for masters in of_rank]
    for masters in results[1:]:
        for x, y in zip(masters, results[0], strict=True):
            assert torch.equal(x, y) and torch.isfinite(x).all()


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
        with pytest.raises(ValueError, match="must reduce cuda tensors, got a group with backends cpu:gloo; make"):
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


# ----------------------------------------------------------------------------------------- 16-bit weights of odd sizes
# Gradients and their sums are exact in 16 bits. So a run with several processes differs from one process in fp64 only
# by rounding in fp32, and a lost remainder shows.
ODD = ((5, 3), (1, 7), (3,), (1,), (33, 3))  # of two ranks uneven and empty shards; in a bucket at odd addresses
RUNS = (
    (FusedSGD, torch.float16),
    (FusedRMSprop, torch.bfloat16),
    (FusedAdam, torch.float16),
    (FusedAdamW, torch.bfloat16),
)


class Given(torch.nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]] = ODD) -> None:
        super().__init__()
        self.sizes = sizes
        self.weights = torch.nn.ParameterList(value(size, i).to(dtype) for i, size in enumerate(sizes))

    def forward(self, number: int, rank: int) -> Tensor:
        grads = [gradient(size, number, i, rank) for i, size in enumerate(self.sizes)]
        return torch.stack([(p * g.to(p.dtype)).sum() for p, g in zip(self.weights, grads, strict=True)]).sum()


class ByHand:
    """torch's optimizer on fp32 copies of 16-bit parameters."""

    def __init__(self, family: type, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.copies = [Parameter(p.detach().to(torch.float32, copy=True)) for p in self.params]
        self.inner = OF_TORCH[family](self.copies, **FULL[family], foreach=False)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p, fp32 in zip(self.params, self.copies, strict=True):
            fp32.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, fp32 in zip(self.params, self.copies, strict=True):
            p.copy_(fp32)


def fp32_of(optimizer: Any, params: Iterable[Tensor]) -> list[Tensor]:
    """What is trained, of ours with the proof that weights are masters, rounded."""
    if isinstance(optimizer, ByHand):
        return [full(p) for p in optimizer.copies]
    masters = []
    for p in params:
        masters.append(full(optimizer.master(p)))
        assert torch.equal(full(p), masters[-1].to(p.dtype).float())
    return masters


def ours_of(family: Any, params: Iterable[Tensor]) -> Any:
    return family(params, **FULL[family])


def given_in_one_process(
    family: type, batches: Iterable[Sequence[int]], sizes: Sequence[tuple[int, ...]] = ODD, world: int = 2
) -> list[Tensor]:
    """A step for each batch, of which every rank has a part for each number."""
    params = [Parameter(value(size, i).double()) for i, size in enumerate(sizes)]
    optimizer = OF_TORCH[family](params, **FULL[family], foreach=False)
    for numbers in batches:
        for i, (p, size) in enumerate(zip(params, sizes, strict=True)):
            parts = [gradient(size, number, i, rank) for number in numbers for rank in range(world)]
            p.grad = torch.stack(parts).sum(0).double() / world
        optimizer.step()
    return [p.detach() for p in params]


def take_step(optimizer: Any, scaler: Any, backward: Callable[[Any], None], unscale: bool = False) -> None:
    optimizer.zero_grad()
    backward(scaler)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def batches_of(how: str) -> list[tuple[int, ...]]:
    return [(2 * step, 2 * step + 1) if how == "no_sync" else (step,) for step in range(STEPS)]


def train_ddp(how: str, family: Any, dtype: torch.dtype, mode: str, make: Callable[..., Any]) -> list[Tensor]:
    net = Given(dtype)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    if how == "fp16 hook":
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = make(family, net.parameters())
    is_ours = not isinstance(optimizer, ByHand)
    scaler = started(CPU, enabled=is_ours and mode != "step")
    rank = dist.get_rank()
    for step, numbers in enumerate(batches_of(how)):
        overflow = mode != "step" and step == OVERFLOW
        if overflow and not is_ours:
            continue

        def backward(scaler: Any, numbers: Sequence[int] = numbers, overflow: bool = overflow) -> None:
            for number in numbers:
                with contextlib.nullcontext() if number == numbers[-1] else ddp.no_sync():
                    loss = ddp(number, rank)
                    if overflow and rank == 1 and number == numbers[0]:
                        loss = loss * torch.inf
                    scaler.scale(loss).backward()

        take_step(optimizer, scaler, backward, unscale=mode == "unscale_")
        grads = [p.grad for p in net.parameters()]
        assert any(g.data_ptr() % 8 for g in grads) and all(g.untyped_storage().nbytes() > g.nbytes for g in grads)
    assert not scaler.is_enabled() or int(scaler.skipped_steps) == 1
    return fp32_of(optimizer, net.parameters())


@isolated
@pytest.mark.parametrize("how", ["averages", "no_sync", "fp16 hook"])
def test_ddp_with_misaligned_bucket_views(how):
    """Gradients are views of a bucket, of 16 bits at odd multiples of 2 bytes."""

    def train(rank: int, *run: Any) -> tuple[list[Tensor], list[Tensor]]:
        return train_ddp(how, *run, make=ours_of), train_ddp(how, *run, make=ByHand)

    def truth(family: type, _: torch.dtype, mode: str) -> list[Tensor]:
        batches = [b for step, b in enumerate(batches_of(how)) if mode == "step" or step != OVERFLOW]
        return given_in_one_process(family, batches)

    runs = [(*run, mode) for run in (*RUNS, (FusedSGD, torch.float32)) for mode in MODES]
    check_runs(2, runs, train, truth)


class Sharding(NamedTuple):
    """What of `sizes` is sharded, and in which shard an overflow is planted."""

    sizes: Sequence[tuple[int, ...]]
    plain: int  # so many of the last are no DTensors, in the same optimizer
    overflows: dict[int, tuple[int, int]]  # by step: parameter and rank


SHARDINGS = {
    "uneven and empty": Sharding(ODD, 0, {1: (0, 1), 2: (1, 0), 4: (4, 1)}),
    "mixed with plain": Sharding(ODD, 2, {1: (0, 1), 2: (1, 0), 4: (4, 1)}),
    "all on one rank": Sharding(((1, 7), (1,)), 0, {1: (0, 0), 4: (1, 0)}),
}
SCALERS = ("none", "ours", "ours, unscale_", "ShardedGradScaler", "ShardedGradScaler, unscale_")
# torch's scaler does not take DTensors and plain tensors in one optimizer.
FSDP2 = [(s, k) for s in SHARDINGS for k in SCALERS if not (SHARDINGS[s].plain and k.startswith("Sharded"))]


def average_(params: Iterable[Tensor]) -> None:
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train_fsdp2(sharding: Sharding, kind: str, family: Any, dtype: torch.dtype, make: Callable) -> list[Tensor]:
    net = Given(dtype, sharding.sizes)
    plain = list(net.weights)[len(sharding.sizes) - sharding.plain :]
    fully_shard(net, mesh=mesh_of(2), ignored_params=set(plain))
    optimizer = make(family, net.parameters())
    is_ours = not isinstance(optimizer, ByHand)
    rank, overflows = dist.get_rank(), {} if kind == "none" else sharding.overflows
    scaler_type = ShardedGradScaler if kind.startswith("Sharded") else amp_kernels.GradScaler
    scaler = started(CPU, scaler_type, enabled=is_ours and kind != "none")
    for step in range(STEPS + 2):
        if step in overflows and not is_ours:
            continue

        def backward(scaler: Any, step: int = step) -> None:
            scaler.scale(net(step, rank)).backward()
            average_(plain)
            if step in overflows:
                i, where = overflows[step]
                grad = net.weights[i].grad
                if rank == where:
                    (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.inf

        take_step(optimizer, scaler, backward, unscale=kind.endswith("unscale_"))
    assert not scaler.is_enabled() or scaler.get_scale() == 4.0 / 2 ** len(overflows)
    return fp32_of(optimizer, net.parameters())


@isolated
@pytest.mark.parametrize(("sharding", "kind"), FSDP2)
def test_fsdp2_of_uneven_and_empty_shards(sharding, kind):
    """An overflow in the shard of one rank, also where others have none, or in a plain parameter of one rank."""
    what = SHARDINGS[sharding]

    def train(rank: int, *run: Any) -> tuple[list[Tensor], list[Tensor]]:
        return train_fsdp2(what, kind, *run, make=ours_of), train_fsdp2(what, kind, *run, make=ByHand)

    def truth(family: type, _: torch.dtype) -> list[Tensor]:
        steps = [step for step in range(STEPS + 2) if kind == "none" or step not in what.overflows]
        return given_in_one_process(family, [(step,) for step in steps], what.sizes)

    check_runs(2, RUNS, train, truth)


# --------------------------------------------------------------------------------------------------------- checkpoints
class Trainer:
    """Sharded weights, an optimizer and a scaler, as they are saved and loaded.

    Every rank sees the whole batch, so that their number does not matter. With torch's optimizer the weights are fp32.
    """

    def __init__(self, family: Any, dtype: torch.dtype, is_ours: bool) -> None:
        self.net = Given(dtype if is_ours else torch.float32)
        if dist.is_initialized():
            fully_shard(self.net, mesh=mesh_of(dist.get_world_size()))
        options = FULL[family]
        make = family if is_ours else functools.partial(OF_TORCH[family], foreach=False)
        self.optimizer = make(self.net.parameters(), **options)
        self.is_ours = is_ours
        self.scaler = started(CPU, enabled=is_ours)

    def train(self, steps: Iterable[int]) -> None:
        """With an overflow, if it is among the steps."""
        for step in steps:
            if step == OVERFLOW and not self.is_ours:
                continue

            def backward(scaler: Any, step: int = step) -> None:
                loss = self.net(step, 0)
                scaler.scale(loss * torch.inf if step == OVERFLOW else loss).backward()

            take_step(self.optimizer, self.scaler, backward)

    def forget(self) -> None:
        """Weights that no checkpoint holds."""
        with torch.no_grad():
            for p in self.net.parameters():
                p.fill_(7.0)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any], options: StateDictOptions | None = None) -> None:
        # set_state_dict does without weights on a rank that has none to send, and others wait for it.
        set_model_state_dict(self.net, state["model"], options=options)
        set_optimizer_state_dict(self.net, self.optimizer, state["optimizer"], options=options)
        self.scaler.load_state_dict(state["scaler"])

    def whole(self) -> dict[str, Tensor]:
        """Weights, masters, states and steps, each whole."""
        state = self.state()
        entries = {f"{name}.{key}": x for name, of in state["optimizer"]["state"].items() for key, x in of.items()}
        return {name: whole_of(x) for name, x in {**state["model"], **entries}.items()}

    def fp32(self) -> list[Tensor]:
        return [full(self.optimizer.master(p) if self.is_ours else p) for p in self.net.parameters()]


def whole_of(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def in_processes(world: int, body: Callable[[int], Any]) -> list[Any]:
    """One process has no group and no DTensors."""
    return ranks(world, body) if world > 1 else [body(0)]


def trainers(run: Run) -> list[tuple[str, Trainer]]:
    return [(whose, Trainer(*run, is_ours=whose == "ours")) for whose in ("ours", "torch's")]


@isolated
@pytest.mark.parametrize("worlds", [(2, 1), (2, 2), (1, 2)], ids="{0[0]} to {0[1]}".format)
def test_checkpoints_go_to_another_number_of_processes(worlds, tmp_path):
    """Every bit of masters and states arrives, and training goes on as it would have."""
    saving, loading = worlds

    def folder(run: Run, whose: str) -> Path:
        return tmp_path / f"{run[0].__name__} {whose}"

    def save(rank: int) -> list[dict[str, Tensor]]:
        saved = []
        for run in RUNS:
            for whose, trainer in trainers(run):
                trainer.train(range(STEPS))
                dcp.save(trainer.state(), checkpoint_id=folder(run, whose), no_dist=saving == 1)
                saved.append(trainer.whole())
        return saved

    def load(rank: int) -> list[tuple[dict[str, Tensor], list[Tensor], int]]:
        loaded = []
        for run in RUNS:
            for whose, trainer in trainers(run):
                trainer.forget()
                state = trainer.state()
                dcp.load(state, checkpoint_id=folder(run, whose), no_dist=loading == 1)
                trainer.load(state)
                arrived = trainer.whole()
                trainer.train(range(STEPS, 2 * STEPS))
                loaded.append((arrived, trainer.fp32(), int(trainer.scaler.skipped_steps)))
        return loaded

    saved = in_processes(saving, save)[0]
    loaded = in_processes(loading, load)
    for i, run in enumerate(RUNS):
        with case(run[0].__name__):
            ours, theirs = ([of_rank[2 * i + k] for of_rank in loaded] for k in (0, 1))
            for k, (arrived, _, skipped) in enumerate((ours[0], theirs[0])):
                assert_equal(arrived, saved[2 * i + k])
                assert skipped == 1 - k
            batches = [(step,) for step in range(2 * STEPS) if step != OVERFLOW]
            truth = given_in_one_process(run[0], batches, world=1)
            compare([params for _, params, _ in ours], [params for _, params, _ in theirs], truth)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


class Lean(Trainer):
    """AdamW with int8 states. A shard of the first weight has whole groups of 128, a shard of the second has not."""

    SIZES = ((96, 128), (95, 130))

    def __init__(self, state_dtype: torch.dtype = torch.int8) -> None:
        self.net = torch.nn.ParameterList(randn(*size, seed=i).bfloat16() for i, size in enumerate(self.SIZES))
        if dist.is_initialized():
            fully_shard(self.net, mesh=mesh_of(dist.get_world_size()))
        self.optimizer = FusedAdamW(self.net.parameters(), lr=0.01, state_dtype=state_dtype)
        self.is_ours, self.scaler = True, started(CPU, enabled=False)

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for i, (p, size) in enumerate(zip(self.net.parameters(), self.SIZES, strict=True)):
                grad = randn(*size, seed=100 + 10 * step + i).bfloat16()
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
            self.optimizer.step()


@isolated
def test_lean_states_of_shards_are_saved_and_resumed(tmp_path):
    """Each shard has groups of its own, so in one process the second weight's states are encoded again."""

    def save(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        trainer = Lean()
        trainer.train(range(STEPS))
        dcp.save(trainer.state(), checkpoint_id=tmp_path)
        saved = trainer.whole()
        trainer.train(range(STEPS, 2 * STEPS))
        return saved, trainer.fp32()

    def load(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        trainer = Lean()
        trainer.forget()
        state = trainer.state()
        dcp.load(state, checkpoint_id=tmp_path, no_dist=not dist.is_initialized())
        trainer.load(state)
        arrived = trainer.whole()
        trainer.train(range(STEPS, 2 * STEPS))
        return arrived, trainer.fp32()

    (saved, expected), *_ = ranks(2, save)
    for arrived, weights in ranks(2, load):
        assert_equal(arrived, saved)
        assert all(map(torch.equal, weights, expected))
    arrived, weights = load(0)
    assert_equal(*({k: x for k, x in of.items() if not k.startswith("1.exp")} for of in (arrived, saved)))
    for name in ("1.exp_avg", "1.exp_avg_sq"):
        assert not torch.equal(arrived[name], saved[name])
        torch.testing.assert_close(arrived[name], saved[name], rtol=0, atol=0.0161 * saved[name].abs().max().item())
    exact = Lean(torch.float32)
    exact.train(range(2 * STEPS))
    for i, (ours, sharded, truth) in enumerate(zip(weights, expected, exact.fp32(), strict=True)):
        change = (truth - randn(*Lean.SIZES[i], seed=i).bfloat16()).norm()
        assert max((ours - truth).norm(), (sharded - truth).norm()) <= 0.03 * change


@isolated
def test_whole_state_dicts_of_one_rank():
    """One rank has the whole state; the others are sent their shards."""

    def body(rank: int) -> None:
        for run in RUNS:
            before, after = Trainer(*run, is_ours=True), Trainer(*run, is_ours=True)
            before.train(range(STEPS))
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model, optimizer = get_state_dict(before.net, before.optimizer, options=whole)
            assert bool(model) == bool(optimizer["state"] if optimizer else {}) == (rank == 0)
            after.forget()
            state = {"model": model, "optimizer": optimizer, "scaler": before.scaler.state_dict()}
            after.load(state, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
            assert_equal(after.whole(), before.whole())

    ranks(2, body)


@isolated
def test_zero_of_16_bit_weights_is_resumed():
    """Weights are views of buckets, at odd addresses; a rank has the masters of its own ones, in the checkpoint too."""

    def zero(family: Any, net: Given) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(net.parameters(), family, parameters_as_bucket_view=True, **FULL[family])

    def train(net: Given, optimizer: Any, scaler: Any, steps: Iterable[int]) -> None:
        ddp, rank = DistributedDataParallel(net), dist.get_rank()
        for step in steps:
            factor = torch.inf if step == OVERFLOW and rank == 1 else 1.0
            if step != OVERFLOW or scaler.is_enabled():
                loss = functools.partial(ddp, step, rank)
                take_step(optimizer, scaler, lambda s, loss=loss, by=factor: s.scale(by * loss()).backward())

    def ours(family: Any, dtype: torch.dtype) -> list[Tensor]:
        net, scaler = Given(dtype), started(CPU)
        optimizer = zero(family, net)
        assert any(p.data_ptr() % 8 for p in net.parameters())
        train(net, optimizer, scaler, range(STEPS))
        optimizer.consolidate_state_dict(to=0)
        box = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        resumed = Given(dtype)
        optimizer = zero(family, resumed)
        resumed.load_state_dict(net.state_dict())
        optimizer.load_state_dict(box[0])
        train(resumed, optimizer, scaler, range(STEPS, 2 * STEPS))
        assert int(scaler.skipped_steps) == 1
        return [master_of_its_rank(optimizer, p) for p in resumed.parameters()]

    def theirs(family: Any, dtype: torch.dtype) -> list[Tensor]:
        net = Given(dtype)
        optimizer = ByHand(family, net.parameters())
        train(net, optimizer, started(CPU, enabled=False), range(2 * STEPS))
        return fp32_of(optimizer, net.parameters())

    batches = [(step,) for step in range(2 * STEPS) if step != OVERFLOW]
    check_runs(2, RUNS, lambda _, *run: (ours(*run), theirs(*run)), lambda f, _: given_in_one_process(f, batches))


def master_of_its_rank(optimizer: ZeroRedundancyOptimizer, p: Tensor) -> Tensor:
    is_here = any(p is q for group in optimizer.optim.param_groups for q in group["params"])
    master = optimizer.optim.master(p) if is_here else torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
    dist.all_reduce(master)
    assert torch.equal(p.detach(), master.to(p.dtype))
    return master


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
            fully_shard(net, mesh=mesh_of(2))
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
