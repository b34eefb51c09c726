"""The fused optimizers in Lightning: clipping and loss scaling, averages of the masters, and values for loggers.

The classes are for the package `lightning`. The older package `pytorch_lightning` has other base classes, and its
Trainer refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle

from ..grad_scaler import GradScaler
from ..optim import ema_
from ..optim._base import FusedOptimizer
from ..optim.averages import check_decay

__all__ = ["FusedEMA", "FusedPrecision", "OptimizerMonitor"]

_PRECISIONS = ("16-mixed", "bf16-mixed", "16-true", "bf16-true")
# Under this key Lightning's own plugin saves the state of its scaler, and looks for it.
_KEY_OF_LIGHTNING = MixedPrecision.__qualname__


class FusedPrecision(MixedPrecision):
    """Precision plugin for `Trainer(plugins=...)` whose `gradient_clip_val` works with the fused optimizers.

    Forward passes run as under the Trainer's ``precision`` of the same name. A fused optimizer clips inside its step.
    The guide to trainers says when torch clips, which hooks see unscaled gradients, and what holds in manual
    optimization.

    Args:
        precision: "16-mixed", "bf16-mixed", "16-true" or "bf16-true".
        scaler: For fp16 only. The default is an `amp_kernels.GradScaler` for the device of the module.

    Attributes:
        scaler: The scaler. None for bf16, and for fp16 until the Trainer has placed the module on its device.

    Raises:
        TypeError: `scaler` is not a `torch.amp.GradScaler`. (`amp_kernels.GradScaler` is one.)
        ValueError: `precision` is another one, or a scaler was given for bf16.

    Examples:
        >>> from lightning import Trainer
        >>> from amp_kernels.integrations.lightning import FusedPrecision
        >>> trainer = Trainer(plugins=FusedPrecision("bf16-mixed"), gradient_clip_val=1.0, accelerator="cpu")
        >>> trainer.precision
        'bf16-mixed'
    """

    def __init__(self, precision: str = "bf16-mixed", scaler: torch.amp.GradScaler | None = None) -> None:
        if precision not in _PRECISIONS:
            raise ValueError(
                f"FusedPrecision: precision must be one of {', '.join(_PRECISIONS)}, got {precision!r}; for fp32 leave "
                "the plugin out"
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"FusedPrecision: scaler must be a torch.amp.GradScaler, got a {type(scaler).__name__}")
        if scaler is not None and precision.startswith("bf16"):
            raise ValueError(f"FusedPrecision: scaler must be None with {precision}, since bf16 needs no loss scaling")
        super().__init__("bf16-mixed", "cpu")  # refuses "true"; `connect` sets the device
        self.precision, self.scaler = precision, scaler
        if precision.endswith("-true"):  # all that HalfPrecision overrides
            half = HalfPrecision(precision)
            contexts = "tensor_init_context", "module_init_context", "forward_context"
            for name in ("convert_module", "convert_input", *contexts):
                if getattr(type(self), name) is getattr(FusedPrecision, name):  # unless a subclass overrides it
                    setattr(self, name, getattr(half, name))
        self._clipping: FusedOptimizer | None = None  # has the Trainer's `max_grad_norm` for the step in progress

    def connect(self, model: torch.nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Read the device from the module. Lightning calls this after it has placed the module there."""
        param = next(model.parameters(), None)
        self.device = "cpu" if param is None else param.device.type
        if self.scaler is None and self.precision.startswith("16"):
            self.scaler = GradScaler(self.device)
        return super().connect(model, optimizers, lr_schedulers)

    # -------------------------------------------------------------------------------------------- steps and clipping
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale the loss, under a scaler.

        Raises:
            RuntimeError: Gradients are unscaled, so those of this backward pass must not be added to them.
        """
        self._check_scaled(module)
        return super().pre_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure and step the optimizer, under the scaler if there is one.

        Raises:
            RuntimeError: Gradients of another optimizer are unscaled. Weights have not changed.
        """
        try:
            if self.scaler is None or isinstance(optimizer, torch.optim.LBFGS):  # which Lightning refuses in words
                return super().optimizer_step(optimizer, model, closure, **kwargs)
            result = closure()
            if result is None and model.automatic_optimization:  # `training_step` returned None
                return None
            self._check_scaled(model, stepping=optimizer)
            if _reads_gradients(model):
                self._unscale(optimizer)
            self._after_closure(model, optimizer)  # hooks and clipping; only Precision's private method calls them
            result = self.scaler.step(optimizer, **kwargs)
            self.scaler.update()
            return result
        finally:
            if self._clipping is not None:
                self._clipping.max_grad_norm = None
                self._clipping = None

    def _clip_gradients(
        self,
        model: LightningModule | torch.nn.Module,
        optimizer: Any,
        clip_val: int | float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        """Lets the step clip if only Lightning's own `configure_gradient_clipping` would clip, by the norm.

        Lightning calls this once before each step. Other code may call `clip_gradients`, and expects clipped gradients.
        """
        is_lightnings = model.automatic_optimization and not is_overridden("configure_gradient_clipping", model)
        is_by_norm = gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        is_ours = isinstance(optimizer, FusedOptimizer)
        # torch clips DTensors, since a step refuses a mesh that has a dimension without parameters.
        if not clip_val or clip_val <= 0 or not (is_lightnings and is_by_norm and is_ours) or optimizer._has_dtensors():
            super()._clip_gradients(model, optimizer, clip_val, gradient_clip_algorithm)
        elif optimizer.max_grad_norm is None:
            optimizer.max_grad_norm, self._clipping = clip_val, optimizer
        elif optimizer.max_grad_norm != clip_val:
            raise ValueError(
                f"FusedPrecision: gradient_clip_val must be the max_grad_norm of {type(optimizer).__name__}, which is "
                f"{optimizer.max_grad_norm}, got {clip_val}; leave one of the two out"
            )

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip gradients by torch, after unscaling. `self.clip_gradients` of a module calls this."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if clip_val > 0:
            self._unscale(optimizer)
            # Not MixedPrecision's method, which raises an error for optimizers that read the scale in their step.
            Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def _unscale(self, optimizer: Any) -> None:
        """Unscales the gradients of this step, unless that was done."""
        if self.scaler is not None and not self._is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)

    def _is_unscaled(self, optimizer: Any) -> bool:
        if self.scaler is None or not self.scaler.is_enabled():
            return False
        # A second call of `unscale_` raises an error, and no public method tells whether there was a first one.
        return self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED

    def _check_scaled(self, module: LightningModule, stepping: Any = None) -> None:
        """Raises an error if gradients are unscaled. Those of the optimizer `stepping` may be."""
        for index, optimizer in enumerate(module.trainer.optimizers):
            if optimizer is not stepping and self._is_unscaled(optimizer):
                what = "the step of another optimizer" if stepping is not None else "a backward pass"
                raise RuntimeError(
                    f"FusedPrecision: gradients must be scaled before {what}, got unscaled ones of optimizer {index} "
                    f"({type(optimizer).__name__}), which clip_gradients unscaled; with fp16 call its step right after "
                    "clip_gradients"
                )

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scaler under the key of Lightning's plugin too, so that the checkpoint also loads there."""
        if self.scaler is not None:
            checkpoint[_KEY_OF_LIGHTNING] = self.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scaler from a checkpoint of Lightning's plugin."""
        if type(self).__qualname__ not in checkpoint and _KEY_OF_LIGHTNING in checkpoint:
            self.load_state_dict(checkpoint[_KEY_OF_LIGHTNING])


def _reads_gradients(module: LightningModule) -> bool:
    """Whether the module or a callback overrides a hook between backward pass and step, where gradients may be read."""
    hooked = (module, *module.trainer.callbacks)
    return is_overridden("configure_gradient_clipping", module) or any(
        is_overridden("on_before_optimizer_step", one) for one in hooked
    )


class OptimizerMonitor(Callback):
    """Callback that logs the gradient norm, the loss scale and the number of skipped steps.

    The values go through `log`. They stay on the device until Lightning logs them, so steps in between do not wait.

    - `grad_norm`: The norm before clipping. With several fused optimizers there is a `grad_norm-0`, a `grad_norm-1`
      and so on, in the order of `trainer.optimizers`. Logged if the step clips, or under `amp_kernels.GradScaler`.
      After an overflow it is NaN or inf.
    - `loss_scale`: The scale for the next step. Logged under a scaler.
    - `skipped_steps`: The number of skipped steps since the scaler was made, resumed runs included. Logged under
      `amp_kernels.GradScaler`.

    Examples:
        >>> from lightning import Trainer
        >>> from amp_kernels.integrations.lightning import FusedPrecision, OptimizerMonitor
        >>> plugin, callbacks = FusedPrecision("16-mixed"), [OptimizerMonitor()]
        >>> trainer = Trainer(plugins=plugin, callbacks=callbacks, log_every_n_steps=50, accelerator="cpu")
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Pass the values to `log`."""
        norms = [o.grad_norm for o in trainer.optimizers if isinstance(o, FusedOptimizer)]
        names = ["grad_norm"] if len(norms) == 1 else [f"grad_norm-{i}" for i in range(len(norms))]
        values: dict[str, Tensor | None] = dict(zip(names, norms, strict=True))
        scaler = trainer.scaler
        if scaler is not None and scaler.is_enabled():
            values["loss_scale"] = scaler._get_scale_async()  # the public method, get_scale(), waits for the device
        if isinstance(scaler, GradScaler):
            values["skipped_steps"] = scaler.skipped_steps.float()
        known = {name: value for name, value in values.items() if value is not None}
        pl_module.log_dict(known, on_step=True, on_epoch=False, batch_size=1)


class FusedEMA(Callback):
    """Callback that keeps an exponential moving average of the masters, and evaluates with it.

    Each step of a fused optimizer that was not skipped is followed by `amp_kernels.optim.ema_`. Validation, testing and
    prediction use the averages, rounded to the dtype of the weights. The averages take 4 bytes per weight, and
    evaluation takes one more copy of the weights. Buffers are not averaged.

    A checkpoint holds the averages in fp32 as `checkpoint["ema_state_dict"]`, by the names of the module's parameters.
    `module.load_state_dict(checkpoint["ema_state_dict"], strict=False)` loads them. The guide to trainers says which
    averages a run begins with, and what evaluation of another checkpoint uses.

    Args:
        decay: From 0 to 1. Averages become `decay * average + (1 - decay) * master`.

    Raises:
        TypeError: `decay` is not a number. When training begins: an optimizer is not from `amp_kernels.optim`, or its
            parameters are DTensors.
        ValueError: `decay` is out of range. When training or evaluation begins: averages of a checkpoint do not fit the
            parameters.

    Examples:
        >>> from lightning import Trainer
        >>> from amp_kernels.integrations.lightning import FusedEMA
        >>> trainer = Trainer(callbacks=FusedEMA(decay=0.999), accelerator="cpu")
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_decay("FusedEMA", decay)
        self.decay = decay
        self._averages: dict[Tensor, Tensor] = {}  # by parameter
        self._weights: dict[Tensor, Tensor] = {}  # what the weights were, while the averages are in their place
        self._loaded: dict[str, Tensor] | None = None  # from a checkpoint; by name, until the module is on its device
        self._handles: list[RemovableHandle] = []
        self._handles_of_evaluation: list[RemovableHandle] = []

    # ------------------------------------------------------------------------------------------------------- training
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the averages of an earlier `fit`. Lightning restores a checkpoint after this."""
        self._loaded = None
        if stage == "fit":
            self._averages = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the masters, or with the averages of a checkpoint, and follow the steps of all optimizers."""
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, FusedOptimizer):
                raise TypeError(
                    f"FusedEMA: optimizers must be of amp_kernels.optim, got a {type(optimizer).__name__}; use "
                    "lightning.pytorch.callbacks.EMAWeightAveraging"
                )
            if optimizer._has_dtensors():
                raise TypeError(
                    "FusedEMA: parameters must not be sharded, got a DTensor; call amp_kernels.optim.ema_ in the module"
                )
        self._adopt_loaded(pl_module)
        for optimizer in trainer.optimizers:
            self._averages_of(optimizer)
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _after_step(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        ema_(self._averages_of(optimizer), optimizer, self.decay)

    def _averages_of(self, optimizer: FusedOptimizer) -> list[Tensor]:
        """Returns the averages in the order that `ema_` takes. That of a new parameter begins with the master."""
        averages = []
        for name, _, param in optimizer._named_parameters():
            if param not in self._averages:
                self._averages[param] = optimizer._master(name, param)
            averages.append(self._averages[param])
        return averages

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop following the optimizers."""
        _remove(self._handles)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the weights back if evaluation was interrupted."""
        self._put_back()
        _remove(self._handles)

    # ----------------------------------------------------------------------------------------------------- evaluation
    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the averages in place of the weights."""
        # Not in `setup`, where `ckpt_path` is that of the run before.
        if trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path:
            self._averages = {}  # they belong to other weights
        self._adopt_loaded(pl_module)
        self._weights = {param: param.detach().clone() for param in self._averages}
        self._write(self._averages)
        # A state dict has the masters, which the weights and the optimizer's remainders give together.
        for optimizer in trainer.optimizers if self._weights else ():
            before = optimizer.register_state_dict_pre_hook(lambda _: self._write(self._weights))
            after = optimizer.register_state_dict_post_hook(lambda *_: self._write(self._averages))
            self._handles_of_evaluation += [before, after]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back. Lightning calls this before the callbacks that save checkpoints."""
        self._put_back()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    @torch.no_grad()
    def _write(self, values: dict[Tensor, Tensor]) -> None:
        for param in self._weights:
            param.copy_(values[param])

    def _put_back(self) -> None:
        """Masters come back with the weights: the optimizer's remainders have not changed."""
        _remove(self._handles_of_evaluation)
        self._write(self._weights)
        self._weights = {}

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict. Since this method is here, Lightning refuses two of these callbacks in one Trainer."""
        return {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the averages. During evaluation, save the weights that the averages replace."""
        checkpoint["ema_state_dict"] = {
            name: self._averages[param] for name, param in _named(pl_module).items() if param in self._averages
        }
        for name, param in _named(pl_module).items():
            if param in self._weights and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = self._weights[param]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the averages of a checkpoint until the module is on its device."""
        self._loaded = checkpoint.get("ema_state_dict")

    def _adopt_loaded(self, pl_module: LightningModule) -> None:
        if self._loaded is None:
            return
        params = _named(pl_module)
        for name, average in self._loaded.items():
            if name not in params or params[name].shape != average.shape:
                wanted = f"of shape {tuple(params[name].shape)}" if name in params else "a parameter of the module"
                raise ValueError(
                    f"FusedEMA: ema_state_dict[{name!r}] of the checkpoint must be {wanted}, got shape "
                    f"{tuple(average.shape)}; load the checkpoint into the module that saved it"
                )
        self._averages = {params[name]: a.to(params[name].device, torch.float32) for name, a in self._loaded.items()}
        self._loaded = None


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _named(module: torch.nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))
