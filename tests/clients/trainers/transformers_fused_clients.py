"""FusedTrainer with options from TrainingArguments: as transformers' Trainer with the same options."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from fp16_on_a_cpu import allow_fp16
from training import FP32, MIXED, OnMasters, assert_close, assert_same_bits, masters, weights
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from amp_kernels import GradScaler
from amp_kernels.integrations.transformers import FusedTrainer
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD, ema_, fp32_state_dict

STEPS = 8
SCALE = 2.0**21  # one to four of the steps overflow
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    # States below 4096 elements are never int8.
    "wide": lambda: LlamaForCausalLM(LlamaConfig(**SMALL | {"hidden_size": 64, "intermediate_size": 128})),
}
# With torch's default eps, a gradient that is only rounding noise moves a weight as far as any other.
ADAMW = {"optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1, "adam_epsilon": 1e-3}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1, "optim_args": "momentum=0.9, nesterov=true"},
    "rmsprop": {"optim": "rmsprop", "learning_rate": 0.01, "weight_decay": 0.1, "optim_args": "momentum=0.9, eps=0.1"},
}
optimizers = pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.fixture(autouse=True)
def fp16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_fp16(monkeypatch, init_scale=SCALE)


@functools.cache
def data(name: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2 if name == "bert" else row} for row in rows]


def trainer(
    kind: type[Trainer], folder: Path, name: str = "bert", dtype: torch.dtype = torch.float32, *, given: Any = None,
    arguments_kind: type[TrainingArguments] = TrainingArguments, **arguments: Any,
) -> Trainer:  # fmt: skip
    """`given` makes the optimizer from the parameters. Without it the arguments choose the optimizer."""
    set_seed(0)
    model = MODELS[name]().to(dtype)
    settings: dict[str, Any] = {"save_strategy": "no", "max_steps": STEPS, "per_device_train_batch_size": 4}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "log_level": "error"}
    wanted = arguments_kind(str(folder), use_cpu=True, **quiet | settings | ADAMW | arguments)
    passed = (given(model.parameters()) if given else None, None)
    return kind(model, wanted, train_dataset=data(name), eval_dataset=data(name), optimizers=passed)


def trained(*args: Any, **kwargs: Any) -> Trainer:
    """Two of them are made one after the other: their random numbers, for order and dropout, begin in `trainer`."""
    run = trainer(*args, **kwargs)
    run.train()
    return run


def inside(run: Trainer) -> Any:
    """The optimizer in accelerate's wrapper."""
    assert isinstance(run.optimizer, AcceleratedOptimizer)
    return run.optimizer.optimizer


def logged(run: Trainer, what: str) -> list[float]:
    return [entry[what] for entry in run.state.log_history if what in entry]


@optimizers
@pytest.mark.parametrize(
    ("name", "how"),
    [("bert", {"max_grad_norm": 0}), ("llama", {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2})],
    ids=["plain", "clipped"],
)
def test_fp32(tmp_path: Path, options: dict[str, Any], name: str, how: dict[str, Any]) -> None:
    """The same weights, and the same log: losses, norms before clipping, learning rates."""
    theirs, run = (trained(kind, tmp_path, name, **options | how) for kind in (Trainer, FusedTrainer))
    assert type(inside(run)) in (FusedAdamW, FusedSGD, FusedRMSprop)
    assert_close(weights(run.model), weights(theirs.model), FP32)
    for what, count in (("loss", STEPS), ("grad_norm", STEPS), ("learning_rate", STEPS), ("train_loss", 1)):
        assert logged(run, what) == pytest.approx(logged(theirs, what), rel=1e-4)
        assert len(logged(run, what)) == count
    assert min(logged(run, "grad_norm")) > 0.1, "nothing was clipped"


@optimizers
@pytest.mark.parametrize(
    ("precision", "max_grad_norm"),
    [("bf16", 0.1), ("fp16", 0), ("fp16", 0.1)],
    ids=["bf16-clipped", "fp16-plain", "fp16-clipped"],
)
def test_mixed_precision(tmp_path: Path, options: dict[str, Any], precision: str, max_grad_norm: float) -> None:
    """Under a scaler a skipped step moves neither the learning rate nor the weights."""
    options = options | {precision: True, "max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        run = trained(FusedTrainer, tmp_path, "llama", **options)
    theirs = trained(Trainer, tmp_path, "llama", **options)
    if precision == "fp16":
        assert type(run.accelerator.scaler) is GradScaler
        skips = int(run.accelerator.scaler.skipped_steps)
        assert 0 < skips < STEPS
        assert SCALE > theirs.accelerator.scaler.get_scale() == run.accelerator.scaler.get_scale()
        assert sum(map(math.isfinite, logged(run, "grad_norm"))) == STEPS - skips
        is_finite = [math.isfinite(norm) for norm in logged(theirs, "grad_norm")]
        assert [math.isfinite(norm) for norm in logged(run, "grad_norm")] == is_finite
    assert logged(run, "learning_rate") == logged(theirs, "learning_rate")
    assert run.lr_scheduler.get_last_lr() == theirs.lr_scheduler.get_last_lr()
    assert_close(weights(run.model), weights(theirs.model), MIXED)


def adamw_on_masters(params: Any) -> OnMasters:
    make = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3, foreach=False)
    return OnMasters(make, params, 0.1)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [(torch.bfloat16, {}), (torch.float16, {}), (torch.float16, {"fp16": True})],
    ids=["bf16", "fp16", "fp16-scaled"],
)
def test_16_bit_weights(tmp_path: Path, dtype: torch.dtype, how: dict[str, Any], monkeypatch: Any) -> None:
    """torch's scaler refuses fp16 gradients, so the run with a scaler is compared with one without."""
    options = {"max_grad_norm": 0.1}
    if how:
        with pytest.raises(ValueError, match="unscale FP16 gradients"):
            trained(Trainer, tmp_path, "llama", dtype, **options, **how)
        monkeypatch.undo()
        allow_fp16(monkeypatch, init_scale=2.0**10)  # no step overflows
    monkeypatch.setattr(
        FusedTrainer, "get_decay_parameter_names", lambda _, model: [n for n, _ in model.named_parameters()]
    )
    want = trained(Trainer, tmp_path, "llama", dtype, given=adamw_on_masters, max_grad_norm=0)
    run = trained(FusedTrainer, tmp_path, "llama", dtype, **options, **how)
    assert {p.dtype for p in run.model.parameters()} == {dtype}
    assert not how or int(run.accelerator.scaler.skipped_steps) == 0
    assert_close(masters(run.optimizer), masters(want.optimizer), MIXED)


RESUMED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "bf16-weights": {"dtype": torch.bfloat16},
    "fp16-weights": {"dtype": torch.float16, "fp16": True},
    "int8-states": {"optim": "adamw_8bit"},
}


@pytest.mark.parametrize("how", RESUMED)
def test_resume_is_bit_equal(tmp_path: Path, how: str) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS // 2, **RESUMED[how]}
    whole = trained(FusedTrainer, tmp_path, "wide", **options)
    again = trainer(FusedTrainer, tmp_path / "again", "wide", **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_same_bits(weights(again.model), weights(whole.model))
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())
    assert str(logged(again, "grad_norm")) == str(logged(whole, "grad_norm"))  # some are NaN
    assert any("exp_avg_codes" in state for state in whole.optimizer.state.values()) == (how == "int8-states")
    if scaler := whole.accelerator.scaler:
        assert again.accelerator.scaler.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("kinds", [(Trainer, FusedTrainer), (FusedTrainer, Trainer)], ids=["from-torch", "to-torch"])
def test_checkpoints_of_the_other_trainer(tmp_path: Path, kinds: tuple[type[Trainer], ...]) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS // 2}
    trained(kinds[0], tmp_path, **options)
    again = trainer(kinds[1], tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_close(weights(again.model), weights(trained(Trainer, tmp_path).model), FP32)


def test_the_norm_of_the_arguments_replaces_the_norm_of_a_checkpoint(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS // 2}
    for kind in (Trainer, FusedTrainer):
        trained(kind, tmp_path / kind.__name__, **options, max_grad_norm=0.05)
    ends = []
    for kind in (Trainer, FusedTrainer):
        again = trainer(kind, tmp_path / "again", **options, max_grad_norm=0.2)
        again.train(resume_from_checkpoint=str(tmp_path / kind.__name__ / f"checkpoint-{STEPS // 2}"))
        ends.append(weights(again.model))
    assert_close(ends[1], ends[0], FP32)


def test_clipping_does_not_touch_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's clipping nor the unscaling of the scaler runs: they would read and write all gradients."""
    calls: list[str] = []
    for owner, name in ((torch.nn.utils, "clip_grad_norm_"), (GradScaler, "unscale_"), (GradScaler, "_maybe_opt_step")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    for how in ({}, {"fp16": True}, {"max_grad_norm": 0}):
        trained(FusedTrainer, tmp_path, **how)
    assert calls == []


class Gradients(TrainerCallback):
    """The largest element of each gradient before each step."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.largest += [p.grad.abs().max().item() for p in model.parameters()]


@pytest.mark.parametrize(
    ("how", "of_object"), [({}, False), ({"fp16": True}, False), ({}, True)], ids=["fp32", "fp16", "of-the-object"]
)
def test_callbacks_see_clipped_gradients(tmp_path: Path, how: dict[str, Any], of_object: bool) -> None:
    runs = []
    for kind in (Trainer, FusedTrainer):
        run = trainer(kind, tmp_path, max_grad_norm=0.1, **how)
        callback, plain = Gradients(), TrainerCallback()
        plain.on_pre_optimizer_step = callback.on_pre_optimizer_step  # type: ignore[method-assign]
        run.add_callback(plain if of_object else callback)
        run.train()
        runs.append((callback.largest, logged(run, "grad_norm"), weights(run.model)))
    assert max(filter(math.isfinite, runs[0][0])) < 0.1
    for got, want in zip(runs[1][:2], runs[0][:2], strict=True):
        assert got == pytest.approx(want, rel=0.02, abs=1e-3, nan_ok=True)
    assert_close(runs[1][2], runs[0][2], MIXED)


@pytest.mark.parametrize("how", [{}, {"fp16": True}], ids=["fp32", "fp16"])
def test_the_trainer_clips_shards(tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimizer would raise, also if a checkpoint has a max_grad_norm."""
    monkeypatch.setattr(FusedTrainer, "_is_sharded", lambda *_: True)
    theirs, run = (trained(kind, tmp_path, max_grad_norm=0.1, **how) for kind in (Trainer, FusedTrainer))
    assert inside(run).max_grad_norm is None
    assert logged(run, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=0.02, nan_ok=True)
    assert_close(weights(run.model), weights(theirs.model), MIXED)


def test_the_groups_of_the_trainer_have_names(tmp_path: Path) -> None:
    run, theirs = (trainer(kind, tmp_path, fp16=True) for kind in (FusedTrainer, Trainer))
    groups, wanted = (made.create_optimizer().param_groups for made in (run, theirs))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    names = {id(p): name for made in (run, theirs) for name, p in made.model.named_parameters()}
    for group, other in zip(groups, wanted, strict=True):
        assert (
            group["param_names"] == [names[id(p)] for p in group["params"]] == [names[id(p)] for p in other["params"]]
        )
    run.model.bert.pooler.dense.bias.register_hook(lambda grad: grad * math.inf)
    run.train()
    assert run.accelerator.scaler.last_overflow == (STEPS, "bert.pooler.dense.bias")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_checkpoints_have_the_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    run = trained(FusedTrainer, tmp_path, "llama", dtype, save_strategy="steps", save_steps=STEPS)
    folder = tmp_path / f"checkpoint-{STEPS}"
    loaded = AutoModelForCausalLM.from_pretrained(folder / "fp32")  # in the dtype that the configuration names
    wanted = fp32_state_dict(run.model, inside(run))
    assert_same_bits(dict(loaded.state_dict()), dict(wanted))
    assert any(not torch.equal(wanted[name], p.float()) for name, p in run.model.named_parameters())
    rounded = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_bits(weights(rounded), weights(run.model))
    assert str(run.model.config.dtype).endswith(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("how", ["fp32", "switched-off"])
def test_no_masters_are_saved(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedTrainer, "saves_fp32", how != "switched-off")
    run = trained(FusedTrainer, tmp_path, "llama", torch.float32 if how == "fp32" else torch.bfloat16)
    run.save_model()
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "fp32").exists()


CHOICES: list[tuple[str, str | None, type, dict[str, Any]]] = [
    ("adamw_torch_fused", None, FusedAdamW, {"betas": (0.9, 0.95), "eps": 1e-6, "state_dtype": torch.float32}),
    ("adamw_torch", "amsgrad=True", FusedAdamW, {"amsgrad": True}),
    ("adamw_torch_8bit", None, FusedAdamW, {"state_dtype": torch.int8, "betas": (0.9, 0.95)}),
    ("adamw_bnb_8bit", "state_dtype=bfloat16", FusedAdamW, {"state_dtype": torch.bfloat16}),
    ("sgd", " momentum=0.5,state_dtype=int8 ", FusedSGD, {"momentum": 0.5, "state_dtype": torch.int8}),
    ("rmsprop", "alpha=0.9, eps=1e-3, centered=true", FusedRMSprop, {"alpha": 0.9, "eps": 1e-3, "centered": True}),
    ("rmsprop_bnb_8bit", None, FusedRMSprop, {"state_dtype": torch.int8}),
]


@pytest.mark.parametrize(("optim", "text", "family", "wanted"), CHOICES, ids=lambda value: str(value)[:20])
def test_names_and_options(tmp_path: Path, optim: str, text: str | None, family: type, wanted: dict[str, Any]) -> None:
    options = {"optim": optim, "optim_args": text, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "learning_rate": 0.25}
    optimizer = trainer(FusedTrainer, tmp_path, **options).create_optimizer()
    assert type(optimizer) is family
    assert optimizer.defaults["lr"] == 0.25
    for group in optimizer.param_groups:
        assert {key: group[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("optim", "text", "message"),
    [
        ("adafactor", None, r"optim must be one of adamw_torch, .*, got 'adafactor'; for other optimizers use "),
        ("paged_adamw_8bit", None, r"optim must be one of"),
        ("sgd", "momentun=0.9", r"optim_args must be 'name=value, name=value' with names from momentum, .*'momentun=0"),
        ("sgd", "momentum", r"optim_args must be 'name=value, name=value'"),
        ("sgd", "momentum=much", r"momentum in optim_args must be a number, got 'much'"),
        ("sgd", "nesterov=1", r"nesterov in optim_args must be true or false, got '1'"),
        ("sgd", "momentum=-1", r"momentum"),
        ("sgd", "weight_decay=0.1", r"set weight_decay of TrainingArguments"),
        ("adamw_torch", "eps=0.1", r"set adam_epsilon of TrainingArguments"),
        ("adamw_torch", "state_dtype=int4", r"FusedTrainer: state_dtype must be torch.float32, .*, got 'int4'"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(tmp_path: Path, optim: str, text: str | None, message: str) -> None:
    run = trainer(FusedTrainer, tmp_path, optim=optim, optim_args=text)
    before = weights(run.model)
    with pytest.raises(ValueError, match=message):
        run.train()
    assert_same_bits(weights(run.model), before)


def test_given_optimizers_are_used(tmp_path: Path) -> None:
    make = functools.partial(FusedSGD, lr=0.1, momentum=0.9)
    run = trained(FusedTrainer, tmp_path, given=make, max_grad_norm=0.1, fp16=True)
    theirs = trained(
        Trainer, tmp_path, given=functools.partial(torch.optim.SGD, **make.keywords), max_grad_norm=0.1, fp16=True
    )
    assert type(inside(run)) is FusedSGD
    assert_close(weights(run.model), weights(theirs.model), MIXED)
    other = trained(
        FusedTrainer, tmp_path, given=functools.partial(torch.optim.SGD, **make.keywords), max_grad_norm=0.1
    )
    theirs = trained(Trainer, tmp_path, given=functools.partial(torch.optim.SGD, **make.keywords), max_grad_norm=0.1)
    assert type(inside(other)) is torch.optim.SGD
    assert_same_bits(weights(other.model), weights(theirs.model))
    assert logged(other, "grad_norm") == logged(theirs, "grad_norm")


class Two(torch.optim.Optimizer):
    """An optimizer for matrices and one for the rest, as one."""

    def __init__(self, params: Any, kind: type, **options: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.first, self.second = (
            kind([p for p in params if (p.ndim > 1) is large], lr=0.1, **options) for large in (True, False)
        )

    def step(self, closure: Any = None) -> None:
        self.first.step()
        self.second.step()


def test_the_trainer_clips_for_an_optimizer_of_several(tmp_path: Path) -> None:
    """By the norm of all gradients. A fused optimizer would clip by the norm of its own."""
    theirs, run = (
        trained(kind, tmp_path, given=functools.partial(Two, kind=optimizer), max_grad_norm=0.05)
        for kind, optimizer in ((Trainer, torch.optim.SGD), (FusedTrainer, FusedSGD))
    )
    assert logged(run, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-4)
    assert_close(weights(run.model), weights(theirs.model), FP32)


@pytest.mark.parametrize("norm", [0, 1.0], ids=["none", "another"])
def test_another_max_grad_norm_is_refused(tmp_path: Path, norm: float) -> None:
    run = trainer(FusedTrainer, tmp_path, given=functools.partial(FusedSGD, max_grad_norm=0.01), max_grad_norm=norm)
    before = weights(run.model)
    message = rf"max_grad_norm of TrainingArguments must be that of FusedSGD, which is 0.01, got {norm}; set one"
    with pytest.raises(ValueError, match=message):
        run.train()
    assert_same_bits(weights(run.model), before)


def test_the_default_optimizer_does_not_count_skips(tmp_path: Path) -> None:
    """`Trainer` counts them with its default, "adamw_torch_fused", and not with "adamw_torch"."""
    rates = []
    for kind, optim in ((FusedTrainer, "adamw_torch_fused"), (Trainer, "adamw_torch"), (Trainer, "adamw_torch_fused")):
        rates.append(logged(trained(kind, tmp_path, "llama", fp16=True, optim=optim), "learning_rate"))
    assert rates[0] == rates[1] != rates[2]


def test_a_scaler_may_be_replaced_before_each_training(tmp_path: Path) -> None:
    run = trained(FusedTrainer, tmp_path, fp16=True)
    run.accelerator.scaler = GradScaler("cpu", init_scale=16.0)
    run.train()
    assert run.optimizer.scaler is run.accelerator.scaler and run.accelerator.scaler.get_scale() == 16
    norms = logged(run, "grad_norm")[-STEPS:]
    assert all(0.1 < norm < 10 for norm in norms), norms


def test_the_best_model_has_its_masters(tmp_path: Path) -> None:
    """Not the extra bits of the last step."""
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "greater_is_better": True}  # the first checkpoint has the highest loss
    run = trained(FusedTrainer, tmp_path, "llama", torch.bfloat16, **best, **options)
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2" / "fp32")
    assert_same_bits(dict(fp32_state_dict(run.model, inside(run))), dict(exact.state_dict()))


class FusedSeq2SeqTrainer(FusedTrainer, Seq2SeqTrainer):
    """The class that the documentation of FusedTrainer shows for other trainers."""


def test_with_another_trainer(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"arguments_kind": Seq2SeqTrainingArguments}
    theirs = trained(Seq2SeqTrainer, tmp_path, "llama", **kinds)
    run = trained(FusedSeq2SeqTrainer, tmp_path, "llama", **kinds)
    assert_close(weights(run.model), weights(theirs.model), FP32)


def test_training_goes_on(tmp_path: Path) -> None:
    """A second call of `train` keeps the optimizer, and wraps it once."""
    run, theirs = (trained(kind, tmp_path, "llama", fp16=True) for kind in (FusedTrainer, Trainer))
    for each in (run, theirs):
        each.train()
    assert type(inside(run)) is FusedAdamW
    assert run.lr_scheduler.get_last_lr() == theirs.lr_scheduler.get_last_lr()
    assert_close(weights(run.model), weights(theirs.model), MIXED)


class Average(TrainerCallback):
    """An average of the masters after each step, and what it should be."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        fused = optimizer.optimizer
        self.averages = [fused.master(p) for group in fused.param_groups for p in group["params"]]
        self.wanted = [a.clone() for a in self.averages]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        fused = optimizer.optimizer
        ema_(self.averages, fused, decay=0.5)
        if not optimizer.step_was_skipped:
            params = (p for group in fused.param_groups for p in group["params"])
            torch._foreach_lerp_(self.wanted, [fused.master(p) for p in params], 0.5)


@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"fp16": True}], ids=["bf16-weights", "fp16"])
def test_moving_average_of_masters(tmp_path: Path, how: dict[str, Any]) -> None:
    run = trainer(FusedTrainer, tmp_path, **how)
    run.add_callback(callback := Average())
    run.train()
    assert_close(*({str(i): t for i, t in enumerate(ts)} for ts in (callback.averages, callback.wanted)), FP32)
