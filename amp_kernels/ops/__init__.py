"""The operators of ``torch.ops.amp_kernels``: their schemas, argument checks, and fakes for tracing.

A fake is a function that returns results without memory while a graph is traced (`library.operator`).

`exponents`, `int8`, `matmul`, `unscale` and `update` define operators. The other modules hold what they share.
"""
