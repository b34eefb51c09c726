"""An example of training: `python -m benchmarks.demo`."""
