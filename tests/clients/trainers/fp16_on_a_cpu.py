"""Lets accelerate train in fp16 on a CPU. It then has a scaler and autocasts, as on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator


def allow_fp16(monkeypatch: pytest.MonkeyPatch, **default: Any) -> None:
    """`default`: options of the scaler that no kwargs handler sets."""
    init = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            options = default | (self.scaler_handler.to_kwargs() if self.scaler_handler else {})
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **options)

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
