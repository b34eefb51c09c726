"""transformers' Trainer with tiny models of three families: as torch's default optimizer in the same Trainer.

On a CPU it has no fp16: there the scaler and autocast are switched on as it does it on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training import (
    FP32,
    MIXED,
    Make,
    assert_close,
    assert_same_bits,
    average,
    families,
    low_dtypes,
    masters,
    on_masters,
    ours,
    torchs,
    weights,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from amp_kernels.optim import FusedSGD

STEPS = 8
SCALE = 2.0**21  # one to four of the steps overflow
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
}
models = pytest.mark.parametrize("name", MODELS)


@functools.cache
def data(name: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2 if name == "bert" else row} for row in rows]


def trainer(
    folder: Path, make: Make, name: str = "bert", dtype: torch.dtype = torch.float32, **arguments: Any
) -> Trainer:
    set_seed(0)
    model = MODELS[name]().to(dtype)
    settings = {"save_strategy": "no", "max_steps": STEPS, "per_device_train_batch_size": 4} | arguments
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "log_level": "error"}
    wanted = TrainingArguments(str(folder), use_cpu=True, **quiet, **settings)
    made = Trainer(model, wanted, train_dataset=data(name), optimizers=(make(model.parameters()), None))
    if wanted.fp16:
        made.accelerator.native_amp = True
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return made


def trained(*args: Any, **kwargs: Any) -> Trainer:
    """Two of them are made one after the other: their random numbers, for order and dropout, begin in `trainer`."""
    run = trainer(*args, **kwargs)
    run.train()
    return run


@families
@models
@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 0}, {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}],
    ids=["plain", "clipped"],
)
def test_fp32(tmp_path: Path, family: type, name: str, options: dict[str, Any]) -> None:
    want = weights(trained(tmp_path, torchs(family), name, **options).model)
    assert_close(weights(trained(tmp_path, ours(family), name, **options).model), want, FP32)


@families
@models
def test_clipping_inside_the_step(tmp_path: Path, family: type, name: str) -> None:
    want = weights(trained(tmp_path, torchs(family), name, max_grad_norm=0.1).model)
    make = ours(family, max_grad_norm=0.1)
    assert_close(weights(trained(tmp_path, make, name, max_grad_norm=0).model), want, FP32)


@families
@models
@pytest.mark.parametrize("max_grad_norm", [0, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(tmp_path: Path, family: type, name: str, max_grad_norm: float, precision: str) -> None:
    """Under a scaler a skipped step must not move the learning rate either: the Trainer asks accelerate."""
    options = {precision: True, "max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 2}
    theirs, run = (trained(tmp_path, make, name, **options) for make in (torchs(family), ours(family)))
    if precision == "fp16":
        assert SCALE > theirs.accelerator.scaler.get_scale() == run.accelerator.scaler.get_scale()
    assert run.lr_scheduler.get_last_lr() == theirs.lr_scheduler.get_last_lr()
    assert_close(weights(run.model), weights(theirs.model), MIXED)


@families
@models
@low_dtypes
def test_16_bit_weights(tmp_path: Path, family: type, name: str, dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "gradient_accumulation_steps": 2}
    want = masters(trained(tmp_path, on_masters(family), name, **options).optimizer)
    assert_close(masters(trained(tmp_path, ours(family), name, **options).optimizer), want, MIXED)


RESUMED = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}, "bf16-weights": {"dtype": torch.bfloat16}}


@families
@pytest.mark.parametrize("how", RESUMED)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_resume_is_bit_equal(tmp_path: Path, family: type, name: str, how: str) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS // 2, **RESUMED[how]}
    whole = trained(tmp_path, ours(family), name, **options)
    again = trainer(tmp_path / "again", ours(family), name, **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_same_bits(weights(again.model), weights(whole.model))
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())


class Average(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.model = average(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.model.update_parameters(model)


@models
def test_moving_average(tmp_path: Path, name: str) -> None:
    averages = []
    for make in (torchs(FusedSGD), ours(FusedSGD)):
        run = trainer(tmp_path, make, name)
        run.add_callback(callback := Average())
        run.train()
        averages.append(weights(callback.model))
        assert any(not torch.equal(averages[-1]["module." + key], w) for key, w in weights(run.model).items())
    assert_close(averages[1], averages[0], FP32)


def test_compiled_model(tmp_path: Path) -> None:
    options = {"torch_compile": True, "gradient_accumulation_steps": 2}
    want = weights(trained(tmp_path, torchs(FusedSGD), "llama", **options).model)
    assert_close(weights(trained(tmp_path, ours(FusedSGD), "llama", **options).model), want, FP32)


def test_optimizer_that_the_trainer_makes(tmp_path: Path) -> None:
    """By class and arguments: it makes two groups, of which one has no weight decay."""
    runs = []
    for make in (torchs(FusedSGD), ours(FusedSGD)):
        run = trainer(tmp_path, make)
        run.optimizer, run.optimizer_cls_and_kwargs = None, (make.func, make.keywords)
        run.train()
        runs.append(run)
    assert [type(run.optimizer.optimizer) for run in runs] == [torch.optim.SGD, FusedSGD]
    assert len(runs[1].optimizer.param_groups) == 2
    assert_close(weights(runs[1].model), weights(runs[0].model), FP32)
