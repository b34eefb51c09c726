"""fp16 weights under DistributedDataParallel, one process for each device; on a CPU with gloo.

    torchrun --nproc-per-node 2 -m benchmarks.demo.ddp [--epochs 10]

An MLP learns the handwritten digits of scikit-learn, every rank a part of each batch. The loss is scaled, gradients are
averaged in fp16, and rank 0 finds an overflow in one step, which every rank skips: DDP hands the infinity to all of
them. In the end rank 0 prints the accuracy, the skipped steps and whether masters are the same bits on every rank; it
exits 1 if they are not.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from amp_kernels import GradScaler
from amp_kernels.optim import FusedAdamW

from ..experiments.digits import BATCH, Split, network

OVERFLOW = 5  # the step in which rank 0 has one


def train(model: DistributedDataParallel, optimizer: FusedAdamW, split: Split, epochs: int) -> GradScaler:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world] for t in split.train)
    scaler = GradScaler(x.device.type, init_scale=2.0**10)
    generator = torch.Generator().manual_seed(rank)
    step = 0
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=generator).split(BATCH // world):
            loss = F.cross_entropy(model(x[batch].half()).float(), y[batch])
            if step == OVERFLOW and rank == 0:
                loss = loss * torch.inf
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
    return scaler


def are_equal_everywhere(optimizer: FusedAdamW) -> bool:
    bits = torch.cat([optimizer.master(p).flatten() for group in optimizer.param_groups for p in group["params"]])
    everyones = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, bits)
    return all(torch.equal(bits, other) for other in everyones)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    split, model = Split(0, device), network(0, device).half()
    optimizer = FusedAdamW(model.parameters(), lr=3e-3)
    scaler = train(DistributedDataParallel(model), optimizer, split, arguments.epochs)
    is_same = are_equal_everywhere(optimizer)
    if dist.get_rank() == 0:
        x, y = split.test
        with torch.no_grad():
            accuracy = (model(x.half()).argmax(1) == y).double().mean().item()
        print(
            f"{dist.get_world_size()} ranks on {device.type}: accuracy {100 * accuracy:.1f} %, "
            f"{int(scaler.skipped_steps)} step skipped, masters {'the same' if is_same else 'DIFFERENT'} on every rank"
        )
    dist.destroy_process_group()
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
