"""Lightning learns handwritten digits: AdamW of torch with fp32 weights, and AdamW of amp_kernels with bf16 weights.

    pip install lightning scikit-learn
    python lightning_classifier.py

All runs clip by the Trainer's `gradient_clip_val`, and validate with an average of the weights (EMA). Each line has the
accuracy on 360 images, the bytes per parameter (weights, gradients and optimizer state), and for amp_kernels the norm
of the last gradient.
"""

import functools
import logging
import warnings

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from amp_kernels.integrations.lightning import FusedEMA, FusedPrecision, OptimizerMonitor
from amp_kernels.optim import FusedAdamW

EPOCHS, BATCH, DECAY = 12, 64, 0.95
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # advice about workers and loggers


class Classifier(LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images).float(), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=2e-3, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def nbytes(model, optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors) + sum(2 * p.nbytes for p in model.parameters())  # 2: its gradient


def train(what, optimizer, callbacks, **precision):
    seed_everything(0, verbose=False)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    training, validation = random_split(data, [len(data) - 360, 360])
    loaders = DataLoader(training, BATCH, shuffle=True), DataLoader(validation, 360)
    model = Classifier(optimizer)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=EPOCHS, devices=1, gradient_clip_val=1.0, callbacks=callbacks, **quiet, **precision)
    trainer.fit(model, *loaders)
    size = nbytes(model, trainer.optimizers[0]) / sum(p.numel() for p in model.parameters())
    norm = trainer.callback_metrics.get("grad_norm")  # from OptimizerMonitor
    norm = "" if norm is None else f"  gradient norm {norm:.3f}"
    print(f"{what:<55} accuracy {trainer.callback_metrics['accuracy']:.3f}  bytes {size:.1f}{norm}")


train("torch AdamW, bf16-mixed", torch.optim.AdamW, [EMAWeightAveraging(decay=DECAY)], precision="bf16-mixed")
for what, options in (("", {}), (", state_dtype int8", {"state_dtype": torch.int8})):
    fused = functools.partial(FusedAdamW, **options)
    plugin, callbacks = FusedPrecision("bf16-true"), [FusedEMA(decay=DECAY), OptimizerMonitor()]
    train(f"amp_kernels FusedAdamW, bf16-true{what}", fused, callbacks, plugins=plugin)
