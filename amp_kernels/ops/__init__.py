"""The operators of ``torch.ops.amp_kernels``: their schemas, argument checks, and fakes for tracing.

`int8`, `matmul`, `unscale` and `update` define operators. The other modules hold what they share.
"""
