"""Clipping, norm and skips with parameters that are spread over ranks, against one process that has them whole."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from isolated import backends, case, isolated, ranks
from optim_cases import FULL, OF_TORCH, randn, started, waits_raise
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import amp_kernels
from amp_kernels import testing
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD, SkipAwareScheduler, ema_, fp32_state_dict
from amp_kernels.optim._sweep import KEEP, PASS, READ, UPDATE

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")
CPU = torch.device("cpu")
STEPS, OVERFLOW = 4, 2
MAX_NORM = 1.5
RUNS = [
    (family, dtype)
    for family in (FusedSGD, FusedRMSprop, FusedAdamW)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)  # fp16 under a scaler
]


class Where(NamedTuple):
    """A parameter on this rank: its name on all ranks, its size, its mesh and placements. No mesh: a plain tensor."""

    name: str
    size: tuple[int, ...]
    mesh: Any = None
    placements: Sequence[Placement] = ()
    gets_gradients: bool = True

    def seed(self) -> int:
        return sum(map(ord, self.name))

    def value(self) -> Tensor:
        return (8 * randn(*self.size, seed=self.seed())).round() / 8

    def gradient(self, step: int) -> Tensor:
        """Returns values that are exact in 16 bits, so that one process gets the same norm as several."""
        return (4 * randn(*self.size, seed=100 * (1 + step) + self.seed())).round() / 4

    def placed(self, whole: Tensor) -> Tensor:
        return whole if self.mesh is None else distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().float()


class Result(NamedTuple):
    norms: list[float]
    masters: dict[str, Tensor]
    scale: float
    skipped: list[bool]


def train(wheres: Sequence[Where], family: Any, dtype: torch.dtype, overflow_on: int) -> Result:
    params = [Parameter(where.placed(where.value().to(dtype))) for where in wheres]
    named = [(where.name, p) for where, p in zip(wheres, params, strict=True)]
    optimizer = family(named, **FULL[family], max_grad_norm=MAX_NORM)
    scaler = started(CPU, enabled=dtype is torch.float16)
    norms, skipped = [], []
    for step in range(STEPS):
        if step == OVERFLOW and not scaler.is_enabled():
            continue
        for where, p in zip(wheres, params, strict=True):
            p.grad = None
            if where.gets_gradients:
                p.grad = where.placed((scaler.get_scale() * where.gradient(step)).to(dtype))
        if step == OVERFLOW and dist.get_rank() == overflow_on:
            next(t for p in params if p.grad is not None and (t := local(p.grad)).numel()).view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        skipped.append(bool(optimizer.step_was_skipped))
        if not skipped[-1]:
            norms.append(optimizer.grad_norm.item())
    masters = {name: whole(optimizer.master(p)) for name, p in sorted(named)}  # ranks gather in the same order
    if scaler.is_enabled():
        overflow = scaler.last_overflow
        assert overflow is not None and overflow.step == OVERFLOW + 1 and overflow.parameter in masters
    return Result(norms, masters, scaler.get_scale(), skipped)


def in_one_process(wheres: Sequence[Where], family: Any, dtype: torch.dtype, of: torch.dtype) -> Result:
    """Training with torch's optimizer, in `of`."""
    params = [Parameter(where.value().to(of)) for where in wheres]
    optimizer = OF_TORCH[family](params, **FULL[family], foreach=False)
    norms = []
    for step in range(STEPS):
        if step == OVERFLOW:
            continue
        for where, p in zip(wheres, params, strict=True):
            p.grad = where.gradient(step).to(of) if where.gets_gradients else None
        norms.append(torch.nn.utils.clip_grad_norm_(params, MAX_NORM).item())
        optimizer.step()
    masters = {where.name: p.detach() for where, p in zip(wheres, params, strict=True)}
    return Result(norms, masters, 0.0, [])


Place = Callable[[int], list[Where]]


def check(world: int, place: Place, collectives: int = 1) -> None:
    """Trains in `world` processes, and with all parameters in one. The last rank with parameters finds an overflow."""

    def body(rank: int) -> tuple[list[Where], list[Result]]:
        wheres, overflow_on = place(rank), 0 if place is all_on_the_first_rank else min(world - 1, 3)
        results = []
        for family, dtype in RUNS if wheres else ():
            with counted() as count, case(family.__name__, dtype):
                results.append(train(wheres, family, dtype, overflow_on))
            assert len(count) == collectives * (STEPS - (dtype is not torch.float16)), count
        return [
            where._replace(mesh=None, placements=()) for where in wheres if rank == 0 or where.gets_gradients
        ], results

    of_ranks = ranks(world, body)
    every = {where.name: where for wheres, _ in reversed(of_ranks) for where in wheres}
    for i, (family, dtype) in enumerate(RUNS):
        exact = in_one_process(list(every.values()), family, dtype, torch.float64)
        theirs = in_one_process(list(every.values()), family, dtype, torch.float32)
        with case(family.__name__, dtype):
            compare([results[i] for _, results in of_ranks if results], exact, theirs, dtype)


def compare(results: Sequence[Result], exact: Result, theirs: Result, dtype: torch.dtype) -> None:
    for rank, result in enumerate(results):
        assert result.norms == results[0].norms, f"norms of rank {rank}: {result.norms}, {results[0].norms}"
        assert result.scale == results[0].scale and result.skipped == results[0].skipped, rank
        assert sum(result.skipped) == (dtype is torch.float16)
        for norm, expected in zip(result.norms, exact.norms, strict=True):
            assert math.isclose(norm, expected, rel_tol=1e-6), f"rank {rank}: norm {norm}, expected {expected}"
        for name, master in result.masters.items():
            error, allowed = testing.common.error_and_allowed(master, theirs.masters[name], exact.masters[name])
            assert error <= allowed + 1e-6, f"{name} of rank {rank}: {error} > {allowed}"


class counted:
    """Counts the calls of all_reduce in a block, by the number of elements."""

    def __enter__(self) -> list[int]:
        calls: list[int] = []
        original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        self.patch = mock.patch.object(dist, "all_reduce", all_reduce)
        self.patch.start()
        return calls

    def __exit__(self, *error: object) -> None:
        self.patch.stop()


@functools.cache  # of a rank, which is a process
def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


EVEN, UNEVEN, FEW = (8, 6), (5, 3), (1, 2)  # with FEW, ranks have no rows


def fsdp2(rank: int) -> list[Where]:
    mesh = mesh_of(dist.get_world_size())
    return [Where(f"w{i}", size, mesh, [Shard(0)]) for i, size in enumerate((EVEN, UNEVEN, FEW))]


def tensor_parallel(rank: int) -> list[Where]:
    mesh = mesh_of(dist.get_world_size())
    return [
        Where("norm", (7,), mesh, [Replicate()]),
        Where("columns", UNEVEN, mesh, [Shard(0)]),
        Where("rows", UNEVEN, mesh, [Shard(1)]),
    ]


def with_plain(rank: int) -> list[Where]:
    return [*fsdp2(rank), Where("plain", UNEVEN)]


def without_a_gradient(rank: int) -> list[Where]:
    """On one rank a parameter has no gradient, since its shard is empty. On all ranks the frozen one has none."""
    mesh = mesh_of(dist.get_world_size())
    return [
        Where("few", FEW, mesh, [Shard(0)], gets_gradients=rank == 0),
        Where("w", EVEN, mesh, [Replicate()]),
        Where("frozen", UNEVEN, mesh, [Shard(0)], gets_gradients=False),
    ]


def all_on_the_first_rank(rank: int) -> list[Where]:
    """The other rank has no gradient at all."""
    mesh = mesh_of(dist.get_world_size())
    return [Where(name, FEW, mesh, [Shard(0)], gets_gradients=rank == 0) for name in ("first", "second")]


def in_another_order(rank: int) -> list[Where]:
    wheres = tensor_parallel(rank)
    return wheres[::-1] if rank else wheres


def hybrid(rank: int) -> list[Where]:
    mesh = mesh_of(2, 2)
    return [Where(f"w{i}", size, mesh, [Replicate(), Shard(0)]) for i, size in enumerate((EVEN, UNEVEN, FEW))]


def slices(rank: int) -> list[Where]:
    """Parameters of FSDP2 alone, of tensor parallelism alone, of both, and plain ones."""
    mesh = mesh_of(2, 2)
    wheres = [
        Where("sharded", UNEVEN, mesh["dp"], [Shard(0)]),
        Where("columns", UNEVEN, mesh["tp"], [Shard(1)]),
        Where("norm", (7,), mesh["tp"], [Replicate()]),
        Where("both", EVEN, mesh, [Shard(0), Shard(1)]),
        Where("same twice", (9, 2), mesh, [Shard(0), Shard(0)]),
        Where("plain", (3,)),
    ]
    return wheres[rank:] + wheres[:rank]  # in another order on every rank


def flattened(rank: int) -> list[Where]:
    mesh = mesh_of(2, 2)
    flat = mesh._flatten("flat")
    return [Where("flat", UNEVEN, flat, [Shard(0)]), Where("grid", EVEN, mesh, [Replicate(), Shard(0)])]


def experts(rank: int) -> list[Where]:
    """Each pair of ranks has an expert of its own, on a mesh of its own."""
    shared = mesh_of(2, 2)
    halves = [dist.device_mesh.DeviceMesh("cpu", [2 * half, 2 * half + 1]) for half in (0, 1)]
    half = rank // 2
    wheres = [
        Where("shared", UNEVEN, shared, [Replicate(), Shard(0)]),
        Where(f"expert {half}", EVEN, halves[half], [Shard(0)]),
        Where(f"bias of expert {half}", (3,), halves[half], [Replicate()]),
    ]
    return wheres[rank % 3 :] + wheres[: rank % 3]


@isolated
@pytest.mark.parametrize(
    "layout",
    [fsdp2, tensor_parallel, with_plain, in_another_order, without_a_gradient, all_on_the_first_rank],
)
def test_two_ranks(layout):
    check(2, layout)


@isolated
@backends
def test_two_ranks_of_a_forced_backend(backend):
    """Python then takes every step, and C++ none."""
    check(2, tensor_parallel)


@isolated
@pytest.mark.parametrize("layout", [fsdp2, hybrid, slices, flattened, experts])
def test_four_ranks(layout):
    check(4, layout)


def on_a_part_of_the_ranks(rank: int) -> list[Where]:
    """No group holds exactly the ranks of the mesh [[0, 1], [2, 3]], so the sum goes through two."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    halves = [dist.device_mesh.DeviceMesh("cpu", [2 * half, 2 * half + 1]) for half in (0, 1)]
    if rank > 3:
        return []
    wheres = [
        Where("norm", (7,), mesh, [Replicate(), Replicate()]),
        Where("copies", UNEVEN, mesh, [Replicate(), Shard(0)]),
        Where("slice", UNEVEN, mesh["dp"], [Shard(0)]),
        Where("both", EVEN, mesh, [Shard(0), Shard(1)]),
        Where(f"expert {rank // 2}", EVEN, halves[rank // 2], [Shard(0)]),
    ]
    return wheres[rank:] + wheres[:rank]


@isolated
def test_one_sum_for_each_group_where_no_group_has_all_ranks():
    check(5, on_a_part_of_the_ranks, collectives=2)


@isolated
@pytest.mark.parametrize("with_scaler", [False, True])
def test_a_step_does_not_wait(with_scaler):
    """Nothing reads a tensor on the host. (gloo's `all_reduce` waits for the other rank, but NCCL's does not.)"""

    def body(rank: int) -> None:
        wheres = tensor_parallel(rank)
        params = [Parameter(where.placed(where.value())) for where in wheres]
        optimizer, scaler = FusedAdamW(params, max_grad_norm=1.0), started(CPU, enabled=with_scaler)
        for step in range(4):
            for where, p in zip(wheres, params, strict=True):
                p.grad = where.placed(where.gradient(step))
            with waits_raise(CPU, pytest.MonkeyPatch(), first=step == 0):
                scaler.step(optimizer)
                scaler.update()
            assert optimizer._warm is not None or step == 0

    ranks(2, body)


@isolated
def test_a_step_that_cpp_leaves_after_the_sum():
    """If C++ has run the gradient pass and then leaves the update to Python, ranks have added up already."""

    def body(rank: int) -> tuple[float, Tensor]:
        p = Parameter(distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)]))
        optimizer = FusedSGD([p], lr=1.0, max_grad_norm=1.0)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        run, works = optimizer._run_warm, []

        def run_warm(work: int, *arguments: Any) -> Any:
            works.append(work)
            return None if rank == 0 and work == UPDATE else run(work, *arguments)

        with mock.patch.object(optimizer, "_run_warm", run_warm), counted() as count:
            optimizer.step()
        assert count == [2] and works == [READ | PASS | KEEP, UPDATE]
        return optimizer.grad_norm.item(), whole(p)

    (norm, weights), (other_norm, other_weights) = ranks(2, body)
    assert norm == other_norm == 2.0 and torch.equal(weights, other_weights)
    torch.testing.assert_close(weights, torch.full((4,), 1 - 4 * 0.5))


class Block(torch.nn.Module):
    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = torch.nn.LayerNorm(6), torch.nn.Linear(6, hidden), torch.nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def clipped_in_one_process(family: Any, scale: float = 1.0) -> tuple[list[float], list[Tensor]]:
    net, norms = Block().double(), []
    optimizer = OF_TORCH[family](net.parameters(), **FULL[family], foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(randn(4, 6, seed=step).double()).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
        optimizer.step()
    return norms, [p.detach() for p in net.parameters()]


def assert_clipped(results: Sequence[tuple[list[float], list[Tensor]]], family: Any) -> None:
    expected, weights = clipped_in_one_process(family)
    for norms, params in results:
        assert norms == results[0][0], "ranks have different norms"
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected), rtol=2e-5, atol=0)  # of a model in fp32
        for p, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(p.double(), weight, rtol=1e-4, atol=1e-5)


def train_block(net: torch.nn.Module, optimizer: Any, inner: Any, rank: int, world: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(randn(4, 6, seed=step).chunk(world)[rank % world]).square().mean().backward()
        optimizer.step()
        norms.append(inner().grad_norm.item())
    return norms


@isolated
@pytest.mark.parametrize("family", [FusedSGD, FusedRMSprop, FusedAdamW])
def test_fsdp2_over_tensor_parallel_layers(family):
    """FSDP2 cuts the shards of tensor parallelism once more, by strided shards. The norm is on a slice of the mesh."""

    def body(rank: int) -> tuple[list[float], list[Tensor]]:
        mesh, net = mesh_of(2, 2), Block()
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        kinds = {type(placement).__name__ for p in net.parameters() for placement in p.placements}
        assert "_StridedShard" in kinds, kinds
        optimizer = family(net.parameters(), **FULL[family], max_grad_norm=0.05)
        return train_block(net, optimizer, lambda: optimizer, rank // 2, 2), list(map(whole, net.parameters()))

    assert_clipped(ranks(4, body), family)


# ---------------------------------------------------------------------------------------- what cannot be told, in words
def refused(step: Callable[[], Any], params: Sequence[Tensor], words: str) -> None:
    before = [local(p).detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=words):
        step()
    assert all(map(torch.equal, map(local, params), before))


def given(mesh: Any, placements: Sequence[Placement] = (Shard(0),)) -> Parameter:
    p = Parameter(distribute_tensor(torch.ones(4), mesh, placements, src_data_rank=None))
    p.grad = torch.ones_like(p)
    return p


@isolated
def test_meshes_that_overlap_only_in_part_are_refused():
    """Only the rank in both can tell. On skips the ranks agree."""

    def body(rank: int) -> tuple[bool, float]:
        pairs = [dist.device_mesh.DeviceMesh("cpu", pair) for pair in ([0, 1], [1, 2])]
        params = [given(mesh) for mesh in pairs if mesh.get_coordinate() is not None]
        if rank == 1:
            words = r"must not overlap only in part.* got meshes of the ranks \[0, 1\], \[1, 2\]; put"
            refused(FusedSGD(params, lr=1, max_grad_norm=1.0).step, params, words)
            with pytest.raises(RuntimeError, match=words):
                amp_kernels.grad_norm([p.grad for p in params])
        optimizer, scaler = FusedSGD(params, lr=1), started(CPU)
        if rank == 0:
            local(params[0].grad)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return bool(optimizer.step_was_skipped), scaler.get_scale()

    assert ranks(3, body) == [(True, 2.0)] * 3


@isolated
def test_meshes_of_other_ranks_are_refused():
    """Each rank has the DTensors of both meshes, and memory for those of one. No rank hears of the other mesh."""

    def body(rank: int) -> None:
        params = [given(dist.device_mesh.DeviceMesh("cpu", pair)) for pair in ([0, 1], [2, 3])]
        words = (
            r"or be disjoint.* got meshes of the ranks \[0, 1\], \[2, 3\]|got meshes of the ranks \[2, 3\], \[0, 1\]"
        )
        refused(FusedSGD(params, lr=1, max_grad_norm=1.0).step, params, words)
        optimizer, scaler = FusedSGD(params, lr=1), started(CPU)
        gradients = [local(p.grad).clone() for p in params]
        refused(lambda: scaler.unscale_(optimizer), params, words)
        assert all(torch.equal(local(p.grad), g) for p, g in zip(params, gradients, strict=True))

    ranks(4, body)


@isolated
def test_a_mesh_across_stages():
    """A skip reaches all ranks of each DTensor."""

    def body(rank: int) -> tuple[bool, float]:
        stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        across = [dist.device_mesh.DeviceMesh("cpu", [k, 2 + k]) for k in (0, 1)][rank % 2]
        params = [given(stages["dp"]), given(across)]
        optimizer, scaler = FusedSGD(params[:: 1 if rank else -1], lr=1), started(CPU)
        if rank == 2:
            local(params[1].grad)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return bool(optimizer.step_was_skipped), scaler.get_scale()

    assert ranks(4, body) == [(True, 2.0)] * 4


@isolated
def test_stages_of_a_pipeline_are_refused():
    """Each would clip by its own norm. Under a scaler each skips by itself, as with torch's scaler."""

    def body(rank: int) -> tuple[bool, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        p = given(mesh["dp"])
        words = r"must be spread over all dimensions .* got DeviceMesh.* with none along pp, where"
        refused(FusedSGD([p], lr=1, max_grad_norm=1.0).step, [p], words)
        optimizer, scaler = FusedSGD([p], lr=1), started(CPU)
        if rank == 3:
            p.grad.to_local()[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(RuntimeError, match=r"FusedSGD\.grad_norm: .*none along pp"):
            print(optimizer.grad_norm)
        skipped = bool(optimizer.step_was_skipped)
        p.grad = torch.ones_like(p)
        for _ in range(3):
            optimizer.step()
        assert optimizer._warm is not None
        optimizer.max_grad_norm = 1.0  # now that C++ takes the steps
        refused(optimizer.step, [p], words)
        return skipped, scaler.get_scale()

    assert ranks(4, body) == [(False, 4.0)] * 2 + [(True, 2.0)] * 2


@isolated
def test_a_group_without_a_backend_for_the_device_is_refused():
    def body(rank: int) -> None:
        p = given(mesh_of(2))
        with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
            words = r"must reduce cpu tensors, got one with the backends {'cuda': 'nccl'}; call init_process_group"
            refused(FusedSGD([p], lr=1, max_grad_norm=1.0).step, [p], words)
            FusedSGD([p], lr=1).step()

    ranks(2, body)


@isolated
def test_a_captured_step_of_dtensors_is_refused():
    def body(rank: int) -> None:
        p = given(mesh_of(2))
        optimizer = FusedSGD([p], lr=1)
        optimizer.step()
        with mock.patch.object(amp_kernels.optim._base, "capturing", return_value=True):
            refused(optimizer.step, [p], "must not be captured with DTensor parameters")

    ranks(2, body)


@isolated
def test_a_mesh_with_groups_of_its_own():
    """The default group has no backend for the device, but the groups of the mesh have one."""

    def body(rank: int) -> tuple[float, int]:
        pairs = [(pair, dist.new_group(pair)) for pair in ([0, 2], [1, 3], [0, 1], [2, 3])]
        own = [group for pair, group in pairs if rank in pair]
        mesh = dist.device_mesh.DeviceMesh.from_group(
            own, "cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("a", "b")
        )
        p = given(mesh, [Replicate(), Shard(0)])
        optimizer, scaler = FusedSGD([p], lr=1.0, max_grad_norm=1.0), started(CPU)
        world, backends = dist.group.WORLD, dist.get_backend_config
        with mock.patch.object(dist, "get_backend_config", lambda g: "cuda:gloo" if g is world else backends(g)):
            scaler.step(optimizer)
        return optimizer.grad_norm.item(), int(optimizer.state[p]["step"])

    assert ranks(4, body) == [(0.5, 1)] * 4


@isolated
def test_parameters_after_a_refusal():
    def body(rank: int) -> None:
        meshes = [dist.device_mesh.DeviceMesh("cpu", pair) for pair in ([0, 1], [2, 3])]
        optimizer, scaler = FusedSGD(list(map(given, meshes)), lr=1.0), started(CPU)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="or be disjoint"):
                scaler.unscale_(optimizer)
        optimizer.param_groups[0]["params"] = [given(mesh_of(4))]
        started(CPU).step(optimizer)

    ranks(4, body)


@isolated
def test_a_torch_that_cannot_tell_slices_refuses_meshes_of_some_ranks():
    def body(rank: int) -> None:
        mesh = mesh_of(2, 2)
        part, all_ranks = given(mesh["dp"]), given(mesh, [Replicate(), Shard(0)])
        with mock.patch.object(dist.device_mesh.DeviceMesh, "_get_root_mesh", None):
            refused(FusedSGD([part], lr=1, max_grad_norm=1.0).step, [part], "this torch cannot tell whether")
            FusedSGD([all_ranks], lr=1, max_grad_norm=1.0).step()

    ranks(4, body)


# ------------------------------------------------------------------------------------------------ lists of gradients
def parts_of_a_sum(mesh: Any) -> DTensor:
    return DTensor.from_local(randn(5, 2, seed=dist.get_rank()), mesh, [Partial()])


@isolated
@pytest.mark.parametrize("layout", [tensor_parallel, with_plain, in_another_order])
def test_lists_of_gradients(layout):
    """`grad_norm` and `clip_grad_norm_` in one read and one all-reduce. A Partial gradient is added up first."""
    world = 2

    def body(rank: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        wheres = sorted(layout(rank))
        params = [Parameter(where.placed(where.value())) for where in wheres]
        for where, p in zip(wheres, params, strict=True):
            p.grad = where.placed(where.gradient(0))
        params.append(Parameter(distribute_tensor(torch.ones(5, 2), mesh_of(world), [Replicate()])))
        params[-1].grad = parts_of_a_sum(mesh_of(world))
        order = range(len(params)) if rank else reversed(range(len(params)))
        grads, found_inf = [params[i].grad for i in order], torch.zeros(())
        with counted() as count:
            norm = amp_kernels.grad_norm(grads, inv_scale=torch.tensor(0.5), found_inf=found_inf)
            assert len(count) == 1 and found_inf == 0 and norm.shape == () and type(norm) is Tensor
            assert amp_kernels.clip_grad_norm_(params, MAX_NORM) == 2 * norm
            assert len(count) == 2
        clipped = [whole(p.grad).clone() for p in params]
        if rank == 1:
            local(params[0].grad).view(-1)[0] = torch.nan
        assert amp_kernels.grad_norm(grads, found_inf=found_inf).isnan() and found_inf == 1
        with pytest.raises(RuntimeError, match="the norm of the gradients must be finite"):
            amp_kernels.clip_grad_norm_(params, MAX_NORM, error_if_nonfinite=True)
        return norm, clipped, [where.gradient(0) for where in wheres]

    results = ranks(world, body)
    exact = [g.double() for g in (*results[0][2], sum(randn(5, 2, seed=rank) for rank in range(world)))]
    norm = torch.cat([g.flatten() for g in exact]).norm()
    for measured, clipped, _ in results:
        assert torch.equal(measured, results[0][0])
        torch.testing.assert_close(2 * measured.double(), norm, rtol=1e-6, atol=0)
        for x, g in zip(clipped, exact, strict=True):
            torch.testing.assert_close(x.double(), g * MAX_NORM / norm, rtol=2e-6, atol=1e-7)


@isolated
def test_lists_of_a_stage_and_of_ranks_without_gradients():
    """torch's `clip_grad_norm_` and ours return the norm over the slice that the parameters are on."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        params = [given(mesh["dp"]) for _ in range(2)]
        norms = [clip(params, 1e9) for clip in (amp_kernels.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)]
        assert norms[0] == whole(norms[1]) == math.sqrt(8)
        if rank % 2:
            params[0].grad = params[1].grad = None
        assert amp_kernels.clip_grad_norm_(params, 1e9) == 2.0
        with pytest.raises(ValueError, match="grad_norm: found_inf must be"):
            amp_kernels.grad_norm([params[0]], found_inf=torch.zeros((), dtype=torch.float64))

    ranks(4, body)


# ------------------------------------------------------------------------------------------------------ under a scaler
@isolated
@pytest.mark.parametrize("family", [FusedSGD, FusedRMSprop, FusedAdamW])
def test_what_follows_a_skip_agrees(family):
    """One rank finds inf in its shard. Afterwards all ranks have the same scale, schedule and averages."""

    def body(rank: int) -> dict[str, Any]:
        wheres = [Where("w", EVEN, mesh_of(2), [Shard(0)]), Where("norm", (7,), mesh_of(2), [Replicate()])]
        params = [Parameter(where.placed(where.value().half())) for where in wheres]
        optimizer = family(zip(("w", "norm"), params, strict=True), lr=0.25, max_grad_norm=MAX_NORM)
        scaler = amp_kernels.GradScaler("cpu", init_scale=4.0, hysteresis=2, growth_interval=2)
        scaler.scale(torch.ones(()))
        schedule = SkipAwareScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        averages = [optimizer.master(p) for p in params]
        rates, overflows = [], []
        for step in range(6):
            for where, p in zip(wheres, params, strict=True):
                p.grad = where.placed(scaler.get_scale() * where.gradient(step)).half()
            if step in (1, 2, 4) and rank == step % 2:
                local(params[step % 2].grad).view(-1)[-1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            ema_(averages, optimizer, 0.5)
            schedule.step()
            rates += schedule.get_last_lr()
            overflows.append(scaler.last_overflow)
        return {
            "scale": scaler.state_dict(), "rates": rates, "overflows": overflows,
            "log": optimizer._log.checks, "steps": [int(optimizer.state[p]["step"]) for p in params],
            "averages": list(map(whole, averages)), "masters": [whole(optimizer.master(p)) for p in params],
        }  # fmt: skip

    first, second = ranks(2, body)
    for key in ("averages", "masters"):
        torch.testing.assert_close(first.pop(key), second.pop(key), rtol=0, atol=0)
    assert first == second
    assert first["steps"] == [3, 3] and first["scale"]["skipped_steps"] == 3
    assert first["rates"] == [0.25, 0.125, 0.125, 0.125, 0.0625, 0.0625]
    found = [overflow and (overflow.step, overflow.parameter) for overflow in first["overflows"]]
    assert found == [None, (2, "norm"), (3, "w"), (3, "w"), (5, "w"), (5, "w")]


@isolated
def test_hooks_of_one_rank_change_no_sum():
    """A hook may change gradients, so the step reads them again. Ranks add up once, before it."""

    def body(rank: int) -> tuple[list[float], Tensor]:
        p = given(mesh_of(2))
        optimizer, scaler, norms = FusedSGD([p], lr=1.0, max_grad_norm=1.0), started(CPU), []

        def doubled(*_: Any) -> None:
            local(p.grad).mul_(2)

        if rank == 0:
            optimizer.register_step_pre_hook(doubled)
        for _ in range(4):
            p.grad = torch.full_like(p, 4.0)
            with counted() as count:
                scaler.step(optimizer)
            scaler.update()
            assert count == [4]
            norms.append(optimizer.grad_norm.item())
        return norms, whole(p)

    (norms, weights), other = ranks(2, body)
    assert norms == other[0] == [2.0] * 4 and torch.equal(weights, other[1])
    torch.testing.assert_close(weights, torch.tensor([-3.0, -3.0, -1.0, -1.0]), rtol=1e-5, atol=0)


@isolated
@pytest.mark.parametrize("clips", [False, True])
def test_unscale_and_torchs_clip(clips):
    """torch's `clip_grad_norm_` between `unscale_` and the step, with and without an own `max_grad_norm` after it."""

    def body(rank: int) -> tuple[list[float], list[Tensor]]:
        wheres = fsdp2(rank)
        params = [Parameter(where.placed(where.value().half())) for where in wheres]
        optimizer = FusedSGD(params, **FULL[FusedSGD], max_grad_norm=MAX_NORM / 2 if clips else None)
        scaler, norms = started(CPU), []
        for step in range(STEPS):
            for where, p in zip(wheres, params, strict=True):
                p.grad = where.placed(scaler.get_scale() * where.gradient(step)).half()
            if step == OVERFLOW and rank == 1:
                local(params[0].grad)[0] = torch.inf
            scaler.unscale_(optimizer)
            norms.append(whole(optimizer.grad_norm).item())
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
        assert int(scaler.skipped_steps) == 1
        return norms, [whole(optimizer.master(p)) for p in params]

    results = ranks(2, body)
    wheres = [Where(f"w{i}", size) for i, size in enumerate((EVEN, UNEVEN, FEW))]
    params = [Parameter(where.value().double()) for where in wheres]
    optimizer = OF_TORCH[FusedSGD](params, **FULL[FusedSGD])
    expected = []
    for step in range(STEPS):
        for where, p in zip(wheres, params, strict=True):
            p.grad = where.gradient(step).double()
        norm = torch.nn.utils.clip_grad_norm_(params, MAX_NORM / 2 if clips else MAX_NORM)
        expected.append(norm.item())
        if step != OVERFLOW:
            optimizer.step()
    for norms, masters in results:
        assert not math.isfinite(norms[OVERFLOW])
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(norms, expected, strict=True) if math.isfinite(a))
        for master, p in zip(masters, params, strict=True):  # torch's clipping rounds gradients to fp16
            torch.testing.assert_close(master.double(), p.detach(), rtol=2e-3, atol=2e-3)


# ------------------------------------------------------------------------- parts of the parameters as ordinary tensors
class Oss(torch.optim.Optimizer):
    """As fairscale's OSS and ZeroRedundancyOptimizer: each rank steps an optimizer of some parameters, and sends them.

    Like OSS, it makes this optimizer before it calls the constructor of its base class.
    """

    def __init__(self, params: Any, kind: Any, **defaults: Any) -> None:
        every = list(params)
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.parts = [every[rank :: self.world] for rank in range(self.world)]
        self.optim = kind(self.parts[self.rank], **defaults)
        super().__init__(every, defaults)

    def step(self, closure: Any = None) -> None:
        self.optim.step()
        for rank, params in enumerate(self.parts):
            for p in params:
                dist.broadcast(p.detach(), rank)


class DeepSpeed:
    """As DeepSpeed's ZeRO 1: it puts a flat fp32 part of all parameters into the user's optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.world, self.rank = optimizer, dist.get_world_size(), dist.get_rank()
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.part = Parameter(self.cut([p.detach() for p in self.params]).clone())
        optimizer.param_groups[0]["params"] = [self.part]

    def cut(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([t.flatten() for t in tensors])
        padding = -len(flat) % self.world
        return torch.nn.functional.pad(flat, (0, padding)).chunk(self.world)[self.rank]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        self.part.grad = self.cut([p.grad for p in self.params])
        self.optimizer.step()
        parts = [torch.empty_like(self.part) for _ in range(self.world)]
        dist.all_gather(parts, self.part.detach())
        flat, begin = torch.cat(parts), 0
        for p in self.params:
            p.detach().copy_(flat[begin : begin + p.numel()].view_as(p))
            begin += p.numel()


class Split:
    """Has two optimizers for two kinds of parameters, as splitters for Muon do. Frozen parameters are left out."""

    def __init__(self, params: Any, kind: Any) -> None:
        every = list(params)
        self.param_groups = [{"params": every}]
        every = [p for p in every if p.requires_grad]
        self.first, self.rest = kind([p for p in every if p.ndim > 1]), [kind([p for p in every if p.ndim == 1])]

    def zero_grad(self) -> None:
        for optimizer in (self.first, *self.rest):
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in (self.first, *self.rest):
            optimizer.step()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: a wrapper that shares the groups of its optimizer."""

    def __init__(self, params: Any, kind: Any) -> None:
        super().__init__(params, {})
        self.base = kind(self.param_groups)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


STRATEGIES = {
    "shards": ShardingStrategy.FULL_SHARD,
    "copies": ShardingStrategy.NO_SHARD,
    "copies of shards": ShardingStrategy.HYBRID_SHARD,
}


def fsdp1(strategy: str, use_orig_params: bool, rank: int) -> FullyShardedDataParallel:
    groups = None
    if strategy == "copies of shards":
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
        groups = pairs[rank // 2], pairs[2 + rank % 2]
    return FullyShardedDataParallel(
        Block(), groups, STRATEGIES[strategy], use_orig_params=use_orig_params, device_id=CPU,
        ignored_states=[],
    )  # fmt: skip


@isolated
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norm_group_of_fsdp1(strategy, use_orig_params):
    world = 4 if strategy == "copies of shards" else 2

    def body(rank: int, family: Any) -> tuple[list[float], list[Tensor]]:
        net = fsdp1(strategy, use_orig_params, rank)
        options = {**FULL[family], "max_grad_norm": 0.05}
        optimizer = family(net.parameters(), **options)
        net(randn(4, 6, seed=0)).square().mean().backward()
        words = "must be None with parameters of FSDP1 since each rank would clip .* pass norm_group="
        refused(optimizer.step, list(net.parameters()), words)
        optimizer = family(net.parameters(), **options, norm_group=net.process_group)
        with counted() as count:
            norms = train_block(net, optimizer, lambda: optimizer, rank, world)
        assert count.count(2) == STEPS, count  # the others are of FSDP1 and have all gradients
        with FullyShardedDataParallel.summon_full_params(net):
            return norms, [v.detach().clone() for v in net.state_dict().values()]

    for family in (FusedSGD, FusedAdamW):
        assert_clipped(ranks(world, functools.partial(body, family=family)), family)


HOLDERS: dict[str, Callable[..., Any]] = {
    "ZeroRedundancyOptimizer": lambda params, kind: ZeroRedundancyOptimizer(params, kind),
    "Oss": Oss,
    "DeepSpeed": lambda params, kind: DeepSpeed(kind(params)),
}


@isolated
@pytest.mark.parametrize("holder", HOLDERS)
def test_norm_group_of_parts(holder):
    words = {
        "ZeroRedundancyOptimizer": "a ZeroRedundancyOptimizer",
        "Oss": "a Oss, which has more parameters than this optimizer,",
        "DeepSpeed": "parameters that other code has put in place of those given to the optimizer,",
    }[holder]

    def body(rank: int, family: Any) -> tuple[list[float], list[Tensor]]:
        kind = functools.partial(family, **FULL[family], max_grad_norm=0.05)
        net = DistributedDataParallel(Block())
        optimizer = HOLDERS[holder](net.parameters(), kind)
        net(randn(4, 6, seed=0)).square().mean().backward()
        refused(optimizer.step, list(net.parameters()), f"max_grad_norm must be None with {words} since .*norm_group=")
        inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", None))
        inner.load_state_dict(inner.state_dict())
        refused(optimizer.step, list(net.parameters()), f"max_grad_norm must be None with {words} since .*norm_group=")
        optimizer = HOLDERS[holder](net.parameters(), functools.partial(kind, norm_group=dist.group.WORLD))
        inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", None))
        return train_block(net, optimizer, lambda: inner, rank, 2), [p.detach() for p in net.parameters()]

    for family in (FusedSGD, FusedRMSprop, FusedAdamW):
        assert_clipped(ranks(2, functools.partial(body, family=family)), family)


@isolated
@pytest.mark.parametrize("holder", [Split, Sam])
def test_optimizers_of_whole_parameters_need_no_group(holder):
    def body(rank: int) -> list[Tensor]:
        net = Block()
        net.norm.bias.requires_grad_(False)
        net = DistributedDataParallel(net)
        every = holder(net.parameters(), functools.partial(FusedSGD, lr=0.5, max_grad_norm=0.05))
        alone = FusedSGD([p for p in net.parameters() if p.requires_grad], lr=0.5, max_grad_norm=0.05)
        for optimizer in (every, alone):
            optimizer.zero_grad()
            net(randn(4, 6, seed=rank)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    first, second = ranks(2, body)
    assert all(map(torch.equal, first, second))


@isolated
@pytest.mark.parametrize("how", ["ZeroRedundancyOptimizer", "Oss", "fsdp1, flat", "fsdp1, original"])
def test_parts_of_any_dtype(how):
    """Each rank's part against an optimizer whose gradients are clipped before, by the norm of all parts in fp64."""

    def body(rank: int) -> None:
        for family, dtype in RUNS:
            with case(family.__name__, dtype):
                check_parts(how, family, dtype, rank)

    ranks(2, body)


def check_parts(how: str, family: Any, dtype: torch.dtype, rank: int) -> None:
    kind = functools.partial(family, **FULL[family], max_grad_norm=0.05, norm_group=dist.group.WORLD)
    is_fsdp1 = how.startswith("fsdp1")
    if is_fsdp1:
        net = FullyShardedDataParallel(Block().to(dtype), use_orig_params=how == "fsdp1, original", device_id=CPU)
        outer = inner = kind(net.parameters())
    else:
        net = DistributedDataParallel(Block().to(dtype))
        outer = HOLDERS[how](net.parameters(), kind)
        inner = outer.optim
    own = [p for group in inner.param_groups for p in group["params"] if p.numel()]
    copies = [Parameter(p.detach().clone()) for p in own]
    for copied in copies:
        copied.grad_dtype = torch.float32
    expected = family(copies, **FULL[family])
    is_low = dtype is torch.float16
    scaler = started(CPU, ShardedGradScaler if is_fsdp1 else amp_kernels.GradScaler, enabled=is_low)
    for step in range(STEPS):
        outer.zero_grad()
        loss = net(randn(4, 6, seed=2 * step + rank).to(dtype)).float().square().mean()
        scaler.scale(loss * torch.inf if is_low and step == OVERFLOW and rank == 1 else loss).backward()
        before = scaler.get_scale()
        scaler.step(outer)  # leaves the gradients unscaled
        scaler.update()
        assert (scaler.get_scale() < before) == (is_low and step == OVERFLOW)
        if scaler.get_scale() == before:
            squares = torch.stack([p.grad.double().square().sum() for p in own if p.grad is not None]).sum()
            dist.all_reduce(squares)
            norm = squares.sqrt().item()
            assert math.isclose(inner.grad_norm.item(), norm, rel_tol=1e-6)
            for p, copied in zip(own, copies, strict=True):
                copied.grad = None if p.grad is None else p.grad.float() * min(1.0, 0.05 / (norm + 1e-6))
            expected.step()
        for p, copied in zip(own, copies, strict=True):
            torch.testing.assert_close(inner.master(p), expected.master(copied), rtol=1e-5, atol=1e-7)


class Holder(torch.optim.Optimizer):
    """Steps the optimizer that it holds."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


class ByHand(torch.optim.Optimizer):
    """Updates matrices by itself, and has an optimizer for the rest, as one file of Muon does."""

    def __init__(self, params: Any, kind: Any) -> None:
        super().__init__(params, {})
        self.rest = kind([p for p in self.param_groups[0]["params"] if p.ndim == 1])

    def step(self, closure: Any = None) -> None:
        self.rest.step()


class Trainer:
    """Has parameter groups of its own kinds, and steps an optimizer."""

    def __init__(self, param_groups: Any) -> None:
        self.param_groups = param_groups

    def step(self, optimizer: Any) -> None:
        optimizer.step()


class NotReady(Trainer):
    def __init__(self) -> None:
        pass

    @property
    def param_groups(self) -> Any:
        raise RuntimeError("not ready")


@isolated
def test_what_a_step_cannot_tell_has_a_way_out():
    def body(rank: int) -> None:
        net = DistributedDataParallel(Block())
        net(randn(4, 6, seed=rank)).square().mean().backward()
        kind = functools.partial(FusedSGD, lr=0.5, max_grad_norm=1.0)
        refused(ByHand(net.parameters(), kind).step, list(net.parameters()), r"pass norm_group=torch.*new_subgroups\(")
        alone = functools.partial(kind, norm_group=dist.new_subgroups(group_size=1)[0])
        by_hand = ByHand(net.parameters(), alone)
        vectors = [p for p in net.parameters() if p.ndim == 1]
        for step in (by_hand.step, lambda: started(CPU, torch.amp.GradScaler).step(by_hand.rest)):
            grads = [p.grad.clone() for p in vectors]
            step()
            assert by_hand.rest.grad_norm > 0
            for p, g in zip(vectors, grads, strict=True):
                p.grad = g
        copied = copy.deepcopy(by_hand.rest)  # which has all gradients of its parameters, too
        assert copied._is_whole
        kind([{"params": []}]).step()
        for groups in ([{"name": "all"}], ["first"], [{"params": ["weight"]}], [[1]], {"params": [1]}, None):
            Trainer(groups).step(kind(net.parameters()))
        NotReady().step(kind(net.parameters()))
        optimizer = kind([net.module.up.weight])  # parameters that are added are no replacement
        optimizer.param_groups[0]["params"].append(net.module.up.bias)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [net.module.down.bias]})
        optimizer.step()

    ranks(2, body)


@isolated
def test_zero_with_one_parameter():
    """The rank that owns it has all gradients, but must refuse as the other one does, which waits for it."""

    def body(rank: int) -> None:
        p = Parameter(torch.ones(4))
        p.grad = torch.ones(4)
        refused(
            ZeroRedundancyOptimizer([p], FusedSGD, lr=1.0, max_grad_norm=1.0).step,
            [p],
            "a ZeroRedundancyOptimizer since",
        )

    ranks(2, body)


@isolated
def test_a_rank_without_a_part():
    """There are fewer parameters than ranks. A rank with none takes part in the sum, and skips too."""

    def body(rank: int) -> tuple[float, float, bool]:
        p = Parameter(torch.ones(4))
        optimizer = FusedSGD([{"params": [] if rank else [p]}], lr=1.0, max_grad_norm=1.0, norm_group=dist.group.WORLD)
        scaler = started(CPU)
        p.grad = torch.full((4,), 4.0)
        scaler.step(optimizer)
        scaler.update()
        norm = optimizer.grad_norm.item()
        p.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return norm, scaler.get_scale(), bool(optimizer.step_was_skipped)

    assert ranks(2, body) == [(2.0, 2.0, True)] * 2


@isolated
@pytest.mark.parametrize("how", ["ours", "wrapped", "held", "fsdp1"])
def test_parts_agree_on_skips(how):
    """Also where the scaler decides on the host. The name of another rank's parameter is not taken for an own one."""

    def body(rank: int) -> tuple[list[float], int, str, list[bool]]:
        if how == "fsdp1":
            net = fsdp1("shards", True, rank)
            named = list(net.named_parameters())
        else:
            named = [("first", Parameter(torch.ones(4))), ("second", Parameter(torch.ones(4)))]
        optimizer = FusedSGD(named, lr=1e-3, max_grad_norm=1.0, norm_group=dist.group.WORLD)
        if how == "wrapped":
            inner = optimizer.step
            optimizer.step = lambda *args, **kwargs: inner(*args, **kwargs)
        stepped = Holder(optimizer) if how == "held" else optimizer
        scaler, norms, skipped = started(CPU), [], []
        for step in range(3):
            for _, p in named:
                p.grad = torch.full_like(p, 4.0) if p.numel() else None
            if step == 1 and rank == 1:
                [p.grad for _, p in named if p.numel()][-1][0] = torch.inf
            scaler.step(stepped)
            scaler.update()
            skipped.append(bool(optimizer.step_was_skipped))
            if step != 1:
                norms.append(optimizer.grad_norm.item())
        overflow = scaler.last_overflow
        return norms, int(scaler.skipped_steps), overflow and overflow.parameter, skipped

    first, second = ranks(2, body)
    assert first[0] == second[0] and first[1] == second[1] == 1 and first[3] == second[3]
    if how == "ours":
        assert (first[2], second[2]) == ("a parameter of another rank, or one that was removed", "second")


@isolated
def test_experts_are_named_on_their_ranks():
    def body(rank: int) -> str:
        shared, halves = mesh_of(2, 2), [dist.device_mesh.DeviceMesh("cpu", pair) for pair in ([0, 1], [2, 3])]
        params = [given(halves[rank // 2]), given(shared, [Replicate(), Shard(0)])]
        optimizer, scaler = FusedSGD(params, lr=1.0), started(CPU)
        if rank == 3:
            local(params[0].grad)[0] = torch.inf
        scaler.step(optimizer)
        return scaler.last_overflow.parameter

    first, *_, last = names = ranks(4, body)
    assert names == [first, first, last, last] and first.startswith("a parameter of another rank")
    assert last == "param_groups[0]['params'][0]"


@isolated
def test_what_a_norm_group_forbids():
    def body(rank: int) -> None:
        p = Parameter(torch.ones(4))
        with pytest.raises(TypeError, match=r"FusedSGD: norm_group must be a torch.distributed.ProcessGroup .* a str"):
            FusedSGD([p], norm_group="world")
        with pytest.raises(ValueError, match=r"FusedSGD: norm_group must be .* got a group without this rank"):
            FusedSGD([p], norm_group=dist.new_group([1 - rank]))
        shard = given(mesh_of(2))
        optimizer = FusedSGD([shard], norm_group=dist.group.WORLD)
        refused(optimizer.step, [shard], "norm_group must be None with DTensor parameters")
        for scaler in (torch.amp.GradScaler, ShardedGradScaler):
            p.grad = torch.ones_like(p)
            optimizer, its = FusedSGD([p], lr=1.0, norm_group=dist.group.WORLD), started(CPU, scaler)
            refused(
                lambda o=optimizer, s=its: s.step(o), [p], f"must be None under a {scaler.__name__} of torch, whose"
            )
        net = fsdp1("shards", False, rank)
        net(randn(4, 6, seed=0)).sum().backward()
        optimizer = FusedSGD(net.parameters(), lr=1.0, norm_group=net.process_group)
        refused(
            lambda: started(CPU, torch.amp.GradScaler).step(optimizer), list(net.parameters()), "must be None under"
        )
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="with a norm_group cannot be copied or pickled"):
                copied(optimizer)
        assert pickle.dumps(optimizer.state_dict())

    ranks(2, body)


# --------------------------------------------------------------------------------------------------------- checkpoints
def sharded(how: str, dtype: torch.dtype) -> torch.nn.Module:
    """A block over all ranks. Alone, a process has it whole."""
    net, world = Block(hidden=128).to(dtype), dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return net
    if how == "fsdp2":
        return fully_shard(net, mesh=mesh_of(world))
    if how == "hybrid":
        return fully_shard(net, mesh=mesh_of(2, world // 2))
    if how.startswith("fsdp1"):
        return FullyShardedDataParallel(net, use_orig_params=how == "fsdp1, original", device_id=CPU)
    mesh = mesh_of(2, world // 2) if how == "fsdp2 and tensor parallel" else mesh_of(world)
    inner = mesh["tp"] if mesh.ndim == 2 else mesh
    parallelize_module(net, inner, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["dp"]) if mesh.ndim == 2 else net


class Saved(NamedTuple):
    net: torch.nn.Module
    optimizer: Any

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            x = randn(8, 6, seed=step).to(next(self.net.parameters()).dtype)
            self.net(x).float().square().mean().backward()
            self.optimizer.step()

    def masters(self) -> Tensor:
        """The masters of all parameters behind one another."""
        masters = [self.optimizer.master(p) for p in self.net.parameters()]
        if not isinstance(self.net, FullyShardedDataParallel):
            return torch.cat([whole(master).flatten() for master in masters])
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, torch.cat([master.flatten() for master in masters]))
        return torch.cat(parts)[: sum(p.numel() for p in Block(hidden=128).parameters())]


def saved(how: str, family: Any, dtype: torch.dtype, state_dtype: str) -> Saved:
    net = sharded(how, dtype)
    options = {**FULL[family], "lr": 1e-2, "maximize": False, "weight_decay": 0.0, "state_dtype": state_dtype}
    return Saved(net, family(net.parameters(), **options))


SAVED = [
    (FusedSGD, torch.float16, "float32"),
    (FusedRMSprop, torch.bfloat16, "float32"),
    (FusedAdamW, torch.bfloat16, "float32"),
    (FusedAdamW, torch.bfloat16, "int8"),
]
KINDS = ["fsdp2", "hybrid", "tensor parallel", "fsdp2 and tensor parallel", "fsdp1, flat", "fsdp1, original"]


@isolated
@pytest.mark.parametrize("how", KINDS)
def test_checkpoints(how, tmp_path):
    """Two ranks save. Four, two and one load every master and go on. States in int8 are encoded again there."""

    def save(rank: int) -> list[Tensor]:
        masters = []
        for i, run in enumerate(SAVED):
            one = saved(how, *run)
            one.train(range(3))
            dcp.save(one.state(), checkpoint_id=tmp_path / str(i))
            masters.append(one.masters())
            one.train(range(3, 6))
            masters.append(one.masters())
        return masters

    def load(rank: int) -> list[Tensor]:
        masters = []
        for i, run in enumerate(SAVED):
            one = saved(how, *run)
            with torch.no_grad():
                for p in one.net.parameters():
                    p.fill_(7.0)
            state = one.state()
            dcp.load(state, checkpoint_id=tmp_path / str(i), no_dist=not dist.is_initialized())
            set_model_state_dict(one.net, state["model"])
            set_optimizer_state_dict(one.net, one.optimizer, state["optimizer"])
            masters.append(one.masters())
            one.train(range(3, 6))
            masters.append(one.masters())
        return masters

    expected, other = ranks(2, save)
    for k, (x, y) in enumerate(zip(expected, other, strict=True)):
        assert torch.equal(x, y), (SAVED[k // 2], x, y)
    # torch 2.13 cannot load optimizer states of FSDP1 if a rank has no part of some parameter, whatever the optimizer.
    for world in (2, 1) if how.startswith("fsdp1") else (4, 2, 1):
        for masters in ranks(world, load) if world > 1 else [load(0)]:
            for k, (master, want) in enumerate(zip(masters, expected, strict=True)):
                with case(world, SAVED[k // 2]):
                    if k % 2 == 0:
                        assert torch.equal(master, want), (master - want).abs().max()
                    else:
                        torch.testing.assert_close(master, want, rtol=0, atol=2e-2)


@isolated
def test_checkpoints_of_an_optimizer_of_parts():
    """ZeroRedundancyOptimizer on two ranks sends its states to one. Four ranks and one process load them."""

    def zero(net: Any, family: Any, dtype: torch.dtype, state_dtype: str) -> Any:
        kind = functools.partial(family, norm_group=dist.group.WORLD)
        return ZeroRedundancyOptimizer(net.parameters(), kind, lr=1e-2, max_grad_norm=1.0, state_dtype=state_dtype)

    def one(run: Any) -> Saved:
        net = Block(hidden=128).to(run[1])
        return Saved(net, zero(net, *run) if dist.is_initialized() else run[0](net.parameters(), lr=1e-2))

    def masters(saved: Saved) -> Tensor:
        inner = getattr(saved.optimizer, "optim", saved.optimizer)
        own = {id(p) for group in inner.param_groups for p in group["params"]}
        parts = [(inner.master(p) if id(p) in own else torch.zeros(p.shape)).flatten() for p in saved.net.parameters()]
        flat = torch.cat(parts)
        if dist.is_initialized():
            dist.all_reduce(flat)
        return flat

    def save(rank: int) -> list[tuple[Any, ...]]:
        found = []
        for run in SAVED:
            saved = one(run)
            saved.train(range(3))
            saved.optimizer.consolidate_state_dict(to=0)
            states = saved.optimizer.state_dict() if rank == 0 else None
            found.append((saved.net.state_dict(), pickle.dumps(states), masters(saved)))
        return found

    def load(rank: int, files: list[tuple[Any, ...]]) -> None:
        for run, (weights, states, expected) in zip(SAVED, files, strict=True):
            saved = one(run)
            saved.net.load_state_dict(weights)
            saved.optimizer.load_state_dict(pickle.loads(states))
            with case(run):
                assert torch.equal(masters(saved), expected)

    files, _ = ranks(2, save)
    ranks(4, lambda rank: load(rank, files))
    load(0, files)


@isolated
def test_full_precision_of_shards():
    """`master` and `fp32_state_dict` return DTensors where the parameters are DTensors."""

    def body(rank: int) -> None:
        one = saved("fsdp2", FusedAdamW, torch.bfloat16, "float32")
        one.train(range(2))
        states = fp32_state_dict(one.net, one.optimizer)
        for name, p in one.net.named_parameters():
            master = one.optimizer.master(p)
            for x in (master, states[name]):
                assert isinstance(x, DTensor) and x.dtype is torch.float32
                assert x.placements == p.placements and x.device_mesh == p.device_mesh
            assert torch.equal(whole(master), whole(states[name])) and not torch.equal(whole(master), whole(p))
            assert torch.equal(whole(master.bfloat16()), whole(p))

    ranks(2, body)


@isolated
def test_parameters_in_another_order_choose_the_same_root():
    """Two meshes of the same four of five ranks: all ranks add up over the groups of the same one."""

    def body(rank: int) -> list[float]:
        meshes = [dist.device_mesh.DeviceMesh("cpu", mesh) for mesh in ([[0, 1], [2, 3]], [[0, 2], [3, 1]])]
        if rank > 3:
            return []
        params = [given(mesh, [Shard(0), Shard(0)]) for mesh in meshes]
        optimizer = FusedSGD(params[:: 1 if rank in (0, 3) else -1], lr=0.1, max_grad_norm=math.inf)
        optimizer.step()
        return [optimizer.grad_norm.item()]

    *norms, _ = ranks(5, body)
    assert all(math.isclose(norm, math.sqrt(8), rel_tol=1e-6) for (norm,) in norms)


@isolated
@pytest.mark.parametrize("layout", [fsdp2, tensor_parallel, hybrid, slices, experts, with_plain])
def test_what_torchs_clip_takes(layout):
    """The guide says for which layouts it raises an error. Ours takes them all."""

    def body(rank: int) -> None:
        wheres = sorted(layout(rank))
        params = [Parameter(where.placed(where.value())) for where in wheres]
        for where, p in zip(wheres, params, strict=True):
            p.grad = where.placed(where.gradient(0))
        ours = amp_kernels.clip_grad_norm_(params, 1e9)
        if layout in (fsdp2, tensor_parallel, hybrid):
            torch.testing.assert_close(whole(torch.nn.utils.clip_grad_norm_(params, 1e9)), ours)
        else:
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor|must have the same mesh"):
                torch.nn.utils.clip_grad_norm_(params, 1e9)

    ranks(4, body)
