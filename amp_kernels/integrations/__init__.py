"""The fused optimizers in trainers: one module for each library.

Import the module of your trainer, for example `amp_kernels.integrations.lightning`. Nothing else in amp_kernels imports
these modules, so no trainer has to be installed. The exception is `apex`, which needs no library: its functions
are those of `amp_kernels.amp`.
"""
