"""The operators of ``torch.ops.amp_kernels``: a file for each family, with schemas, shapes while tracing and checks."""
