"""Transfer of small tables to the device, by torch's copies and foreach calls.

There is no Triton kernel that takes the values as arguments, because Triton would compile a variant of it for every mix
of argument types.
"""

from __future__ import annotations

import torch


def _send_(host: torch.Tensor, to: torch.Tensor) -> None:
    if to.is_cuda and torch.cuda.is_current_stream_capturing():
        _write_by_value(host, to)
    else:
        to.copy_(host, non_blocking=True)  # pageable memory is read before the call returns, so `host` may be freed


def _write_by_value(host: torch.Tensor, to: torch.Tensor) -> None:
    # A captured copy would read host memory again at every replay. A foreach call passes its scalars as arguments of
    # kernels, and the graph stores these arguments. So `to` becomes 0, and a foreach call adds the values.
    to.zero_()
    torch._foreach_add_(list(to.view(-1).unbind()), host.view(-1).tolist())
