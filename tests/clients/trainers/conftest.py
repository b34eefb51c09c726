"""Each test leaves the environment as it found it.

Lightning sets LOCAL_RANK, and accelerate then looks for a launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
