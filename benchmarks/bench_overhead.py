"""What a call costs besides its kernel: tensors so small that there is next to nothing to compute.

Every row is a call in a loop, its objects in the caches, beside the torch call that does the same. The rows show how
many layers lie between a public function and its kernel. `--threads` says on how many
threads torch may run (default 1: with more, a small call waits for the others to wake).

    python -m benchmarks.bench_overhead --help
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import amp_kernels
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD

from .common import Case, Contender, Job, Layout, Report, parse_arguments, run_case

SGD: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
LR = 1e-3

Built = Iterator[tuple[str, Callable[[], Job]]]  # contenders by name, ours first


def tensors(count: int, size: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(size, generator=generator, device=device) for _ in range(count)]


def job(
    run: Callable[[], Any],
    result: Callable[[Any], Sequence[Tensor]],
    expected: Sequence[Tensor],
    tolerance: float = 1e-6,
) -> Job:
    """Runs `run` once and compares what `result` then returns with `expected`."""

    def check() -> str:
        returned = run()
        found = result(returned)
        pairs = zip(found, expected, strict=True)
        is_close = all(torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance) for a, b in pairs)
        return "" if is_close else "wrong: differs from what torch computes"

    return Job(run, check)


def unscale(count: int, device: torch.device) -> Built:
    grads, one = tensors(count, 64, device), torch.ones((), device=device)

    def build(function: Callable[..., object]) -> Job:
        mine, found_inf = [g.clone() for g in grads], torch.zeros((), device=device)
        return job(partial(function, mine, one, found_inf), lambda _: mine, grads)

    yield "amp_kernels.unscale_", partial(build, lambda g, s, f: amp_kernels.unscale_(g, inv_scale=s, found_inf=f))
    yield (
        "torch._amp_foreach_non_finite_check_and_unscale_",
        partial(build, lambda g, s, f: torch._amp_foreach_non_finite_check_and_unscale_(g, f, s)),
    )


def norm(count: int, device: torch.device) -> Built:
    grads = tensors(count, 64, device)
    expected = [torch.linalg.vector_norm(torch.cat(grads))]
    for name, function in (
        ("amp_kernels.grad_norm", amp_kernels.grad_norm),
        ("torch.nn.utils.get_total_norm", torch.nn.utils.get_total_norm),
    ):
        yield name, partial(job, partial(function, grads), lambda norm: [norm], expected, 1e-5)


def clip(count: int, device: torch.device) -> Built:
    grads = tensors(count, 64, device)
    norm = torch.linalg.vector_norm(torch.cat(grads))
    expected = [g / (norm + 1e-6) for g in grads]

    def build(function: Callable[..., object]) -> Job:
        params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        own = [g.clone() for g in grads]
        for p, g in zip(params, own, strict=True):
            p.grad = g
        return job(partial(function, params, 1.0), lambda _: own, expected, 1e-5)

    yield "amp_kernels.clip_grad_norm_", partial(build, amp_kernels.clip_grad_norm_)
    yield "torch.nn.utils.clip_grad_norm_", partial(build, torch.nn.utils.clip_grad_norm_)


def ema(count: int, device: torch.device) -> Built:
    weights, start = tensors(count, 64, device), [torch.ones(64, device=device) for _ in range(count)]
    optimizer = FusedSGD([torch.nn.Parameter(w) for w in weights], lr=LR)
    optimizer.step()  # otherwise every call looks for the verdict of a scaler
    expected = [0.5 * (a + w) for a, w in zip(start, weights, strict=True)]
    ours, theirs = ([a.clone() for a in start] for _ in range(2))
    yield (
        "amp_kernels.optim.ema_",
        partial(job, partial(amp_kernels.optim.ema_, ours, optimizer, 0.5), lambda _: ours, expected),
    )
    yield (
        "torch._foreach_lerp_",
        partial(job, partial(torch._foreach_lerp_, theirs, weights, 0.5), lambda _: theirs, expected),
    )


def sgd(count: int, device: torch.device) -> Built:
    grads, start = tensors(count, 64, device), tensors(count, 64, device)
    expected = [p - LR * g for p, g in zip(start, grads, strict=True)]

    def build(function: Callable[..., object]) -> Job:
        params, buffers = [p.clone() for p in start], [torch.zeros_like(p) for p in start]
        return job(partial(function, params, grads, buffers), lambda _: params, expected)

    yield (
        "amp_kernels.sgd_",
        partial(build, lambda p, g, b: amp_kernels.sgd_(p, g, b, lr=LR, is_first_step=True, **SGD)),
    )
    yield (
        "torch._fused_sgd_",
        partial(build, lambda p, g, b: torch._fused_sgd_(p, g, b, lr=LR, is_first_step=True, **SGD)),
    )


# By family: ours, torch's fastest, and their options.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SGD": (FusedSGD, partial(torch.optim.SGD, fused=True), {"momentum": 0.9}),
    "RMSprop": (FusedRMSprop, partial(torch.optim.RMSprop, foreach=True), {}),
    "AdamW": (FusedAdamW, partial(torch.optim.AdamW, fused=True), {}),
}


def step(family: str, kind: str, count: int, device: torch.device) -> Built:
    """`kind`: "fp32", "scaler", "clipped", "DTensors", "clipped DTensors", "captured" (the replay of a CUDA graph), or
    "bf16".

    For "bf16", ours has 16-bit weights, and torch's has fp32 weights.

    For "clipped", the fused optimizer clips inside its step. torch's `clip_grad_norm_` is called before the step of
    torch's optimizer.
    """
    ours, torchs, options = FAMILIES[family]
    grads, start = tensors(count, 64, device), tensors(count, 64, device)
    clips = kind.startswith("clipped")
    if kind.endswith("DTensors"):
        mesh = one_rank(device)
        shard: Callable[[Tensor], Tensor] = lambda x: distribute_tensor(x, mesh, [Shard(0)])  # noqa: E731
        grads, start = list(map(shard, grads)), list(map(shard, start))

    def build(make: Callable[..., torch.optim.Optimizer], scaler: Any, dtype: torch.dtype) -> Job:
        params = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(dtype, copy=clips)
        if kind == "captured":
            return job(captured(make, params, options), lambda _: params, expected, tolerance)
        is_ours = make is ours
        optimizer = make(params, lr=LR, **options, **({"max_grad_norm": 1.0} if clips and is_ours else {}))
        if clips and not is_ours:
            return job(partial(clip_and_step, params, optimizer), lambda _: list(map(whole, params)), expected, 1e-5)
        if kind != "scaler":
            return job(optimizer.step, lambda _: [whole(p) for p in params], expected, tolerance)
        own = scaler(device.type, init_scale=1.0)
        own.scale(torch.ones((), device=device))

        def run() -> None:
            own.step(optimizer)
            own.update()

        return job(run, lambda _: params, expected, tolerance)

    is_low = kind == "bf16"
    tolerance = 1e-2 if is_low else 1e-6
    after = [torch.nn.Parameter(whole(p).clone()) for p in start]
    for p, g in zip(after, grads, strict=True):
        p.grad = whole(g).clone()
    after_step = torchs(after, lr=LR, **options)
    clip_and_step(after, after_step) if clips else after_step.step()
    expected = [p.detach() for p in after]
    own_dtype = torch.bfloat16 if is_low else torch.float32
    yield f"amp_kernels {ours.__name__}.step", partial(build, ours, amp_kernels.GradScaler, own_dtype)
    how = "foreach" if family == "RMSprop" else "fused"
    before = "clip_grad_norm_ and " if clips else ""
    yield f"torch {before}{family}({how}=True).step", partial(build, torchs, torch.amp.GradScaler, torch.float32)


def clip_and_step(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


def captured(
    make: Callable[..., torch.optim.Optimizer], params: Sequence[Tensor], options: dict[str, Any]
) -> Callable[[], None]:
    """Captures a step in a CUDA graph, without having changed `params`, and returns the graph's replay."""
    capturable = {} if make is FAMILIES["AdamW"][0] else {"capturable": True}
    optimizer, start = make(params, lr=LR, **options, **capturable), [p.detach().clone() for p in params]
    optimizer.step()  # makes the states, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(list(params), start)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    return graph.replay


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@functools.cache
def one_rank(device: torch.device) -> DeviceMesh:
    """Returns a mesh of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return init_device_mesh(device.type, (1,))


def int8_matmul(size: int, device: torch.device) -> Built:
    a, b = (amp_kernels.quantize_int8(torch.randn(size, size, device=device), dim=-1) for _ in range(2))
    b = b.t()
    expected = [(a.values.double() @ b.values.double()).float() * a.scale * b.scale]
    yield "amp_kernels.int8_matmul", lambda: job(partial(amp_kernels.int8_matmul, a, b), lambda c: [c], expected, 1e-5)

    def library() -> Tensor:
        return torch._int_mm(a.values, b.values).float() * a.scale * b.scale

    yield "torch._int_mm(...).float() * s * t", lambda: job(library, lambda c: [c], expected, 1e-5)


def dequantize(size: int, device: torch.device) -> Built:
    q = amp_kernels.quantize_int8(torch.randn(size, size, device=device), dim=-1)
    expected = [q.values.float() * q.scale]
    yield "amp_kernels.dequantize_int8", lambda: job(q.dequantize, lambda x: [x], expected)
    yield "torch values.float() * scale", lambda: job(lambda: q.values.float() * q.scale, lambda x: [x], expected)


def linear(dtype: torch.dtype, size: int, device: torch.device) -> Built:
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(size, device=device).to(dtype)
    expected = [F.linear(x.double(), weight.double(), bias.double())]
    for name, function in (("amp_kernels.linear", amp_kernels.linear), ("torch F.linear", F.linear)):
        yield name, partial(job, partial(function, x, weight, bias), lambda y: [y], expected, 0.1)


SIZES = (1, 4, 10, 50, 150, 1000)
STEPS: dict[str, dict[str, tuple[int, ...]]] = {
    "SGD": {"fp32": SIZES},
    "RMSprop": {"fp32": SIZES},
    "AdamW": {
        **dict.fromkeys(("fp32", "scaler", "bf16"), SIZES),
        "clipped": (4, 1000, 20000),
        "DTensors": (4, 160, 1000),
        "clipped DTensors": (4, 160),
        "captured": (1000,),
    },
}
CASES = {
    **{f"unscale_ of {n}": (((64,),) * n, torch.float32, partial(unscale, n)) for n in (1, 10, 1000)},
    "grad_norm of 1000": (((64,),) * 1000, torch.float32, partial(norm, 1000)),
    "sgd_ of 1000": (((64,),) * 1000, torch.float32, partial(sgd, 1000)),
    **{
        f"{family} step of {n}{f' ({kind})' if kind != 'fp32' else ''}": (
            ((64,),) * n,
            torch.float32,
            partial(step, family, kind, n),
        )
        for family, kinds in STEPS.items()
        for kind, sizes in kinds.items()
        for n in sizes
    },
    "int8_matmul 64^3": (((64, 64),), torch.int8, partial(int8_matmul, 64)),
    **{f"ema_ of {n}": (((64,),) * n, torch.float32, partial(ema, n)) for n in (1, 10, 1000)},
    **{f"clip_grad_norm_ of {n}": (((64,),) * n, torch.float32, partial(clip, n)) for n in (1, 10, 1000)},
    "dequantize_int8 64^2": (((64, 64),), torch.int8, partial(dequantize, 64)),
    **{
        f"linear 64^3 {str(d).removeprefix('torch.')}": (((64, 64),), d, partial(linear, d, 64))
        for d in (torch.float16, torch.bfloat16, torch.float32)
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--threads", type=int, default=1)
    own, sys.argv[1:] = parser.parse_known_args()
    args = parse_arguments(__doc__)
    report = Report("overhead", args)  # before the threads change, whose number is part of a machine's name
    torch.set_num_threads(own.threads)
    for name, (shapes, dtype, contenders) in CASES.items():
        if "captured" in name and args.device.type != "cuda":
            continue
        layout = Layout(f"{own.threads} thread{'s' * (own.threads > 1)}", shapes, in_a_row=20)
        case = Case("overhead", name, dtype, layout, dtype.itemsize, "a call in a loop")
        found = [Contender(who, "none", 4, build) for who, build in contenders(args.device)]
        run_case(case, found, args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
