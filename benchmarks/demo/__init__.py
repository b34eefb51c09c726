"""Examples of training: `python -m benchmarks.demo`, and `benchmarks.demo.ddp` on several devices."""
