"""explain, audit, and `python -m amp_kernels audit`."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from gpt2 import Conv1D
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import parametrizations

import amp_kernels
from amp_kernels import audit
from amp_kernels.__main__ import main as amp_kernels_command
from amp_kernels.functional.matmul import copies_of, engine_of
from amp_kernels.nn import Linear, convert_linear_
from amp_kernels.padding import padded as padded_copy
from amp_kernels.quantization import left_in_float, quantize_
from amp_kernels.report import table


# ---------------------------------------------------------------------------------------------------------- explain
@pytest.mark.parametrize(
    ("a", "b", "activation", "engine", "padded", "padding_bytes"),
    [
        ((8192, 1024), (1024, 4096), None, "cublas", (), 0),
        ((8191, 1024), (1024, 4096), None, "cublas", (), 0),  # rows are no pitch
        ((8192, 1023), (1023, 4096), None, "cublas", ("a", "b"), 2 * 1024 * (8192 + 4096)),
        ((8192, 1024), (1024, 4095), None, "cublas", ("b",), 2 * 1024 * 4096),
        ((8192, 1023), (1023, 50257), "gelu", "cublas", ("a", "b"), 2 * 1024 * (8192 + 50264)),
        ((16, 65535), (65535, 65535), None, "cublas", (), 0),  # bound by reading b
        ((17, 65535), (65535, 65535), None, "cublas", ("a", "b"), 2 * (17 + 65536) * 65536),
        ((2047, 2047), (2047, 2047), None, "cublas", (), 0),  # a loop would wait for the host
        ((3, 6400, 4095), (4095, 320), None, "cublas", ("a", "b"), 2 * (3 * 6400 + 320) * 4096),
        ((3, 6400, 4095), (3, 4095, 320), None, "cublas", ("a", "b"), 2 * 3 * (6400 + 320) * 4096),
        ((3, 1, 6400, 4095), (5, 4095, 319), None, "cublas", ("a", "b"), 2 * 15 * (6400 + 320) * 4096),
        ((9,), (9, 32), None, "cublas", (), 0),
    ],
)
def test_explain_of_shapes(
    a: Any, b: Any, activation: Any, engine: str, padded: tuple[str, ...], padding_bytes: int
) -> None:
    explanation = audit.explain(a, b, activation, dtype=torch.bfloat16)
    assert (explanation.engine, explanation.padded, explanation.padding_bytes) == (engine, padded, padding_bytes)


@pytest.mark.parametrize("kind", [tuple, list, torch.Size, torch.tensor, np.array, lambda x: tuple(np.array(x))])
def test_explain_of_shapes_from_other_packages(kind: Any) -> None:
    """A tensor is the exception: it is an operand, not a shape."""
    a, b = (8192, 1023), (1023, 4096)
    if kind is torch.tensor:
        with pytest.raises(TypeError, match="two tensors or two shapes, got Tensor and"):
            audit.explain(kind(a), b)
    else:
        assert audit.explain(kind(a), kind(b)) == audit.explain(a, b)


def test_explain_of_symbolic_shapes() -> None:
    x = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False).from_tensor(torch.empty(8192, 1023))
    assert type(x.shape[0]) is torch.SymInt
    assert audit.explain(tuple(x.shape), (1023, 4096)) == audit.explain((8192, 1023), (1023, 4096))


def test_explain_of_tensors() -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(s, dtype=torch.float16, device="cuda") for s in ((8192, 1023), (4095, 1023)))
        view = torch.empty(8192, 1024, dtype=torch.float16, device="cuda").narrow(1, 0, 1023)
    of_linear = audit.explain(x, weight.t())
    assert of_linear.padded == ("a", "b") and of_linear.padding_bytes == 2 * (8192 + 4096) * 1024
    assert audit.explain(view, weight.t()).padded == ("a", "b")  # what is behind its rows may be anything
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (view, weight.t())]
    assert audit.explain(*meta) == audit.explain(view, weight.t())


@pytest.mark.parametrize("shape", [(7, 9), (3, 7, 9), (1, 1), (5, 16)], ids=str)
@pytest.mark.parametrize("by_column", [False, True])
def test_bytes_are_those_of_the_copies(shape: tuple[int, ...], by_column: bool) -> None:
    x = torch.zeros(shape, dtype=torch.float16)
    x = x.mT.contiguous().mT if by_column else x
    with amp_kernels.use_backend("reference"):
        assert audit._copy_bytes(x, x.shape[-2:]) == padded_copy(x, x.shape[-2:]).untyped_storage().nbytes()


def test_explain_of_real_tensors(backend: str, device: torch.device) -> None:
    x, weight = torch.randn(64, 9, device=device).half(), torch.randn(5, 9, device=device).half()
    explanation = audit.explain(x, weight.t())
    assert explanation.engine == engine_of("matmul", x.dtype, device.type)
    sizes = zip("ab", copies_of(explanation.engine, x, weight.t()), strict=True)
    assert explanation.padded == tuple(name for name, size in sizes if size is not None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.filterwarnings("error")
def test_a_gpu_that_is_not_there() -> None:
    explanation = audit.explain((8192, 1023), (1023, 4096))
    assert explanation.engine == "cublas" and explanation.padded == ("a", "b")
    assert audit.explain((64, 1023), (1023, 4096), device="cpu").padded == ()
    with amp_kernels.use_backend("reference"):
        assert audit.explain((64, 1023), (1023, 4096)).engine == "reference"


def test_explanations_are_sentences() -> None:
    one, both, none = (audit.explain((2**19, k), (k, n)) for k, n in ((1024, 63), (1023, 63), (64, 64)))
    assert str(one).startswith("cublas: ") and "; b is first copied" in str(one) and "131,072 bytes" in str(one)
    assert "; a and b are first copied" in str(both)
    assert "188 us with cuBLAS" in str(none) and "225 us with the copies, 1,025 us without" in str(both)
    assert str(none).endswith("; nothing is copied")


def test_what_is_left_to_torch() -> None:
    a, b = torch.empty(64, 9, device="meta"), torch.empty(9, 32, device="meta")
    assert str(audit.explain(a, b)) == "torch: products of float32 are left to torch; nothing is copied"
    with torch.autocast("cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else torch.autocast("cpu"):
        cast = audit.explain(torch.empty(64, 9), torch.empty(9, 32)) if not torch.cuda.is_available() else None
    assert cast is None or cast.engine == "cpu"


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: audit.explain((4, 5), (6, 7)), ValueError, r"b must be a matrix that a can be multiplied with, got"),
        (lambda: audit.explain((), (6, 7)), ValueError, "explain: a and b must have at least 1 dimension, got 0 and 2"),
        (
            lambda: audit.explain(torch.ones(4, 5), (5, 7)),
            TypeError,
            r"two tensors or two shapes, got Tensor and \(5, 7\); for a",
        ),
        (
            lambda: audit.explain(8192, 1024, 4096),
            TypeError,
            r"got 8192 and 1024; .*call explain\(\(8192, 1024\), \(1024",
        ),
        (lambda: audit.explain((4, 5.0), (5, 7)), TypeError, r"two tensors or two shapes, got \(4, 5.0\) and \(5, 7\)"),
        (lambda: audit.explain((4, 5), "57"), TypeError, r"explain: a and b must be .*, got \(4, 5\) and '57'"),
        (lambda: audit.audit((4, 5)), TypeError, r"audit: model must be a torch.nn.Module, got \(4, 5\)"),
        (
            lambda: audit.explain(torch.ones(4, 5), torch.ones(5, 7), device="cuda"),
            TypeError,
            "explain: dtype and device must be None for tensors",
        ),
        (lambda: audit.explain((4, 5), (5, 7), "silu"), ValueError, "explain: activation must be one of None, 'relu'"),
        (
            lambda: audit.explain(torch.ones(4, 5).half(), torch.ones(5, 7).bfloat16()),
            TypeError,
            "b must be torch.float16 as the first operand is, got torch.bfloat16",
        ),
    ],
)
def test_bad_operands_get_a_sentence(call: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


# ------------------------------------------------------------------------------------------------------------ audit
class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50257, 1024)
        self.positions = nn.Embedding(1023, 1024)
        self.up = nn.Linear(1024, 4095)
        self.down = nn.Linear(4095, 1023)
        self.fine = nn.Linear(1024, 4096)
        self.stem = nn.Conv2d(3, 64, 7)
        self.attention = nn.MultiheadAttention(1023, 3)
        self.head = nn.Linear(1024, 50257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("only shapes are read")


@pytest.fixture
def model() -> nn.Module:
    with torch.device("meta"):
        return LanguageModel()


def test_findings(model: nn.Module) -> None:
    findings = audit.audit(model)
    assert [f[:6] for f in findings] == [
        (
            "tokens",
            "Embedding",
            "50257 x 1024",
            "shares the weight of head",
            "nothing, or 50264 x 1024 together with head",
            True,
        ),
        ("up", "Linear", "1024 -> 4095", "out_features=4095 (y, dy)", "amp_kernels.nn.Linear, or 1024 -> 4096", True),
        (
            "down", "Linear", "4095 -> 1023", "in_features=4095 (x, W, dx, dW), out_features=1023 (y, dy)",
            "amp_kernels.nn.Linear, or 4096 -> 1024", True,
        ),
        ("stem", "Conv2d", "3 -> 64", "in_channels=3", "8 -> 64, channels_last", False),
        (
            "attention", "MultiheadAttention", "1023", "embed_dim=1023 (in_proj_weight, out_proj.weight)",
            "embed_dim=1032", False,
        ),
        (
            "head", "Linear", "1024 -> 50257", "out_features=50257 (y, dy)", "amp_kernels.nn.Linear, or 1024 -> 50264",
            True,
        ),
    ]  # fmt: skip
    assert [f[6:] for f in findings] == [
        (0, 0),
        (0, 2 * 4096),
        (2 * 1023 * 4096, 2 * (4096 + 1024)),
        (2 * 5 * 64 * 49, 2 * 5),
        (2 * 4 * (1032**2 - 1023**2), 2 * 8 * 9),
        (0, 2 * 50264),
    ]
    assert str(findings[1]) == (
        "up (Linear, 1024 -> 4095): out_features=4095 (y, dy); amp_kernels.nn.Linear, or 1024 -> 4096"
    )


def test_converted_layers_are_not_slow(model: nn.Module) -> None:
    names = [finding.name for finding in audit.audit(convert_linear_(model))]
    assert names == ["stem", "attention"]


def test_what_convert_linear_changes_is_what_audit_says(model: nn.Module) -> None:
    said = {f.name for f in audit.audit(model) if f.converts and f.kind != "Embedding"}
    before = {name for name, layer in model.named_modules() if isinstance(layer, Linear)}
    convert_linear_(model)
    changed = {name for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert said == changed - before - {"fine"}


@pytest.mark.parametrize(
    ("layer", "remedy", "weight_bytes"),
    [
        (nn.Conv1d(9, 16, 3), "16 -> 16, channels_last", 2 * 3 * 7 * 16),
        (nn.Conv2d(8, 12, (3, 5)), "8 -> 16, channels_last", 2 * 15 * 8 * 4),
        (nn.Conv3d(4, 4, 1), "8 -> 8, channels_last", 2 * (64 - 16)),
        (nn.Conv2d(6, 12, 1, groups=3), "24 -> 24, channels_last", 2 * (24 * 24 - 6 * 12) // 3),
        (nn.ConvTranspose2d(9, 8, 2), "16 -> 8, channels_last", 2 * 4 * 7 * 8),
        (nn.Conv2d(8, 16, 3), None, 0),
    ],
)
def test_convolutions(layer: nn.Module, remedy: str | None, weight_bytes: int) -> None:
    findings = audit.audit(layer)
    assert [(f.name, f.remedy, f.weight_bytes, f.converts) for f in findings] == (
        [("", remedy, weight_bytes, False)] if remedy else []
    )
    assert not findings or str(findings[0]).startswith(f"the model ({type(layer).__name__}, ")


PARAMETERS: list[tuple[Any, dict[str, Any], str, dict[str, int]]] = [  # the layer, the cause, sizes that are fast
    (nn.LSTM, {"input_size": 9, "hidden_size": 16, "num_layers": 2}, "input_size=9 (weight_ih)", {"input_size": 16}),
    (
        nn.GRU,
        {"input_size": 9, "hidden_size": 12, "num_layers": 3, "bidirectional": True},
        "input_size=9 (weight_ih), hidden_size=12 (weight_ih, weight_hh)",
        {"input_size": 16, "hidden_size": 16},
    ),
    (
        nn.LSTM,
        {"input_size": 8, "hidden_size": 12, "num_layers": 2, "proj_size": 5, "bidirectional": True},
        "hidden_size=12 (weight_ih, weight_hh, weight_hr), proj_size=5 (weight_hh, weight_hr)",
        {"hidden_size": 16, "proj_size": 8},
    ),
    (
        nn.RNN,
        {"input_size": 16, "hidden_size": 9},
        "hidden_size=9 (weight_ih, weight_hh)",
        {"hidden_size": 16},
    ),
    (nn.LSTMCell, {"input_size": 9, "hidden_size": 16}, "input_size=9 (weight_ih)", {"input_size": 16}),
    (
        nn.GRUCell,
        {"input_size": 9, "hidden_size": 17},
        "input_size=9 (weight_ih), hidden_size=17 (weight_ih, weight_hh)",
        {"input_size": 16, "hidden_size": 24},
    ),
    (
        nn.RNNCell,
        {"input_size": 16, "hidden_size": 9},
        "hidden_size=9 (weight_ih, weight_hh)",
        {"hidden_size": 16},
    ),
    (
        nn.MultiheadAttention,
        {"embed_dim": 36, "num_heads": 3},
        "embed_dim=36 (in_proj_weight, out_proj.weight)",
        {"embed_dim": 48},
    ),
    (
        nn.MultiheadAttention,
        {"embed_dim": 36, "num_heads": 3, "kdim": 9, "vdim": 16},
        "embed_dim=36 (q_proj_weight, k_proj_weight, v_proj_weight, out_proj.weight), kdim=9 (k_proj_weight)",
        {"embed_dim": 48, "kdim": 16},
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "cause", "better"), PARAMETERS)
def test_layers_that_multiply_by_parameters(
    kind: Any, sizes: dict[str, Any], cause: str, better: dict[str, int]
) -> None:
    layer, fast = kind(**sizes), kind(**sizes | better)
    (found,) = audit.audit(nn.ModuleDict({"layer": layer}))
    assert found.name == "layer" and found.kind == kind.__name__ and found.cause == cause and not found.converts
    assert found.remedy == ", ".join(f"{name}={size}" for name, size in better.items())
    assert audit.audit(fast) == []

    def elements(layer: nn.Module) -> int:
        return sum(parameter.numel() for name, parameter in layer.named_parameters() if "weight" in name)

    assert found.weight_bytes == 2 * (elements(fast) - elements(layer))


def test_bytes_of_the_activations_of_a_row() -> None:
    (found,) = audit.audit(nn.LSTM(9, 12, 2, bidirectional=True))
    # 7 more inputs. In 2 layers of 2 directions, 4 more elements for each of 4 gates and the result.
    assert found.row_bytes == 2 * (7 + 2 * 2 * (4 + 1) * 4)
    (found,) = audit.audit(nn.MultiheadAttention(36, 3))
    assert found.row_bytes == 2 * 8 * 12  # query, key, value and the result, before and after their projections


def test_what_stays_in_floating_point_in_int8() -> None:
    """`left_in_float` names what `quantize_` leaves."""
    tied = nn.Linear(8, 8)
    other = nn.EmbeddingBag(8, 8)
    other.weight = tied.weight
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(8, 8),
            "blocks": nn.Sequential(nn.GRU(8, 8), nn.GRU(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)),
            "bag": nn.EmbeddingBag(8, 8),
            "tied": tied,
            "other": other,
            "attention": nn.MultiheadAttention(8, 2),
            "grouped": nn.Conv2d(8, 8, 3, groups=2),
            "up": nn.ConvTranspose2d(8, 8, 2, 2),
            "overlapping": nn.ConvTranspose2d(8, 8, 3, 2),
            "table": nn.Embedding(8, 8),
            "conv1d": Conv1D(8, 8),
            "active": Linear(8, 8, activation="relu"),
        }
    )
    model["refused"] = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    model["refused"][0].register_forward_hook(lambda *_: None)
    model["refused"][1].double()
    model["refused"][2].register_buffer("gain", torch.ones(()))
    model["in_fp64"] = nn.MultiheadAttention(8, 2).double()
    left = left_in_float(model)
    assert [*left] == [
        *("lstm", "blocks.0", "blocks.1", "bag", "tied", "other", "grouped", "overlapping", "active"),
        *("refused.0", "refused.1", "refused.2", "in_fp64", "in_fp64.out_proj"),
    ]
    for i in range(3):
        with pytest.raises((TypeError, ValueError), match=rf"'refused\.{i}' must "):
            quantize_(model, filter_fn=lambda _, name, i=i: name == f"refused.{i}")
    quantize_(model, filter_fn=lambda _, name: not name.startswith(("refused", "in_fp64")))
    assert [*left] == [
        name
        for name, layer in model.named_modules()
        if any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))
    ]


def test_conv1d_of_transformers() -> None:
    findings = audit.audit(nn.Sequential(Conv1D(9, 16), Conv1D(16, 9), Conv1D(15, 9), Conv1D(16, 16)))
    assert [f[:6] for f in findings] == [
        ("0", "Conv1D", "16 -> 9", "nf=9 (W, y, dW, dy)", "16 -> 16", False),
        ("1", "Conv1D", "9 -> 16", "nx=9 (x, dx)", "16 -> 16", False),
        ("2", "Conv1D", "9 -> 15", "nx=9 (x, dx), nf=15 (W, y, dW, dy)", "16 -> 16", False),
    ]
    assert [f[6:] for f in findings] == [(2 * 16 * 16, 2 * 16), (0, 2 * 16), (2 * 9 * 16, 2 * 32)]


def test_layers_without_a_weight_of_their_own() -> None:
    parametrized = parametrizations.weight_norm(nn.Linear(9, 16))
    findings = audit.audit(nn.Sequential(parametrized, nn.LazyLinear(9), nn.Embedding(16, 9), nn.LazyConv2d(9, 3)))
    assert [(f.name, f.kind, f.remedy) for f in findings] == [("0", "ParametrizedLinear", "16 -> 16")]
    assert audit.audit(nn.ReLU()) == []


def test_a_shared_layer_is_listed_once() -> None:
    layer = nn.Linear(9, 9)
    assert [f.name for f in audit.audit(nn.Sequential(layer, nn.ReLU(), layer))] == ["0"]


# ---------------------------------------------------------------------------------------------------- command line
MODELS = """
import torch
from torch import nn
from helper import WIDTH

made = []

def odd():
    made.append(torch.get_default_device())
    return nn.Sequential(nn.Linear(WIDTH, 4096), nn.Linear(4096, 1023), nn.Conv2d(3, 8, 3))

def huge():
    return nn.Linear(1000001, 1000001)

def real_only():
    layer = nn.Linear(9, 8)
    layer.weight[0, 0].item()
    return layer

class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(64, 64), nn.LSTM(64, 64)])
        self.gru, self.bag, self.head = nn.GRU(64, 64), nn.EmbeddingBag(9, 64), nn.Linear(64, 64)

instance = nn.Linear(9, 8)
number = 3

def needs(argument):
    return nn.Linear(9, 9)

def returns():
    return [nn.Linear(9, 9)]

def leaves():
    raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "helper.py").write_text("WIDTH = 1023\n")
    (folder / "nets.py").write_text(MODELS)
    (folder / "json.py").write_text("from torch import nn\nmodel = nn.Linear(9, 8)\n")  # as a standard module
    (folder / "broken.py").write_text("import there_is_no_such_module\n")
    return folder


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.command("-m", "amp_kernels", "audit", *arguments, PYTHONWARNINGS="ignore")


def test_the_command_line(models: Path) -> None:
    run = command(f"{models}/nets.py:odd", "--batch", "8192")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    header, _, *rows, blank, sentence = run.stdout.splitlines()
    assert header.split()[:4] == ["layer", "class", "size", "slow"] and "padding at 8,192 rows" in header
    assert [row.split()[:2] for row in rows] == [["0", "Linear"], ["1", "Linear"], ["2", "Conv2d"]] and blank == ""
    assert f"{2 * 4096 * 1024 + 8192 * 2 * 1024:,} B" in rows[0]
    assert sentence == (
        "3 layers have shapes that are slow on tensor cores in fp16 or bf16: amp_kernels.nn.convert_linear_(model) "
        "pads for 2 of them and changes no shape; 1 must have other sizes to be fast."
    )


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Of the command in this process, where it exits or returns."""
    monkeypatch.setattr(sys, "argv", ["amp_kernels", "audit", *arguments])
    try:
        return amp_kernels_command()
    except SystemExit as error:
        return error.code


def test_help_says_that_the_file_is_executed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "--help") == 0
    assert "It executes FILE.py" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("rows", ["-3", "0", "many"])
def test_rows_are_counted(
    models: Path, rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, f"{models}/nets.py:odd", "--batch", rows) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"argument --batch: ROWS must be a positive integer, got '{rows}'" in said.err


def test_bad_arguments_of_the_command_line(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, f"{models}/nets.py") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("audit: the model must be given as FILE.py:FACTORY, got ")


@pytest.mark.parametrize(
    ("name", "row", "sentence"),
    [
        (
            "huge",
            f"{2 * 1000001 * 1000008:,} B + {2 * 2 * 1000008:,} B a row",
            "1 layer has a shape that is slow",
        ),  # 4 TB: meta
        ("real_only", "256 B + 32 B a row", "pads for 1 of them"),
        ("instance", "256 B", "1 layer has a shape"),
        ("Fine", None, "No layer has a shape that is slow on tensor cores in fp16 or bf16."),
    ],
)
def test_what_is_loaded(
    models: Path, name: str, row: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.run(f"{models}/nets.py:{name}") == 0
    printed = capsys.readouterr().out
    assert sentence in printed and (row is None) == (len(printed.splitlines()) == 1) and (row or "") in printed


def test_what_stays_in_floating_point_is_counted_and_named(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.run(f"{models}/nets.py:Recurrent") == 0
    assert capsys.readouterr().out == (
        "No layer has a shape that is slow on tensor cores in fp16 or bf16.\n"
        "In int8, by amp_kernels.quantization, 4 layers with matrices stay in floating point: 2 LSTM (blocks.*), 1 GRU "
        "(gru), 1 EmbeddingBag (bag).\n"
    )


def test_a_file_named_as_a_module(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert audit.run(f"{models}/json.py:model") == 0
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nets.txt:odd", "must be given as FILE.py:FACTORY"),
        ("nets.py:", "must be given as FILE.py:FACTORY"),
        ("missing.py:odd", "FILE.py must exist, got "),
        ("broken.py:odd", "cannot be imported: ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("nets.py:nothing", "FACTORY must be a name in "),
        ("nets.py:number", "must be a function or an nn.Module, got int"),
        ("nets.py:needs", "must run without arguments, got: TypeError: needs() missing 1 required"),
        ("nets.py:returns", "must return an nn.Module, got list"),
        ("nets.py:leaves", "must run without arguments, got: SystemExit: 7"),
    ],
)
def test_what_cannot_be_loaded_gets_a_sentence(
    models: Path, target: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.run(f"{models}/{target}") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("audit: ") and sentence in printed.err
    assert len(printed.err.splitlines()) == 1


def test_the_table_without_tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "tabulate":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert table(("a", "long header"), [("first cell", "b"), ("c", "")]) == (
        "a           long header\n----------  -----------\nfirst cell  b\nc"
    )
