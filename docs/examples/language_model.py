"""A small Llama learns the bytes of Python's own source: transformers' Trainer, and FusedTrainer with bf16 weights.

    pip install transformers accelerate
    python language_model.py

Each line has the loss per byte of text that was held out, and the bytes per parameter: weights, gradients and optimizer
state.
"""

import os
import pathlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

from amp_kernels.integrations.transformers import FusedTrainer

STEPS, LENGTH = 100, 64


def text(*modules):
    """Returns [n, LENGTH] bytes of modules of the standard library."""
    library = pathlib.Path(os.__file__).parent
    data = b"".join((library / f"{module}.py").read_bytes() for module in modules)
    rows = torch.tensor(list(data[: len(data) // LENGTH * LENGTH])).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


training, held_out = text("argparse", "ast", "inspect", "tarfile", "turtle", "typing"), text("calendar")
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)


def nbytes(model, optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors) + sum(2 * p.nbytes for p in model.parameters())  # 2: its gradient


def train(kind, dtype, **options):
    set_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=5e-3,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            max_grad_norm=1.0,
            use_cpu=not torch.cuda.is_available(),
            bf16=dtype is torch.float32,  # autocast; bf16 weights need none
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            **options,
        )
        trainer = kind(model, arguments, train_dataset=training, eval_dataset=held_out)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    size = nbytes(model, trainer.optimizer) / model.num_parameters()
    what = f"{kind.__name__}, {options['optim']}, {str(dtype).removeprefix('torch.')} weights"
    print(f"{what:<60} loss {loss:.3f}  bytes {size:.1f}")


train(Trainer, torch.float32, optim="adamw_torch")
train(FusedTrainer, torch.bfloat16, optim="adamw_torch")
train(FusedTrainer, torch.bfloat16, optim="adamw_torch_8bit")
