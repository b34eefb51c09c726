"""A CNN and a U-Net in int8 and in 16 bits: size, score, latency, and distance from fp32 and from exact arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from . import quantization
from .encoder_int8 import FP32, STATIC
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
from .image_tasks import DIGITS, PHOTOS, Data, Task, of_the_input, tasks
from .images_int8 import (
    AUTOCAST_BF16,
    AUTOCAST_FP16,
    BF16,
    EXPORTED,
    FBGEMM,
    FP16,
    ONEDNN,
    OURS,
    Case,
    Contenders,
    contenders,
    distances,
    errors_of_each,
    errors_without_vnni,
    outside,
    share_of_int8,
    size_in_bytes,
    with_normals,
)
from .peers import reasons_below
from .quantization import told, with_error

POINTS, SHARE_OF_GAIN = 0.5, 0.02  # what int8 and 16 bits may lose
THROUGHPUT = 1.5  # times that of fp32, as published for fp16
LEAST_SHARE = 0.99  # of the weights' bytes
MOST_FAR = 0.01  # of the outputs of onnxruntime
LEAST_SEEDS, LEAST_ROUNDS = 3, 5  # fewer decide nothing
HERE, NO_VNNI = "all", "AVX2"
REAL, NORMALS = "images", "random normals"
TESTED = tuple((task, data) for task in (DIGITS, PHOTOS) for data in (REAL, NORMALS))


# ----------------------------------------------------------------------------------------------------------- the runs
@functools.cache
def data_of(task: Task, seed: int) -> Data:
    return task.data(seed)


@functools.cache
def fitted(task: Task, seed: int) -> nn.Module:
    """The fp32 model."""
    data = data_of(task, seed)
    torch.manual_seed(seed)
    model = task.make().to(data.test[0].device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return task.trained(model, data, seed, task.steps, task.lr)


@functools.cache
def models(task: Task, seed: int) -> Contenders:
    return contenders(task, fitted(task, seed), data_of(task, seed), seed)


def quality(task: Task, seed: int) -> list[Row]:
    """Size and score of each contender. What runs an exported file is compared with the exported model, too."""
    x, y = data_of(task, seed).test
    made = models(task, seed)
    with torch.no_grad():
        outputs = {name: model(x) for name, model in made.items() if not isinstance(model, str)}
    scores = {name: task.scores(output, y) for name, output in outputs.items()}
    rows: list[Row] = []
    for name, model in made.items():
        row: Row = {"part": "quality", "task": task.name, "contender": name, "seed": seed}
        if isinstance(model, str):
            rows.append({**row, "note": model})
            continue
        row |= {"images": len(x), "score": scores[name].mean().item(), "base": of_the_input(y)}
        row["difference"], row["error"] = mean_and_error((scores[name] - scores[FP32]).tolist())
        if name != FP32:
            row["distance"] = f"{((outputs[name] - outputs[FP32]).norm() / outputs[FP32].norm()).item():.4g}"
        row["bytes"] = size_in_bytes(model)
        if name in OURS:
            row |= share_of_int8(model)
        if EXPORTED.get(name) in outputs:
            row |= outside(distances(outputs[EXPORTED[name]], outputs[name]).flatten())
        rows.append(row)
    return rows


def latency(task: Task, images: int, rounds: int) -> list[Row]:
    x = data_of(task, 0).test[0][:images]
    made = models(task, 0)
    calls = {name: functools.partial(model, x) for name, model in made.items() if not isinstance(model, str)}
    with torch.inference_mode():
        times = seconds_side_by_side(calls, rounds, x.device)
    rows: list[Row] = []
    for name, model in made.items():
        for beside in (FP32, BF16):
            row: Row = {"part": "latency", "task": task.name, "contender": name, "images": images, "beside": beside}
            row["rounds"] = rounds
            if isinstance(model, str):
                row["note"] = model
            elif beside in times:
                row |= figures("ratio", ratio(times[name], times[beside]))
            rows.append(row)
    return rows


def exactness(chosen: Sequence[Task], instructions: str) -> list[Row]:
    """Of trained networks with images of the test, and of networks of random normals with random normals."""
    cases: list[Case] = []
    for task in chosen:
        data = data_of(task, 0)
        given = {REAL: (fitted(task, 0), data.calibration, data.test[0]), NORMALS: with_normals(task, data)}
        for name, (model, calibration, test) in given.items():
            about: Row = {"part": "exactness", "task": task.name, "data": name, "instructions": instructions}
            cases.append((about, model, calibration, test[:16]))
    return errors_without_vnni(cases) if instructions == NO_VNNI else errors_of_each(cases)


def runs(settings: Settings) -> list[Run]:
    chosen = tasks(settings)
    found: list[Run] = []
    for task in chosen:
        found += [Run(f"{task.name}, seed {seed}", functools.partial(quality, task, seed)) for seed in settings.seeds]
        for images, rounds in ((1, 3 * task.rounds), (task.images, task.rounds)):
            found.append(Run(f"{task.name}, latency, {images}", functools.partial(latency, task, images, rounds)))
    for instructions in (HERE, NO_VNNI) if settings.device.type == "cpu" else (HERE,):
        found.append(Run(f"exactness, {instructions}", functools.partial(exactness, chosen, instructions)))
    return found


# --------------------------------------------------------------------------------------------------------- the claims
def select(rows: Sequence[Row], part: str, **values: object) -> list[Row]:
    return [row for row in rows if row.get("part") == part and all(row.get(k) == v for k, v in values.items())]


def known(rows: Sequence[Row], *columns: str) -> list[Row]:
    """The rows that have a number in each of these columns."""
    return [row for row in rows if not any(math.isnan(number(row, column)) for column in columns)]


def difference(rows: Sequence[Row]) -> tuple[float, float]:
    """Over the seeds and their images: the mean, and the root of the sum of both squared standard errors."""
    mean, of_seeds = mean_and_error(number(row, "difference") for row in rows)
    of_images = math.hypot(*(number(row, "error") for row in rows)) / len(rows)
    return mean, math.hypot(of_seeds, of_images)


def judge_share(rows: Sequence[Row]) -> Verdict:
    mine = known(select(rows, "quality", contender=STATIC), "share")
    if {row["task"] for row in mine} != {DIGITS, PHOTOS}:
        return Verdict(UNDECIDED, "A network is missing.")
    least = {task: min(number(row, "share") for row in mine if row["task"] == task) for task in (DIGITS, PHOTOS)}
    left = " ".join(sorted({str(row["left"]) for row in mine} - {""}))
    because = ", ".join(f"{task} {100 * share:.1f}%" for task, share in least.items())
    because = f"Shares: {because}. " + (f"In floating point: {left}." if left else "No weight stays in floating point.")
    return Verdict(HOLDS if min(least.values()) >= LEAST_SHARE else FALSIFIED, because)


def judge_score(rows: Sequence[Row], task: str, contender: str) -> Verdict:
    mine = known(select(rows, "quality", task=task, contender=contender), "score", "base", "difference", "error")
    if len(mine) < LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(mine)} of {LEAST_SEEDS} seeds are there.")
    mean, error = difference(mine)
    if task == DIGITS:
        allowed, unit = POINTS, "points"
    else:
        gains = (number(row, "score") - number(row, "difference") - number(row, "base") for row in mine)
        allowed, unit = SHARE_OF_GAIN * sum(gains) / len(mine), "dB"
    because = f"The score changes by {mean:+.3f} ± {error:.3f} {unit}; a loss of {allowed:.3f} is allowed."
    if mean - 2 * error >= -allowed:
        return Verdict(HOLDS, because)
    return Verdict(FALSIFIED if mean + 2 * error < -allowed else UNDECIDED, because)


def judge_time(rows: Sequence[Row], task: str, beside: str) -> Verdict:
    mine = known(select(rows, "latency", task=task, contender=STATIC, beside=beside), "ratio", "rounds")
    mine = [row for row in mine if number(row, "rounds") >= LEAST_ROUNDS]
    if len({number(row, "images") for row in mine}) < 2:
        return Verdict(UNDECIDED, f"Times of at least {LEAST_ROUNDS} rounds beside {beside} are missing.")
    because = "; ".join(f"{size(row)} {told(row)}" for row in mine)
    because = f"Time as a multiple of {beside}'s: {because}."
    if all(number(row, "ratio_high") < 1 for row in mine):
        return Verdict(HOLDS, because)
    return Verdict(FALSIFIED if any(number(row, "ratio_low") > 1 for row in mine) else UNDECIDED, because)


def judge_throughput(rows: Sequence[Row], contender: str) -> Verdict:
    """Of the U-Net's batch."""
    mine = known(select(rows, "latency", task=PHOTOS, contender=contender, beside=FP32), "ratio", "rounds")
    mine = [row for row in mine if number(row, "rounds") >= LEAST_ROUNDS and number(row, "images") > 1]
    if not mine:
        return Verdict(UNDECIDED, f"Times of at least {LEAST_ROUNDS} rounds are missing.")
    middle, low, high = spread(mine[0], "ratio")
    because = f"{1 / middle:.2f} times the throughput ({1 / high:.2f} to {1 / low:.2f}) with {size(mine[0])}."
    return decided(1 / high >= THROUGHPUT, 1 / low < THROUGHPUT, because)


def judge_slower(rows: Sequence[Row], task: str, contender: str, beside: str) -> Verdict:
    mine = known(select(rows, "latency", task=task, contender=contender, beside=beside), "ratio", "rounds")
    mine = [row for row in mine if number(row, "rounds") >= LEAST_ROUNDS]
    if len({number(row, "images") for row in mine}) < 2:
        return Verdict(UNDECIDED, f"Times of at least {LEAST_ROUNDS} rounds beside {beside} are missing.")
    because = f"Time as a multiple of {beside}'s: {'; '.join(f'{size(row)} {told(row)}' for row in mine)}."
    slower, faster = (number(row, "ratio_low") > 1 for row in mine), (number(row, "ratio_high") < 1 for row in mine)
    return decided(all(slower), any(faster), because)


def judge_nearer(rows: Sequence[Row], contender: str, than: str) -> Verdict:
    """The U-Net's outputs to those of fp32, seed by seed."""
    found, others = (
        {
            row["seed"]: number(row, "distance")
            for row in known(select(rows, "quality", task=PHOTOS, contender=name), "distance")
        }
        for name in (contender, than)
    )
    pairs = [(value, others[seed]) for seed, value in found.items() if seed in others]
    if len(pairs) < LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(pairs)} of {LEAST_SEEDS} seeds are there.")
    said = ", ".join(f"{100 * a:.2g} % ({100 * b:.2g} %)" for a, b in pairs)
    nearer = [a < b for a, b in pairs]
    return decided(all(nearer), not any(nearer), f"Relative distance by seed, {than} in brackets: {said}.")


def size(row: Row) -> str:
    images = int(number(row, "images"))
    return f"{images} image{'s' * (images > 1)}"


def judge_exact(rows: Sequence[Row], contender: str) -> Verdict:
    mine = known(select(rows, "exactness", contender=contender), "outputs", "off", "largest")
    cases = {(row["task"], row["data"], row["instructions"]) for row in mine}
    if cases != {(*each, instructions) for each in TESTED for instructions in (HERE, NO_VNNI)}:
        return Verdict(UNDECIDED, f"{len(cases)} of {2 * len(TESTED)} cases are there.")
    off, outputs = (sum(int(number(row, column)) for row in mine) for column in ("off", "outputs"))
    largest = max(number(row, "largest") for row in mine)
    because = f"{off:,} of {outputs:,} results are off; the largest distance is {largest:.3f} steps."
    return Verdict(FALSIFIED if off else HOLDS, because)


def judge_saturation(rows: Sequence[Row]) -> Verdict:
    mine = known(select(rows, "exactness", contender=ONEDNN, instructions=NO_VNNI), "outputs", "off", "largest")
    if {(row["task"], row["data"]) for row in mine} != set(TESTED):
        return Verdict(UNDECIDED, f"{len(mine)} of {len(TESTED)} cases are there.")
    off = {task: sum(number(row, "off") for row in mine if row["task"] == task) for task in (DIGITS, PHOTOS)}
    because = "; ".join(f"{row['task']}, {row['data']} {share_off(row)}" for row in mine)
    because = f"Results that are off, and the largest distance in steps: {because}."
    if all(off.values()):
        return Verdict(HOLDS, because)
    return Verdict(UNDECIDED if any(off.values()) else FALSIFIED, because)


def share_off(row: Row) -> str:
    return f"{number(row, 'off') / number(row, 'outputs'):.2%} ({number(row, 'largest'):.1f})"


def judge_runtime(rows: Sequence[Row]) -> Verdict:
    mine = [row for name in EXPORTED for row in select(rows, "quality", contender=name)]
    mine = known(mine, "outputs", "off", "largest")
    if len({(row["task"], row["contender"]) for row in mine}) < 4 or len(mine) < 4 * LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(mine)} of {4 * LEAST_SEEDS} cases are there.")
    worst = max(mine, key=lambda row: number(row, "off") / number(row, "outputs"))
    because = f"Most are off in the {worst['task']}, {worst['contender']}: {share_off(worst)}."
    return Verdict(HOLDS if number(worst, "off") <= MOST_FAR * number(worst, "outputs") else FALSIFIED, because)


RULES = f"""
- **Within**: d is the score minus the score of fp32, as a mean over the seeds. The claim allows a loss of a. d has a
  standard error over the seeds and another one over the images; s is the root of the sum of their squares. Holds if
  d - 2s >= -a. Falsified if d + 2s < -a. Otherwise, and with fewer than {LEAST_SEEDS} seeds, undecided.
- **Less time**: the ratio of the times is taken within a round. Holds if its 80th percentile is below 1 for one image
  and for the batch. Falsified if its 20th percentile is above 1 for one of them. Otherwise, and with fewer
  than {LEAST_ROUNDS} rounds, undecided.
- **Throughput**: images per second, relative to fp32 within a round, for the batch. Holds if its 20th percentile is at
  least {THROUGHPUT:g}. Falsified if its 80th percentile is below {THROUGHPUT:g}. Otherwise, and with fewer than
  {LEAST_ROUNDS} rounds, undecided.
- **Exact**: a result is *off* if it is more than one step of its 8-bit code away from the result in fp64 of the same
  codes, scales and bias. Correct rounding is off by at most half a step. If a layer returns floats, a step is their
  range divided by 255. Both networks are tested, with images and with random normals, and with and without VNNI
  instructions: 8 cases. Holds if no result is off. Otherwise falsified. With a case missing, undecided.

The claims and their rules:
"""
WITHIN, FASTER, EXACT = 'Rule "within".', 'Rule "less time".', 'Rule "exact".'
CLAIMS = (
    Claim(
        f"Static int8 of amp_kernels recognizes digits as well as fp32, within {POINTS} points.",
        WITHIN,
        functools.partial(judge_score, task=DIGITS, contender=STATIC),
    ),
    Claim(
        f"Static int8 of amp_kernels loses at most {SHARE_OF_GAIN:.0%} of the dB that the U-Net gains over the noisy "
        "photos in fp32.",
        WITHIN,
        functools.partial(judge_score, task=PHOTOS, contender=STATIC),
    ),
    Claim(
        "Both networks are int8 throughout in the static mode of amp_kernels.",
        f"Holds if at least {LEAST_SHARE:.0%} of the weights' bytes are int8, in both networks and for every seed. "
        "Otherwise falsified. If a network is missing, undecided.",
        judge_share,
    ),
    *(
        Claim(
            f"Static int8 of amp_kernels takes less time than {beside} in the {task}.",
            FASTER,
            functools.partial(judge_time, task=task, beside=beside),
        )
        for task in (DIGITS, PHOTOS)
        for beside in (FP32, BF16)
    ),
    Claim(
        "The results of static int8 layers of amp_kernels are exact.",
        EXACT,
        functools.partial(judge_exact, contender=STATIC),
    ),
    Claim(
        "The results of static int8 layers of torch.ao are exact with fbgemm's defaults, which use 7 of the 8 bits of "
        "activations.",
        EXACT,
        functools.partial(judge_exact, contender=FBGEMM),
    ),
    Claim(
        "With onednn's defaults, which use all 8 bits, torch.ao saturates on CPUs without VNNI instructions.",
        'Rule "exact" says what is off. Without VNNI, holds if some results are off in each network. Falsified if none '
        "is off in any. Otherwise, and with a case missing, undecided.",
        judge_saturation,
    ),
    Claim(
        "From exported files, static and weight-only, onnxruntime computes the outputs of amp_kernels, to within one "
        "step.",
        "The outputs of the whole network are compared. A step is their range divided by 255. A code that differs by "
        "one in an early layer changes many outputs, so a few may differ by more: 0.1% did in a pilot, with a U-Net "
        f"after 12 steps of training. Holds if at most {MOST_FAR:.0%} of the outputs differ by more than one step, in "
        f"both networks, both modes and {LEAST_SEEDS} seeds. Otherwise falsified. With a case missing, undecided.",
        judge_runtime,
    ),
    *(
        Claim(
            f"U-Net inference {how} has {THROUGHPUT:g} times the throughput of fp32{published}.",
            'Rule "throughput".' + known_before,
            functools.partial(judge_throughput, contender=contender),
        )
        for how, contender, published, known_before in (
            ("under torch's autocast to fp16", AUTOCAST_FP16, " (published for a GPU: +50%)", ""),
            ("under torch's autocast to bf16", AUTOCAST_BF16, "", ""),
            ("with bf16 weights", BF16, "", " An earlier measurement had shown 1.96 times (1.72 to 2.04)."),
        )
    ),
    Claim(
        "Autocast to bf16 takes more time than bf16 weights in the U-Net.",
        "Holds if the 20th percentile of the ratio of the times is above 1 for one image and for the batch. Falsified "
        "if the 80th percentile is below 1 for one of them. Otherwise, and with fewer than "
        f"{LEAST_ROUNDS} rounds, undecided.",
        functools.partial(judge_slower, task=PHOTOS, contender=AUTOCAST_BF16, beside=BF16),
    ),
    *(
        Claim(
            f"The U-Net {how} loses at most {SHARE_OF_GAIN:.0%} of the dB that it gains in fp32.",
            WITHIN + known_before,
            functools.partial(judge_score, task=PHOTOS, contender=contender),
        )
        for how, contender, known_before in (
            ("under autocast to fp16", AUTOCAST_FP16, ""),
            ("under autocast to bf16", AUTOCAST_BF16, ""),
            ("with bf16 weights", BF16, " An earlier measurement had shown a change of 0.00 dB."),
        )
    ),
    Claim(
        "The U-Net's outputs with bf16 weights are nearer to those of fp32 than the outputs of static int8 of "
        "amp_kernels.",
        "The distance is relative to the length of fp32's outputs. Holds if it is smaller in every seed. Falsified if "
        f"it is so in none. Otherwise, and with fewer than {LEAST_SEEDS} seeds, undecided.",
        functools.partial(judge_nearer, contender=BF16, than=STATIC),
    ),
)


# ------------------------------------------------------------------------------------------------- tables and picture
def tables(rows: Sequence[Row]) -> list[Table]:
    return [*(network(rows, task) for task in (DIGITS, PHOTOS)), exact_arithmetic(rows), runtime(rows)]


UNITS = {DIGITS: ("recognized, %", "points"), PHOTOS: ("PSNR, dB", "dB")}


def names_of(rows: Sequence[Row], task: str) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in known(select(rows, "quality", task=task), "score")))


def timed(rows: Sequence[Row], task: str, contender: str) -> list[Row]:
    return known(select(rows, "latency", task=task, contender=contender, beside=FP32), "ratio")


def relative_bytes(rows: Sequence[Row], task: str, contender: str) -> float:
    mine, fp32 = (known(select(rows, "quality", task=task, contender=name), "bytes") for name in (contender, FP32))
    return number(mine[0], "bytes") / number(fp32[0], "bytes") if mine and fp32 else math.nan


def network(rows: Sequence[Row], task: str) -> Table:
    lines = []
    sizes = list(dict.fromkeys(size(row) for row in select(rows, "latency", task=task)))
    for name in names_of(rows, task):
        mine = known(select(rows, "quality", task=task, contender=name), "score", "difference")
        times = {size(row): told(row) for row in timed(rows, task, name)}
        share = number(mine[0], "share")
        lines.append(
            (
                name,
                f"{relative_bytes(rows, task, name):.3f}",
                "" if math.isnan(share) else f"{share:.1%}",
                f"{mean_and_error(number(row, 'score') for row in mine)[0]:.2f}",
                "" if name == FP32 else with_error(*difference(mine), "+"),
                "" if name == FP32 else far_from_fp32(mine),
                *(times.get(each, "") for each in sizes),
            )
        )
    mine = select(rows, "quality", task=task)
    seeds, images = len({row["seed"] for row in mine}), next((row["images"] for row in mine if row["images"]), 0)
    score, unit = UNITS[task]
    return Table(
        f"{task}: file size relative to fp32, share of the weights' bytes that are int8, score over {seeds} seeds with "
        f"{images} images each ± standard error, distance of the outputs from fp32's relative to their length, and "
        "time relative to fp32 (median, 20th to 80th percentile)",
        ("model", "size", "int8", score, f"minus fp32's, {unit}", "distance, %", *sizes),
        tuple(lines),
        reasons_below(mine),
    )


def far_from_fp32(rows: Sequence[Row]) -> str:
    """In percent, the mean over the seeds."""
    return f"{100 * mean_and_error(number(row, 'distance') for row in rows)[0]:.2g}"


def exact_arithmetic(rows: Sequence[Row]) -> Table:
    mine = select(rows, "exactness")
    columns = list(dict.fromkeys((row["data"], row["instructions"]) for row in mine))
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in known(mine, "outputs", "off", "largest"):
        found.setdefault((row["task"], row["contender"]), {})[row["data"], row["instructions"]] = share_off(row)
    return Table(
        "Results of int8 layers that are off, and in brackets the largest distance from exact arithmetic in steps",
        ("network", "model", *(f"{data}{', no VNNI' * (each == NO_VNNI)}" for data, each in columns)),
        tuple((*key, *(cells.get(column, "") for column in columns)) for key, cells in found.items()),
        tuple(dict.fromkeys(f"{row['task']}, {row['contender']}: {row['note']}" for row in mine if row["note"])),
    )


def runtime(rows: Sequence[Row]) -> Table:
    mine = [row for name in EXPORTED for row in known(select(rows, "quality", contender=name), "largest")]
    return Table(
        "Outputs of the whole network in which onnxruntime and amp_kernels differ by more than one step, and in "
        "brackets the largest difference in steps",
        ("network", "seed", "model", "outputs"),
        tuple((row["task"], row["seed"], row["contender"], share_off(row)) for row in mine),
    )


TORCH_16 = dict.fromkeys((BF16, FP16, AUTOCAST_BF16, AUTOCAST_FP16), "0.65")
COLOURS = {**quantization.COLOURS, **TORCH_16, "onnxruntime": "tab:purple"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """For each network, what each way of quantizing gains in bytes and time, and what it costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, panels = plt.subplots(2, 3, figsize=(10, 9), dpi=110, layout="constrained", sharey="row", squeeze=False)
    for task, (bytes_, loss, time) in zip((DIGITS, PHOTOS), panels, strict=True):
        names = names_of(rows, task)
        marks = {}
        for y, name in enumerate(names):
            colour = COLOURS.get(name.rpartition(", ")[2], "tab:red")
            bytes_.barh(y, relative_bytes(rows, task, name), color=colour)
            mine = known(select(rows, "quality", task=task, contender=name), "difference")
            if mine:
                mean, error = difference(mine)
                loss.errorbar(mean, y, xerr=0 if math.isnan(error) else 2 * error, fmt="o", color=colour, capsize=3)
            for row, marker, shift in zip(timed(rows, task, name), "os", (-0.15, 0.15), strict=False):
                middle, low, high = spread(row, "ratio")
                bars = [[middle - low], [high - middle]]
                time.errorbar(middle, y + shift, xerr=bars, fmt=marker, color=colour, capsize=3)
                marks[size(row)] = Line2D([], [], color="0.3", marker=marker, linestyle="")
        bytes_.set_yticks(range(len(names)), [name.replace(", ours", ", amp_kernels") for name in names])
        bytes_.set_title(task, loc="left", fontsize=10)
        bytes_.set_xlabel("file size, fp32 = 1\n(lower is better)")
        loss.set_xlabel(f"{UNITS[task][0]} minus fp32's\n(higher is better; bars: 2 errors)")
        loss.set_xscale("symlog", linthresh=0.1)
        loss.set_xticks([-10, -1, -0.1, 0, 0.1, 1, 10], ["-10", "-1", "", "0", "", "1", "10"])
        time.set_xlabel("time, fp32 = 1 (lower is better;\nbars: 20th to 80th percentile)")
        time.set_xscale("log", base=2)
        time.xaxis.set_major_formatter("{x:g}")
        for axes, x in ((loss, 0), (time, 1)):
            axes.axvline(x, color="0.8", zorder=0)
        if marks:
            time.legend(marks.values(), marks.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    for bytes_ in panels[:, 0]:
        bytes_.invert_yaxis()
    figure.suptitle("A CNN and a U-Net in int8 and 16 bits: bytes, score, time", x=0.01, ha="left", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="int8_images",
    title="Inference in int8 and 16 bits: a CNN and a U-Net",
    about="""\
A CNN of two convolutions and a linear layer recognizes scikit-learn's digits. Each seed trains with one random half,
and the other half is the test. Its score is the percentage of recognized digits.

A U-Net of three levels (32, 64 and 128 channels, 466,000 weights) removes noise from scikit-learn's two photos. The
noise has a standard deviation of 0.1, for pixels from 0 to 1. The network learns with patches of 32 x 32 from the left
four fifths of the photos. The test has 64 patches of 64 x 64 from the right fifth. The score is the peak
signal-to-noise ratio (PSNR) of the photo without the noise that the network found. The network computes every pixel, so
a small error of the arithmetic changes the score. A classification would hide it.

All contenders start from one fp32 model per seed. Batch norms are folded into convolutions, in fp32 and bf16 too, and
photos are in channels_last memory. Static models take their ranges from training images. "QAT" continues the training
with the arithmetic of static int8, for a tenth of the steps. torch.ao has two engines with different defaults: fbgemm's
use 7 bits of activations, onednn's use 8. Transposed convolutions of torch.ao stay in fp32, except in "all by fbgemm".
onednn's defaults refuse them, and fbgemm of torch 2.13 packs other weights than it is given. onnxruntime runs the files
of `amp_kernels.quantization.export_onnx`. It has as many threads as torch, and its threads do not spin while they wait.

In 16 bits, "autocast" is torch's, with fp32 weights. "bf16" and "fp16" are the model after `.bfloat16()` or `.half()`,
and "ours" has `convert_linear_` as well. That changes nothing in the U-Net, which has no linear layer. torch's fp16
convolutions on a CPU take several times as long as fp32 ones.

For the distance from exact arithmetic, each int8 layer is compared to fp64, with the inputs that it has in the network.
This is done for a trained network with images of the test, and for a network of random normal weights with random
normal inputs. Each is run with the instructions that the CPU has, and again in a process in which fbgemm and onednn
may only use AVX2 (`FBGEMM_ENABLE_INSTRUCTIONS`, `ONEDNN_MAX_CPU_ISA`), as on CPUs without VNNI. onnxruntime has no such
variable. Times are for one image and for a batch. All models take turns in one process.

Learning rates, sizes and steps were chosen in trials with fewer steps. The rules were written before the measurement,
but after these trials, which showed the direction of most claims. The rules on 16 bits were written when only bf16
weights had been measured. Before they were committed, a pilot of three rounds with an untrained U-Net showed about 2.4
times the throughput of fp32 under autocast to bf16, and a ninth of it under autocast to fp16. It changed no rule.""",
    columns=(
        "part", "task", "contender", "seed", "data", "instructions", "images", "score", "base", "difference", "error",
        "distance", "bytes", "share", "left", "outputs", "off", "largest", "beside", "rounds", "ratio", "ratio_low",
        "ratio_high",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    rules=RULES,
    published=(
        Table(
            "Accuracy of int8 (Wu et al. 2020, Integer Quantization for Deep Learning Inference, arXiv 2004.09602)",
            ("networks", "accuracy"),
            (("all studied, of vision, speech and language", "within 1% of the floating-point baseline"),),
        ),
        Table(
            "A sum of two products by fbgemm without VNNI (issue 44939 of pytorch/pytorch, 2020)",
            ("products", "exact sum", "largest number of 16 bits"),
            (("211 x 71 + 171 x 107", "33,278", "32,767"),),
        ),
        Table(
            "Throughput of U-Net inference on a GPU, relative to fp32 (source not recorded)",
            ("precision", "throughput"),
            (("fp16", "1.5"),),
        ),
    ),
)  # fmt: skip
