"""transformers: a Trainer that makes the fused optimizers from `TrainingArguments`."""

from __future__ import annotations

import copy
import inspect
import math
import os
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from ..optim import FusedAdamW, FusedRMSprop, FusedSGD, fp32_state_dict, load_fp32_state_dict
from ..optim._base import FusedOptimizer
from ..optim._state import check_state_dtype
from .accelerate import FusedAcceleratedOptimizer, accelerated, fused_scaler

__all__ = ["FusedTrainer"]

_INT8 = {"state_dtype": torch.int8}
# What `TrainingArguments(optim=...)` chooses. transformers takes only the names in its enum.
_OPTIMIZERS: dict[OptimizerNames, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    OptimizerNames.ADAMW_TORCH: (FusedAdamW, {}),
    OptimizerNames.ADAMW_TORCH_FUSED: (FusedAdamW, {}),
    OptimizerNames.ADAMW_TORCH_8BIT: (FusedAdamW, _INT8),
    OptimizerNames.ADAMW_BNB: (FusedAdamW, _INT8),
    OptimizerNames.ADAMW_8BIT: (FusedAdamW, _INT8),
    OptimizerNames.SGD: (FusedSGD, {}),
    OptimizerNames.RMSPROP: (FusedRMSprop, {}),
    OptimizerNames.RMSPROP_BNB: (FusedRMSprop, {}),
    OptimizerNames.RMSPROP_32BIT: (FusedRMSprop, {}),
    OptimizerNames.RMSPROP_8BIT: (FusedRMSprop, _INT8),
}
# Options of the optimizers that `TrainingArguments` has under these names.
_ARGUMENTS = {"lr": "learning_rate", "weight_decay": "weight_decay", "max_grad_norm": "max_grad_norm"}
_ARGUMENTS_OF_ADAM = {"betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}
_WITHOUT_EFFECT = ("params", "foreach", "fused", "differentiable", "capturable")
_LOW = (torch.float16, torch.bfloat16)


class FusedTrainer(Trainer):
    """A `transformers.Trainer` that trains with the optimizers of `amp_kernels.optim`.

    Options come from `TrainingArguments`, as in `Trainer`. Optimizers that are passed as `optimizers` or
    `optimizer_cls_and_kwargs` are used as they are. The guide to trainers has the table of names in `optim`, and says
    when the step clips.

    Attributes:
        saves_fp32: Whether saved models with 16-bit weights have a folder "fp32" with the masters, 4 bytes per weight.

    Examples:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> from amp_kernels.integrations.transformers import FusedTrainer
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = TrainingArguments(folder, optim="sgd", optim_args="momentum=0.9", use_cpu=True)
        ...     trainer = FusedTrainer(BertForSequenceClassification(config), arguments)
        >>> optimizer = trainer.create_optimizer()
        >>> type(optimizer).__name__, optimizer.defaults["momentum"]
        ('FusedSGD', 0.9)
    """

    saves_fp32 = True

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as in `Trainer`, with an `amp_kernels.GradScaler` if it scales losses."""
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = fused_scaler(self.accelerator)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple[type[FusedOptimizer], dict[str, Any]]:
        """Return the class of the optimizer that `TrainingArguments` choose, and its keyword arguments.

        Raises:
            ValueError: `optim` names no fused optimizer. Or `optim_args` has an unknown option, an option that other
                arguments set, or a value of another type.
        """
        if args.optim not in _OPTIMIZERS:
            got = OptimizerNames(args.optim).value
            raise ValueError(
                f"FusedTrainer: optim must be one of {', '.join(_OPTIMIZERS)}, got {got!r}; for other optimizers use "
                "transformers.Trainer"
            )
        family, options = _OPTIMIZERS[args.optim]
        options = {"lr": args.learning_rate, **options}
        if family is FusedAdamW:
            options |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        return family, options | _parse(family, args.optim_args)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, as in `Trainer`, and name its parameters.

        Raises:
            ValueError: As in `get_optimizer_cls_and_kwargs`. Or the optimizer has another `max_grad_norm` than the
                arguments.
        """
        optimizer = super().create_optimizer(model)
        fused = self._fused()
        if fused is not None and fused.max_grad_norm not in (None, self._norm_of_arguments()):
            raise ValueError(
                f"FusedTrainer: max_grad_norm of TrainingArguments must be that of {type(fused).__name__}, which is "
                f"{fused.max_grad_norm}, got {self.args.max_grad_norm}; set one of them to the other, or the "
                "optimizer's to None"
            )
        if isinstance(optimizer, FusedOptimizer):
            _name(optimizer, self.model if model is None else model)
            self.optimizer = accelerated(self.accelerator, optimizer)
        if isinstance(self.optimizer, FusedAcceleratedOptimizer):
            self.optimizer.scaler = self.accelerator.scaler  # which may have been replaced since the last training
        return self.optimizer

    def _norm_of_arguments(self) -> float:
        """Returns the norm to clip to; inf clips nothing, and has the step measure the norm."""
        return self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf

    # The Trainer has no public method for clipping. Its loop calls the next two methods before each step: first
    # `_clip_grad_norm` if `max_grad_norm` is above 0, then `_get_grad_norm`, which measures the norm if it was not
    # clipped. Both would read and write all gradients.
    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return None if self._clips_in_step() else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Sets the norm that the step clips to. Returns NaN, which `log` replaces: the norm is not known yet."""
        optimizer, clips = self._fused(), self._clips_in_step()
        if optimizer is not None:
            # Set in each step, since a checkpoint of the optimizer has the max_grad_norm of the run that saved it.
            optimizer.max_grad_norm = self._norm_of_arguments() if clips else None
        return math.nan if clips else super()._get_grad_norm(model, grad_norm)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs`, as in `Trainer`, with the gradient norm that the step has measured."""
        optimizer = self._fused()
        if "grad_norm" in logs and optimizer is not None and self._clips_in_step():
            norm = optimizer.grad_norm
            logs["grad_norm"] = math.nan if norm is None else norm.item()
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, as in `Trainer`, and the masters of 16-bit weights in the folder "fp32".

        Raises:
            RuntimeError: As in `amp_kernels.optim.fp32_state_dict`.
        """
        super().save_model(output_dir, _internal_call)
        optimizer, model = self._with_masters()
        if self.saves_fp32 and self.args.should_save and optimizer is not None:
            folder = os.path.join(output_dir or self.args.output_dir, "fp32")
            model.save_pretrained(folder, state_dict=fp32_state_dict(model, optimizer))
            config = copy.deepcopy(model.config)
            config.dtype = "float32"  # `from_pretrained` makes a model of this dtype
            config.save_pretrained(folder)

    def _load_best_model(self) -> None:
        """Loads the masters too, if the best checkpoint has them. The Trainer has no public method for this."""
        super()._load_best_model()
        optimizer, model = self._with_masters()
        folder = os.path.join(self.state.best_model_checkpoint, "fp32")
        if optimizer is not None and os.path.isdir(folder):
            exact = type(model).from_pretrained(folder, dtype=torch.float32)
            load_fp32_state_dict(model, optimizer, exact.state_dict())

    def _with_masters(self) -> tuple[FusedOptimizer | None, Any]:
        """Returns the optimizer that keeps masters of the model's 16-bit weights, or None, and the model."""
        optimizer = self._fused()
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if optimizer is None or self._is_sharded(optimizer) or not isinstance(model, PreTrainedModel):
            return None, model
        has_masters = any(p.dtype in _LOW for group in optimizer.param_groups for p in group["params"])
        return optimizer if has_masters else None, model

    def _fused(self) -> FusedOptimizer | None:
        """Returns the fused optimizer that takes the steps, or None if another optimizer or wrapper does."""
        optimizer = self.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        return optimizer if isinstance(optimizer, FusedOptimizer) else None

    def _clips_in_step(self) -> bool:
        """Whether the step of a fused optimizer clips. Otherwise the Trainer does.

        The Trainer clips sharded parameters, since a step needs a `norm_group` for most kinds. A callback before the
        step expects clipped gradients.
        """
        optimizer = self._fused()
        if optimizer is None or self._is_sharded(optimizer):
            return False
        callbacks, default = self.callback_handler.callbacks, TrainerCallback.on_pre_optimizer_step
        return all(getattr(c.on_pre_optimizer_step, "__func__", None) is default for c in callbacks)

    def _is_sharded(self, optimizer: FusedOptimizer) -> bool:
        """Whether this process may hold only a part of the parameters."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled or optimizer._has_dtensors()


def _parse(family: type[FusedOptimizer], text: str | None) -> dict[str, Any]:
    """Returns the options in a text such as "momentum=0.9, state_dtype=int8"."""
    elsewhere = _ARGUMENTS | (_ARGUMENTS_OF_ADAM if family is FusedAdamW else {})
    defaults = {name: p.default for name, p in inspect.signature(family).parameters.items()}
    known = [name for name in defaults if name not in (*elsewhere, *_WITHOUT_EFFECT)]
    options: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in (text or "").split(","))):
        name, sign, value = (part.strip() for part in item.partition("="))
        if not sign or name not in known:
            remedy = f"; set {elsewhere[name]} of TrainingArguments" if name in elsewhere else ""
            raise ValueError(
                f"FusedTrainer: optim_args must be 'name=value, name=value' with names from {', '.join(known)} for "
                f"{family.__name__}, got {item!r}{remedy}"
            )
        options[name] = _value(name, value, defaults[name])
    return options


def _value(name: str, text: str, default: Any) -> bool | float | torch.dtype:
    """Returns the value of an option whose default is a bool, a number or a dtype."""
    if isinstance(default, torch.dtype):
        return check_state_dtype("FusedTrainer", text)
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"FusedTrainer: {name} in optim_args must be true or false, got {text!r}")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"FusedTrainer: {name} in optim_args must be a number, got {text!r}") from None


def _name(optimizer: FusedOptimizer, model: torch.nn.Module) -> None:
    """Gives the optimizer's groups the names of their parameters, as if they had been passed with names."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    # As in torch, all groups have names or none.
    if all(id(p) in names for group in groups for p in group["params"]):
        for group in groups:
            group.setdefault("param_names", [names[id(p)] for p in group["params"]])
