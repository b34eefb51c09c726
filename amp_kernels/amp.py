"""NVIDIA Apex's `apex.amp` interface, for scripts that were written for it. It is `amp_kernels.integrations.apex`.

In such a script, replace `from apex import amp` by `from amp_kernels import amp`.

| level | weights | forward | loss scale |
|---|---|---|---|
| O0 | fp32 | fp32 | 1 |
| O1 | fp32 | under torch.autocast | dynamic |
| O2 | fp16, batch norms fp32 | inputs are cast to fp16 | dynamic |
| O3 | fp16 | inputs are cast to fp16 | 1 |

At every level the floating-point tensors in an output are cast to fp32. Tensors in tuples (also named ones), lists and
dicts are cast too. Those in a dataclass, or in an object with a method `to`, are not: they raise a TypeError if they
have another dtype than they would be cast to. Any other object is passed on.
"""

from .integrations.apex import initialize, load_state_dict, master_params, scale_loss, state_dict

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
