"""peft: LoRA adapters trained by our optimizers and scaler, over float and int8 base layers, saved and loaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from training import FP32, MIXED, OnMasters, assert_close, assert_same_bits, low_dtypes, masters, weights
from transformers import LlamaConfig, LlamaForCausalLM

import amp_kernels
from amp_kernels.nn import Int8Linear
from amp_kernels.optim import FusedAdamW
from amp_kernels.quantization import quantize_

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
# Why eps is not torch's default: see OPTIONS in training.py.
ADAMW = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-2}
STEPS = 8
fused = functools.partial(FusedAdamW, **ADAMW)
torchs = functools.partial(torch.optim.AdamW, **ADAMW, foreach=False)
rows = torch.randint(1, 64, (STEPS, 4, 16), generator=torch.Generator().manual_seed(0))


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).to(dtype)


def adapted(dtype: torch.dtype = torch.float32, **how: Any) -> PeftModel:
    model = llama(dtype)
    return get_peft_model(model, LoraConfig(**LORA), **how)


def parameters(model: PeftModel) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(
    model: PeftModel, optimizer: Any, scaler: Any = None, dtype: torch.dtype | None = None, of: Tensor = rows
) -> list[float]:
    """Returns the losses. `dtype`: for autocast."""
    losses = []
    for batch in of:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(input_ids=batch, labels=batch).loss
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_only_adapters_are_trained(model: PeftModel, before: dict[str, Tensor]) -> None:
    after = weights(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name} and len(moved) == 8


def test_fp32() -> None:
    runs = [adapted() for _ in range(2)]
    before = weights(runs[0])
    losses = [train(model, make(parameters(model))) for model, make in zip(runs, (fused, torchs), strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_close(weights(runs[0]), weights(runs[1]), FP32)
    assert_only_adapters_are_trained(runs[0], before)


@low_dtypes
def test_a_frozen_16_bit_model_under_a_scaler(dtype: torch.dtype) -> None:
    """peft keeps adapters in fp32. The first steps overflow, and both scalers skip them."""
    runs, scalers = [adapted(dtype) for _ in range(2)], (amp_kernels.GradScaler, torch.amp.GradScaler)
    before = weights(runs[0])
    assert {p.dtype for p in runs[0].parameters()} == {torch.float32, dtype}
    used = []
    for model, make, kind in zip(runs, (fused, torchs), scalers, strict=True):
        used.append(kind("cpu", init_scale=2.0**127, backoff_factor=2.0**-60))
        train(model, make(parameters(model)), used[-1], dtype)
    assert 0 < int(used[0].skipped_steps) < STEPS and used[0].get_scale() == used[1].get_scale() < 2.0**127
    assert_close(weights(runs[0]), weights(runs[1]), MIXED)
    assert_only_adapters_are_trained(runs[0], before)


@low_dtypes
def test_16_bit_adapters_have_masters(dtype: torch.dtype) -> None:
    runs = [adapted(dtype, autocast_adapter_dtype=False) for _ in range(2)]
    optimizers = fused(parameters(runs[0])), OnMasters(torchs, parameters(runs[1]))
    for model, optimizer in zip(runs, optimizers, strict=True):
        train(model, optimizer)
    assert {p.dtype for p in runs[0].parameters()} == {dtype}
    assert_close(masters(optimizers[0]), masters(optimizers[1]), MIXED)


@pytest.mark.parametrize("how", [{}, {"autocast_adapter_dtype": False}], ids=["fp32-adapters", "bf16-adapters"])
def test_resume_is_bit_equal(tmp_path: Path, how: dict[str, Any]) -> None:
    """Adapters come from `save_pretrained`, and states and masters from the optimizer's state dict."""
    whole = adapted(torch.bfloat16, **how)
    optimizer = fused(parameters(whole))
    train(whole, optimizer, of=rows[:4])
    whole.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(whole, optimizer, of=rows[4:])
    again = PeftModel.from_pretrained(llama(torch.bfloat16), str(tmp_path), is_trainable=True, **how)
    resumed = fused(parameters(again))
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(again, resumed, of=rows[4:])
    assert_same_bits(weights(again), weights(whole))
    assert_same_bits(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
def test_int8_base_layers_under_float_adapters(tmp_path: Path, mode: Any) -> None:
    """`quantize_` comes after peft, with a filter. The losses are within 1 % of the float model's."""
    model, plain = adapted(), adapted()
    quantize_(model, mode=mode, filter_fn=lambda layer, name: name.endswith("base_layer"))
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    codes = [layer.weight_codes.clone() for layer in layers]
    losses = [train(each, fused(parameters(each))) for each in (model, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01) and losses[0][-1] < losses[0][0]
    assert len(layers) == 4 and all(map(torch.equal, codes, [layer.weight_codes for layer in layers]))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(llama(), str(tmp_path))
    assert {name for name in weights(again) if "lora_" in name} == {name for name in weights(model) if "lora_" in name}
    with pytest.raises(RuntimeError, match="the weight of an int8 layer must not be changed"):
        model.merge_and_unload()


def test_an_int8_layer_that_gets_an_adapter_is_refused() -> None:
    model = quantize_(llama())
    codes = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"Int8Linear.* is not supported"):
        get_peft_model(model, LoraConfig(**LORA))
    assert_same_bits(dict(model.state_dict()), codes)
