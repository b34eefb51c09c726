"""What the demo trains: text, a small causal Transformer, one run of it, optimizer steps side by side."""

import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_kernels
from amp_kernels.grad_scaler import Overflow
from amp_kernels.optim import FusedRMSprop, FusedSGD

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OURS = {"sgd": FusedSGD, "rmsprop": FusedRMSprop}
TORCH = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
# Slow enough that rounding does not grow. With RMSprop at 1e-3 two fp32 runs, one of them begun with weights
# rounded to bf16, ended 4% apart; here 0.1%.
OPTIONS = {"sgd": {"lr": 0.03, "momentum": 0.9}, "rmsprop": {"lr": 3e-4}}
FASTEST = {"sgd": {"fused": True}, "rmsprop": {"foreach": True}}  # torch's best implementation of each
MAX_GRAD_NORM = 1.0
TEXT_BYTES = 4_000_000
EVALUATION_BATCHES = 10
FIRST_SCALE = 2.0**12  # from torch's default of 2^16 most runs lose their first step
DRILL_SCALE = 2.0**24  # fp16 ends at 65504: the first backward passes must overflow


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    context: int
    batch: int


SIZES = {"small": Size(2, 64, 64, 8), "large": Size(4, 256, 128, 8)}


@dataclass
class Run:
    """What one training run is, then what was measured of it."""

    name: str
    panel: str  # of the figure; the first run of a panel is the one that the others are compared with
    size: Size
    optimizer: str
    precision: str
    ours: bool = True
    drill: bool = False
    steps: int = 0
    validation_loss: float = math.nan
    step_ms: float = math.nan
    optimizer_ms_ours: float = math.nan
    optimizer_ms_torch: float = math.nan
    peak_memory_mb: float = math.nan
    bytes_per_parameter: float = math.nan
    steps_skipped: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    overflows: list[Overflow] = field(default_factory=list)


# Text and model


def read_text() -> Tensor:
    """A few megabytes of the standard library's source, its files in a shuffled but fixed order.

    Shuffled, so that the end, which is held out for validation, is not just the end of the alphabet.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}
    paths = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    paths = [root / p for p in paths if not skipped.intersection(p.parts)]
    random.Random(0).shuffle(paths)
    text = b"".join(path.read_bytes() for path in paths)[:TEXT_BYTES]
    if len(text) < 100_000:
        sys.exit(f"demo: {root} must hold the source of the standard library, got {len(text)} bytes of it.")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dtype is torch.float16 and q.is_cpu:  # where torch's fp16 attention takes six times as long as fp32
        return attention(q.float(), k.float(), v.float()).half()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.token, self.position = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The loss in fp32: each byte from those before it."""
        text = text.long()
        x = self.token(text[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).float().flatten(0, 1), text[:, 1:].flatten())


def batches(text: Tensor, size: Size, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(size.context + 1)
    while True:
        start = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
        yield text[(start + window).to(text.device)]


# One run


class Training:
    """A run under way. `advance` keeps `run` up to date, so that an interrupt leaves what was measured."""

    def __init__(self, run: Run, text: Tensor, seed: int, steps: int):
        torch.manual_seed(seed)
        self.run, self.steps = run, steps
        self.times: list[float] = []
        self.model = Transformer(run.size).to(text.device, DTYPES[run.precision])
        if run.precision != "fp32":
            amp_kernels.nn.convert_linear_(self.model)
        options = OPTIONS[run.optimizer]
        if run.ours:  # with names, so that the scaler can say where an overflow came from
            named = self.model.named_parameters()
            self.optimizer = OURS[run.optimizer](named, **options, max_grad_norm=MAX_GRAD_NORM)
        else:
            parameters = self.model.parameters()
            self.optimizer = TORCH[run.optimizer](parameters, **options, **FASTEST[run.optimizer])
        scale, interval = (DRILL_SCALE, 40) if run.drill else (FIRST_SCALE, 2000)
        fp16 = run.precision == "fp16"
        self.scaler = amp_kernels.GradScaler(text.device.type, scale, growth_interval=interval, enabled=fp16)

        def factor(step: int) -> float:
            """Linear warm-up over a tenth of the steps, then half a cosine down to a tenth."""
            return min((step + 1) / (1 + steps // 10), 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.batches = batches(text, run.size, seed)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(next(self.batches))
        self.scaler.scale(loss).backward()
        if not self.run.ours:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()

    def advance(self, count: int) -> list[Overflow]:
        """Some steps; returns the overflows seen: the drill looks after each step, others after the last."""
        run, device, losses, known = self.run, self.model.head.weight.device, [], len(self.run.overflows)
        if device.type == "cuda":
            others = torch.cuda.memory_allocated(device) - sum(t.nbytes for t in self.held())
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        for _ in range(count):
            if run.drill:
                run.scales.append(self.scaler.get_scale())
            losses.append(self.step())
            if run.drill:
                self.note_overflow()
        run.losses += torch.stack(losses).tolist()  # waits for the device
        self.times.append((time.perf_counter() - began) / count)
        self.note_overflow()
        run.steps += count
        run.steps_skipped = int(self.scaler.skipped_steps)
        run.step_ms = 1e3 * statistics.median(self.times)
        if device.type == "cuda":
            run.peak_memory_mb = (torch.cuda.max_memory_allocated(device) - others) / 1e6
        return run.overflows[known:]

    def held(self) -> list[Tensor]:
        """Weights, gradients, optimizer state and masters."""
        state = self.optimizer.state
        everything = (t for p in self.model.parameters() for t in (p, p.grad, *state.get(p, {}).values()))
        return [t for t in everything if isinstance(t, Tensor)]

    def note_overflow(self) -> None:
        overflow = self.scaler.last_overflow
        if overflow and overflow not in self.run.overflows:
            self.run.overflows.append(overflow)

    def evaluate(self, held_out: Tensor) -> None:
        """The mean loss over the same batches whichever the run, and the bytes."""
        run = self.run
        some = islice(batches(held_out, run.size, 0), EVALUATION_BATCHES)
        with torch.no_grad():
            run.validation_loss = torch.stack([self.model(batch) for batch in some]).mean().item()
        run.validation.append((run.steps, run.validation_loss))
        held_bytes = sum(t.nbytes for t in self.held())
        run.bytes_per_parameter = held_bytes / sum(p.numel() for p in self.model.parameters())
        if not held_out.is_cuda:
            run.peak_memory_mb = (held_bytes + self.activation_bytes(held_out)) / 1e6

    def activation_bytes(self, text: Tensor) -> int:
        """What a forward pass keeps for the backward pass, the parameters not counted."""
        saved = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(next(batches(text, self.run.size, 0)))
        for p in self.model.parameters():
            saved.pop(p.data_ptr(), None)
        del loss  # kept the tensors alive until here, so that no address was used twice
        return sum(saved.values())


# Our optimizer step against torch's


def compare_optimizers(training: Training, repeats: int = 20) -> None:
    """Median time of unscale, clip and update, ours and torch's in turn on equal weights and gradients."""
    rivals = {"optimizer_ms_ours": our_step, "optimizer_ms_torch": torch_step}
    steps = {}
    for name, make in rivals.items():
        parameters = [nn.Parameter(p.detach().clone()) for p in training.model.parameters()]
        for p in parameters:
            p.grad = torch.randn_like(p)
        steps[name] = make(training.run, parameters)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if training.model.head.weight.is_cuda:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    for name, values in times.items():
        setattr(training.run, name, 1e3 * statistics.median(values[3:]))


def our_step(run: Run, parameters: list[nn.Parameter]) -> Callable[[], None]:
    optimizer = OURS[run.optimizer](parameters, **OPTIONS[run.optimizer], max_grad_norm=MAX_GRAD_NORM)
    scaler = ready_scaler(amp_kernels.GradScaler, run, parameters)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def torch_step(run: Run, parameters: list[nn.Parameter]) -> Callable[[], None]:
    """For 16-bit weights what people write by hand: fp32 copies under torch's optimizer, casts both ways."""
    masters = parameters
    if run.precision != "fp32":
        masters = [nn.Parameter(p.detach().float()) for p in parameters]
        for master in masters:
            master.grad = torch.empty_like(master)
    grads, master_grads = ([p.grad for p in of if p.grad is not None] for of in (parameters, masters))
    optimizer = TORCH[run.optimizer](masters, **OPTIONS[run.optimizer], **FASTEST[run.optimizer])
    scaler = ready_scaler(torch.amp.GradScaler, run, parameters)

    @torch.no_grad()
    def step() -> None:
        if masters is not parameters:
            torch._foreach_copy_(master_grads, grads)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, MAX_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()
        if masters is not parameters:
            torch._foreach_copy_((*parameters,), (*masters,))

    return step


def ready_scaler(kind: type[torch.amp.GradScaler], run: Run, parameters: list[nn.Parameter]) -> torch.amp.GradScaler:
    device = parameters[0].device
    scaler = kind(device.type, init_scale=1.0, enabled=run.precision == "fp16")
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when first asked to scale
    return scaler
