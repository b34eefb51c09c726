"""DistributedDataParallel with bf16 weights and fp32 sums of gradients: AdamW of torch, and AdamW of amp_kernels.

    pip install scikit-learn
    torchrun --nproc-per-node 2 ddp.py

An MLP learns handwritten digits. Each step adds up 4 micro-batches in every process. The lines have the loss on the
training images, the accuracy on 360 others, and the bytes per parameter: weights, gradients and optimizer state.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_kernels.integrations.ddp import fp32_accumulation
from amp_kernels.optim import FusedAdamW

STEPS, MICRO_BATCHES, BATCH, TRAINING, LR = 150, 4, 16, 1437, 3e-3
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
labels = torch.tensor(digits.target, device=device)


def backward(model, rows):
    scores = model(images[rows].to(model.module[0].weight.dtype)).float()
    (nn.functional.cross_entropy(scores, labels[rows]) / MICRO_BATCHES).backward()


def torchs_step(model, optimizer, batches):
    for i, rows in enumerate(batches):
        with contextlib.nullcontext() if i == MICRO_BATCHES - 1 else model.no_sync():
            backward(model, rows)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def fused_step(model, optimizer, batches):
    with fp32_accumulation(model):  # averages over the processes when the block ends
        for rows in batches:
            backward(model, rows)
    optimizer.step()  # clips by its max_grad_norm


def train(name, step, dtype, make):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device, dtype)
    model = DistributedDataParallel(network)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(rank)  # each process draws other images
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(model, optimizer, torch.randint(TRAINING, (MICRO_BATCHES, BATCH), generator=generator))
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors += [tensor for p in network.parameters() for tensor in (p, p.grad)]
    size = sum(tensor.nbytes for tensor in tensors) / sum(p.numel() for p in network.parameters())
    with torch.no_grad():
        scores = network(images.to(dtype)).float()
    loss = nn.functional.cross_entropy(scores[:TRAINING], labels[:TRAINING])
    accuracy = (scores.argmax(1) == labels)[TRAINING:].float().mean()
    if rank == 0:
        print(f"{name:<36} loss {loss.item():.4f}  accuracy {accuracy.item():.3f}  bytes {size:.1f}")


train("torch AdamW, fp32", torchs_step, torch.float32, lambda params: torch.optim.AdamW(params, LR))
train("torch AdamW, bf16", torchs_step, torch.bfloat16, lambda params: torch.optim.AdamW(params, LR))
train(
    "amp_kernels FusedAdamW, bf16", fused_step, torch.bfloat16, lambda params: FusedAdamW(params, LR, max_grad_norm=1.0)
)
dist.destroy_process_group()
