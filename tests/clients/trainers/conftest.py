"""Runs by `make test-clients` alone: no file here is collected unless it is named."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # the models are tiny, and two processes test
