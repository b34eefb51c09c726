"""explain, audit, and `python -m amp_kernels audit`."""

from __future__ import annotations

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
from amp_kernels.functional.matmul import engine_of
from amp_kernels.nn import Linear, convert_linear_
from amp_kernels.ops.matmul import copies_of
from amp_kernels.ops.matmul import padded as padded_copy
from amp_kernels.quantization import left_in_float, quantize_
from amp_kernels.report import table


# ---------------------------------------------------------------------------------------------------------- explain
@pytest.mark.parametrize(
    ("a", "b", "activation", "copies"),
    [
        ((8192, 1024), (1024, 4096), None, {}),
        ((8191, 1024), (1024, 4096), None, {}),  # rows are no pitch
        ((8192, 1023), (1023, 4096), None, {"a": 2 * 1024 * 8192, "b": 2 * 1024 * 4096}),
        ((8192, 1024), (1024, 4095), None, {"b": 2 * 1024 * 4096}),
        ((8192, 1023), (1023, 50257), "gelu", {"a": 2 * 1024 * 8192, "b": 2 * 1024 * 50264}),
        ((16, 65535), (65535, 65535), None, {}),  # bound by reading b
        ((17, 65535), (65535, 65535), None, {"a": 2 * 17 * 65536, "b": 2 * 65536 * 65536}),
        ((2047, 2047), (2047, 2047), None, {}),  # a loop would wait for the host
        ((3, 6400, 4095), (4095, 320), None, {"a": 2 * 3 * 6400 * 4096, "b": 2 * 320 * 4096}),
        ((3, 6400, 4095), (3, 4095, 320), None, {"a": 2 * 3 * 6400 * 4096, "b": 2 * 3 * 320 * 4096}),
        ((3, 1, 6400, 4095), (5, 4095, 319), None, {"a": 2 * 15 * 6400 * 4096, "b": 2 * 15 * 320 * 4096}),
        ((9,), (9, 32), None, {}),
    ],
)
def test_explain_of_shapes(a: Any, b: Any, activation: Any, copies: dict[str, int]) -> None:
    explanation = audit.explain(a, b, activation, dtype=torch.bfloat16)
    assert (explanation.engine, explanation.copies) == ("cublas", copies)


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
    assert of_linear.copies == {"a": 2 * 8192 * 1024, "b": 2 * 4096 * 1024}
    assert [*audit.explain(view, weight.t()).copies] == ["a", "b"]  # what is behind its rows may be anything
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
    assert [*explanation.copies] == [name for name, size in sizes if size is not None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.filterwarnings("error")
def test_a_gpu_that_is_not_there() -> None:
    explanation = audit.explain((8192, 1023), (1023, 4096))
    assert explanation.engine == "cublas" and [*explanation.copies] == ["a", "b"]
    assert audit.explain((64, 1023), (1023, 4096), device="cpu").copies == {}
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
    converted = "amp_kernels.nn.Linear, or "
    assert findings == [
        ("up", "Linear(1024, 4095)", "out_features=4095", converted + "out_features=4096"),
        (
            "down", "Linear(4095, 1023)", "in_features=4095, out_features=1023",
            converted + "in_features=4096, out_features=1024",
        ),
        ("stem", "Conv2d(3, 64)", "in_channels=3", "in_channels=8, channels_last"),
        ("attention", "MultiheadAttention(1023)", "embed_dim=1023", "embed_dim=1032"),
        (
            "head", "Linear(1024, 50257)", "out_features=50257",
            converted + "out_features=50264 together with tokens, which has the same weight",
        ),
    ]  # fmt: skip
    assert str(findings[0]) == f"up, Linear(1024, 4095): out_features=4095; {converted}out_features=4096"


def test_converted_layers_are_not_slow(model: nn.Module) -> None:
    names = [finding.name for finding in audit.audit(convert_linear_(model))]
    assert names == ["stem", "attention"]


def test_what_convert_linear_changes_is_what_audit_says(model: nn.Module) -> None:
    said = {f.name for f in audit.audit(model) if f.remedy.startswith("amp_kernels.nn.Linear")}
    before = {name for name, layer in model.named_modules() if isinstance(layer, Linear)}
    convert_linear_(model)
    changed = {name for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert said == changed - before - {"fine"}


@pytest.mark.parametrize(
    ("kind", "sizes", "better"),
    [
        (nn.Conv1d, {"in_channels": 9, "out_channels": 16}, {"in_channels": 16}),
        (nn.Conv2d, {"in_channels": 8, "out_channels": 12}, {"out_channels": 16}),
        (nn.Conv3d, {"in_channels": 4, "out_channels": 4}, {"in_channels": 8, "out_channels": 8}),
        (nn.Conv2d, {"in_channels": 6, "out_channels": 12, "groups": 3}, {"in_channels": 24, "out_channels": 24}),
        (nn.ConvTranspose2d, {"in_channels": 9, "out_channels": 8}, {"in_channels": 16}),
        (nn.LSTM, {"input_size": 9, "hidden_size": 16, "num_layers": 2}, {"input_size": 16}),
        (nn.GRU, {"input_size": 9, "hidden_size": 12}, {"input_size": 16, "hidden_size": 16}),
        (nn.LSTM, {"input_size": 8, "hidden_size": 12, "proj_size": 5}, {"hidden_size": 16, "proj_size": 8}),
        (nn.RNN, {"input_size": 16, "hidden_size": 9}, {"hidden_size": 16}),
        (nn.LSTMCell, {"input_size": 9, "hidden_size": 16}, {"input_size": 16}),
        (nn.GRUCell, {"input_size": 9, "hidden_size": 17}, {"input_size": 16, "hidden_size": 24}),
        (nn.RNNCell, {"input_size": 16, "hidden_size": 9}, {"hidden_size": 16}),
        (nn.MultiheadAttention, {"embed_dim": 36, "num_heads": 3}, {"embed_dim": 48}),
        (
            nn.MultiheadAttention,
            {"embed_dim": 36, "num_heads": 3, "kdim": 9, "vdim": 16},
            {"embed_dim": 48, "kdim": 16},
        ),
    ],
)
def test_layers_of_each_kind(kind: Any, sizes: dict[str, int], better: dict[str, int]) -> None:
    of_kernel = {"kernel_size": 3} if kind.__module__.endswith("conv") else {}
    layer, fast = kind(**sizes, **of_kernel), kind(**sizes | better, **of_kernel)
    (found,) = audit.audit(nn.ModuleDict({"layer": layer}))
    assert found.name == "layer" and found.size.startswith(f"{kind.__name__}(")
    assert found.cause == ", ".join(f"{name}={sizes[name]}" for name in better)
    layout = ", channels_last" if of_kernel else ""
    assert found.remedy == ", ".join(f"{name}={size}" for name, size in better.items()) + layout
    assert audit.audit(fast) == []


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
    assert audit.audit(nn.Sequential(Conv1D(9, 16), Conv1D(16, 9), Conv1D(15, 9), Conv1D(16, 16))) == [
        ("0", "Conv1D(9, 16)", "nf=9", "nf=16"),
        ("1", "Conv1D(16, 9)", "nx=9", "nx=16"),
        ("2", "Conv1D(15, 9)", "nf=15, nx=9", "nf=16, nx=16"),
    ]


def test_layers_without_a_weight_of_their_own() -> None:
    parametrized = parametrizations.weight_norm(nn.Linear(9, 16))
    model = nn.Sequential(parametrized, nn.LazyLinear(9), nn.Embedding(16, 9), nn.LazyConv2d(9, 3))
    assert audit.audit(model) == [("0", "ParametrizedLinear(9, 16)", "in_features=9", "in_features=16")]
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
    run = command(f"{models}/nets.py:odd")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    header, _, *rows, blank, sentence = run.stdout.splitlines()
    assert header.split() == ["layer", "size", "slow", "for", "instead"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"] and blank == ""
    assert "Linear(1023, 4096)" in rows[0] and "in_features=1024" in rows[0]
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


def test_bad_arguments_of_the_command_line(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, f"{models}/nets.py") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("audit: the model must be given as FILE.py:FACTORY, got ")


@pytest.mark.parametrize(
    ("name", "row", "sentence"),
    [
        ("huge", "Linear(1000001, 1000001)", "1 layer has a shape that is slow"),  # 4 TB: meta
        ("real_only", "in_features=9", "pads for 1 of them"),
        ("instance", "(the model)", "1 layer has a shape"),
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
    models: Path, target: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, f"{models}/{target}") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("audit: ") and sentence in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_table() -> None:
    assert table(("a", "long header"), [("first cell", "b"), ("c", "")]) == (
        "a           long header\n----------  -----------\nfirst cell  b\nc"
    )
