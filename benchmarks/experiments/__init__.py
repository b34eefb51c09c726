"""The published experiments of mixed precision, run again with amp_kernels and with every peer; and one of our own.

    python -m benchmarks.experiments [names] [--quick] [--device cuda] [--fresh] [--out folder]
    python -m benchmarks.experiments.page      # writes benchmarks/RESULTS.md from the committed CSVs

Each file holds one experiment: its runs, its claims and the rule that decides each of them (harness.py).
"""

NAMES = (
    "accuracy",
    "time_memory",
    "recompute",
    "accumulation",
    "quantization",
    "int8_images",
    "multiples_of_8",
    "foreach_fused",
    "state_codes",
    "underflow",
    "finetuning",
    "residual",
)
