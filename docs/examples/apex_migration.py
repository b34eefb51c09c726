"""A script for NVIDIA Apex's levels O1 and O2, with only its `amp` import changed.

    pip install scikit-learn
    python apex_migration.py

An MLP learns handwritten digits. Each line has the loss on the training images, the accuracy on 360 others, and the
bytes per parameter: weights, gradients and optimizer state. The first line is torch's SGD in fp32. Apex trains in fp16,
which is slow on a CPU.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from amp_kernels import amp  # was: from apex import amp

STEPS, BATCH, TRAINING = 300, 64, 1437
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
labels = torch.tensor(digits.target, device=device)


def evaluate(name, model, optimizer):
    with torch.no_grad():
        scores = model(images).float()
    loss = nn.functional.cross_entropy(scores[:TRAINING], labels[:TRAINING]).item()
    accuracy = (scores.argmax(1) == labels)[TRAINING:].float().mean().item()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors += [tensor for p in model.parameters() for tensor in (p, p.grad)]
    size = sum(tensor.nbytes for tensor in tensors) / sum(p.numel() for p in model.parameters())
    print(f"{name:<16} loss {loss:.4f}  accuracy {accuracy:.3f}  bytes {size:.1f}")


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def train_in_fp32():
    model, optimizer = make()
    for _ in range(STEPS):
        rows = torch.randint(TRAINING, (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    evaluate("torch fp32", model.eval(), optimizer)


def train_with_apex(opt_level):
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic", verbosity=0)
    for _ in range(STEPS):
        rows = torch.randint(TRAINING, (BATCH,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    evaluate(f"amp_kernels {opt_level}", model.eval(), optimizer)


train_in_fp32()
train_with_apex("O1")
train_with_apex("O2")
