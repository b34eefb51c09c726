"""A small BERT reads handwritten digits, as 16 numbers each, and is then converted to int8 and saved.

    pip install transformers scikit-learn
    python int8_encoder.py

Each line has the accuracy on 360 images, and the size of the file with the weights.
"""

import pathlib
import tempfile
import warnings

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification

from amp_kernels.optim import FusedAdamW
from amp_kernels.quantization import quantize_

TRAINING, BATCH, STEPS = 1437, 32, 600
digits = load_digits()
pixels = torch.tensor(digits.images).view(-1, 4, 2, 4, 2).mean((2, 4))  # means of 2 x 2 pixels, from 0 to 16
pixels = pixels.long().flatten(1)  # [1797, 16]
labels = torch.tensor(digits.target)
config = BertConfig(
    vocab_size=17,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=16,
    num_labels=10,
    initializer_range=0.05,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def build():
    return BertForSequenceClassification(config).eval()


def predict(model):
    with torch.no_grad():
        return model(pixels[TRAINING:]).logits


def report(name, model, file):
    torch.save(model.state_dict(), file)
    accuracy = (predict(model).argmax(1) == labels[TRAINING:]).float().mean().item()
    print(f"{name:<30} accuracy {accuracy:.3f}  {file.stat().st_size / 1000:.0f} kB")


torch.manual_seed(0)
model = build()
optimizer = FusedAdamW(model.parameters(), lr=4e-3, max_grad_norm=1.0)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=STEPS)
for _ in range(STEPS):
    batch = torch.randint(TRAINING, (BATCH,))
    model(pixels[batch], labels=labels[batch]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()

with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    report("fp32", model, folder / "fp32.pt")
    warnings.simplefilter("ignore")  # torch.ao warns that it is deprecated
    by_torch = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    report("torch.ao, dynamic", by_torch, folder / "torch_ao.pt")
    for mode in ("weight_only", "dynamic"):
        converted = build()
        converted.load_state_dict(model.state_dict())
        quantize_(converted, mode)
        report(f"amp_kernels, {mode}", converted, folder / f"{mode}.pt")
        # To load the file, build the model, convert it in the same mode, and load the state dict.
        loaded = quantize_(build(), mode)
        loaded.load_state_dict(torch.load(folder / f"{mode}.pt", weights_only=True))
        assert torch.equal(predict(loaded), predict(converted))
