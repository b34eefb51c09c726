"""A greedy model soup: the mean of those fine-tuned models that make it better (Wortsman et al. 2022, recipe 1).

    pip install scikit-learn
    python model_soup.py

Eight bf16 classifiers of handwritten digits start from one training and differ in learning rate and batches. Each comes
with fp32 masters. The soup is their mean: an fp32 sum of masters, divided once. The lines have the loss on 360 images
that no training saw.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from amp_kernels.optim import FusedAdamW, fp32_state_dict

TRAINING, BATCH = 1200, 64
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.bfloat16)
labels = torch.tensor(digits.target)


def train(model, steps, lr, wrong):
    optimizer = FusedAdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        rows = torch.randint(TRAINING, (BATCH,))
        targets = torch.where(torch.rand(BATCH) < wrong, torch.randint(10, (BATCH,)), labels[rows])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]).float(), targets).backward()
        optimizer.step()
    return fp32_state_dict(model, optimizer)  # the masters


def loss(state):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict(state)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(images[TRAINING:].float()), labels[TRAINING:]).item()


def mean(states):
    """The mean of state dicts with equal names and shapes. Integers and other entries come from the first one."""
    result = dict(states[0])
    for name, first in states[0].items():
        if torch.is_tensor(first) and (first.is_floating_point() or first.is_complex()):
            wide = torch.promote_types(first.dtype, torch.float32)
            result[name] = (sum(state[name].to(wide) for state in states) / len(states)).to(first.dtype)
    return result


torch.manual_seed(0)
start = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).bfloat16()
train(start, steps=200, lr=1e-2, wrong=0.0)
models = []
for i in range(8):
    torch.manual_seed(i)
    models.append(train(copy.deepcopy(start), steps=100, lr=(2e-3, 4e-3, 1e-1)[i % 3], wrong=0.4))
models.sort(key=loss)  # the best first

soup = models[:1]
for candidate in models[1:]:
    if loss(mean([*soup, candidate])) <= loss(mean(soup)):
        soup.append(candidate)

print(f"best model         loss {loss(models[0]):.4f}")
print(f"mean of all        loss {loss(mean(models)):.4f}")
print(f"greedy soup of {len(soup)}   loss {loss(mean(soup)):.4f}")
