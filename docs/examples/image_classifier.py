"""A small ResNet of timm learns handwritten digits: AdamW of torch, and AdamW of amp_kernels with bf16 weights.

    pip install timm scikit-learn
    python image_classifier.py

Each line has the accuracy on 360 images, the accuracy of an average of the weights (EMA), and the bytes per parameter:
weights, gradients and optimizer state.
"""

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

from amp_kernels.integrations.timm import ModelEma  # the import registers fused-adamw in timm

EPOCHS, BATCH, TRAINING = 8, 64, 1437
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32, device=device).unsqueeze(1)
images = torch.nn.functional.interpolate(images, size=32)  # [1797, 1, 32, 32]
labels = torch.tensor(digits.target, device=device)


def nbytes(model, optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors) + sum(2 * p.nbytes for p in model.parameters())  # 2: its gradient


def accuracy(model, dtype):
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32):
        scores = model.eval()(images[TRAINING:].to(dtype))
    return (scores.argmax(1) == labels[TRAINING:]).float().mean().item()


def train(name, dtype, **options):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", in_chans=1, channels=(16, 32, 64, 128), stem_width=8, num_classes=10)
    model.to(device, dtype)
    optimizer = create_optimizer_v2(model, name, lr=3e-3, weight_decay=0.05, layer_decay=0.8, **options)
    steps = EPOCHS * (TRAINING // BATCH)
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=20, t_in_epochs=False)
    is_ours = name.startswith("fused")
    ema = ModelEma(model, optimizer, decay=0.9) if is_ours else ModelEmaV3(model, decay=0.9)
    for step in range(1, steps + 1):
        batch = torch.randint(TRAINING, (BATCH,))
        # fp32 weights need autocast. bf16 weights need none.
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32):
            scores = model(images[batch].to(dtype))
        torch.nn.functional.cross_entropy(scores.float(), labels[batch]).backward()
        if not is_ours:  # a fused optimizer clips inside the step
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        scheduler.step_update(step)
    size = nbytes(model, optimizer) / sum(p.numel() for p in model.parameters())
    what = f"{'amp_kernels' if is_ours else 'torch'} {name}, {dtype}".replace("torch.", "")
    what += "".join(f", {key} {value}" for key, value in options.items() if key == "state_dtype")
    averaged = accuracy(ema.module, torch.float32)
    print(f"{what:<52} accuracy {accuracy(model, dtype):.3f}  EMA {averaged:.3f}  bytes {size:.1f}")


train("adamw", torch.float32)
train("fused-adamw", torch.float32, max_grad_norm=1.0)
train("fused-adamw", torch.bfloat16, max_grad_norm=1.0)
train("fused-adamw", torch.bfloat16, max_grad_norm=1.0, state_dtype="int8")
