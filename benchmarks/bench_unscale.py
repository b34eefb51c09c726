"""The passes over gradients: unscale_, grad_norm, clip_grad_norm_, against torch's foreach functions.

Bytes that a gradient element costs: unscale_ reads and writes it (2 x its size), grad_norm reads it (1 x), and
clip_grad_norm_ reads it for the norm, then reads and writes it to scale (3 x). grad_norm checks for NaN and inf in the
same read; the peer that does the same work runs torch's check before torch's norm.

    python benchmarks/bench_unscale.py --help
"""

import sys
from functools import cached_property

import torch
from common import Case, Contender, Job, Report, disagreement, layouts, parse_arguments, run_case, sample

import amp_kernels

CHECK_SCALE = 1 / 1024
MAX_NORM = 1.0
torch_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


class Gradients:
    """The gradients of a case and the right answers for them."""

    def __init__(self, layout, dtype, device):
        generator = torch.Generator(device).manual_seed(0)
        make = lambda shape: torch.randn(shape, generator=generator, device=device).to(dtype)  # noqa: E731
        self.grads = [make(shape) for shape in layout.shapes]
        self.device, self.dtype = device, dtype

    def scalar(self, value):
        return torch.full((), value, device=self.device)

    def clones(self):
        return [g.clone() for g in self.grads]

    @cached_property
    def norm(self):
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self.grads]
        return torch.linalg.vector_norm(torch.stack(norms)).item()

    def scaled_wrongly(self, grads, factor):
        """The sentence about gradients that should be `factor` times ours; "" if they are."""
        before = sample(self.grads)
        return disagreement(sample(grads), (before.float() * factor).to(self.dtype), before.double() * factor)


def unscale(data, function):
    """Job of `function(grads, inv_scale, found_inf)`."""
    grads, inv_scale, found_inf = data.clones(), data.scalar(CHECK_SCALE), data.scalar(0.0)
    run = lambda: function(grads, inv_scale, found_inf)  # noqa: E731

    def check():
        run()
        wrong = data.scaled_wrongly(grads, CHECK_SCALE)
        if wrong or found_inf.item() != 0:
            return wrong or "wrong: found_inf set by finite gradients"
        grads[-1].view(-1)[-1] = torch.inf
        run()
        return "" if found_inf.item() == 1 else "wrong: missed an inf"

    def settle():
        torch._foreach_copy_(grads, data.grads)
        inv_scale.fill_(1.0)

    return Job(run, check, settle)


def norm(data, function, tolerance):
    """Job of `function(grads, inv_scale, found_inf)`, which returns the norm."""
    grads, inv_scale, found_inf = data.clones(), data.scalar(1.0), data.scalar(0.0)
    run = lambda: function(grads, inv_scale, found_inf)  # noqa: E731

    def check():
        result = run()
        allowed = max(tolerance, torch.finfo(result.dtype).eps)  # torch rounds the norm to the gradients' dtype
        error = abs(result.item() / data.norm - 1)
        return "" if error <= allowed else f"wrong: relative error {error:.3g}, allowed {allowed:.3g}"

    return Job(run, check)


def clip(data, function):
    """Job of `function(parameters, max_norm)`. From the second run on the norm is the limit and the factor about 1."""
    params = data.clones()
    for p in params:
        p.grad = p  # clipping looks at nothing but the gradient
    run = lambda: function(params, MAX_NORM)  # noqa: E731

    def check():
        torchs = [g.clone() for g in data.grads] if False else None
        del torchs
        run()
        factor = min(1.0, MAX_NORM / (data.norm + 1e-6))
        return data.scaled_wrongly([p.grad for p in params], factor)

    return Job(run, check)
