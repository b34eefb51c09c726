"""In the style of the fine-tuning scripts of 2019: O2 from the command line, a warm-up schedule that is made before
Amp, gradients that are added up over batches and clipped, and a checkpoint that training goes on from."""

import argparse
import os
import tempfile

import torch
from apex import amp
from torch.optim.lr_scheduler import LambdaLR

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", type=str, default="O1")
parser.add_argument("--loss_scale", type=str, default=None)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--max_grad_norm", default=1.0, type=float)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Embedding(50, 32)
        self.encoder = torch.nn.Linear(7 * 32, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.classifier = torch.nn.Linear(32, 3)

    def forward(self, input_ids, labels=None):
        hidden = self.norm(torch.nn.functional.gelu(self.encoder(self.embeddings(input_ids).flatten(1))))
        logits = self.classifier(hidden)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": loss, "logits": logits}


def build():
    torch.manual_seed(1)
    model = Classifier().to(device)
    no_decay = ["bias", "norm.weight"]
    named = list(model.named_parameters())
    optimizer_grouped_parameters = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=1e-2, eps=1e-8)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    return model, optimizer, scheduler


def batches():
    torch.manual_seed(2)
    for _ in range(100):
        input_ids = torch.randint(50, (16, 7), device=device)
        yield {"input_ids": input_ids, "labels": input_ids[:, -1] % 3}


model, optimizer, scheduler = build()
if args.fp16:
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, loss_scale=args.loss_scale)
model.train()
model.zero_grad()
for step, inputs in enumerate(batches()):
    outputs = model(**inputs)
    loss = outputs["loss"] / args.gradient_accumulation_steps
    if args.fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    if (step + 1) % args.gradient_accumulation_steps == 0:
        if args.fp16:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    print("loss", loss.item() * args.gradient_accumulation_steps)
assert scheduler.get_last_lr() == [1e-2, 1e-2]

if args.fp16:
    path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    print("scale", checkpoint["amp"]["loss_scaler0"].get("scale", 1.0))
