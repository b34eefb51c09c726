"""The contenders of int8_images, and how far each output of their int8 layers is from exact arithmetic."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_kernels import quantize_int8
from amp_kernels.nn import Int8Conv2d, Int8ConvTranspose2d, Int8Linear, convert_linear_
from amp_kernels.quantization import convert_, export_onnx, prepare_, prepare_qat_, quantize_

from .encoder_int8 import DYNAMIC, FP32, STATIC, WEIGHT_ONLY, by_torchao, file_bytes
from .harness import Row
from .image_tasks import Data, Task, by_pixels
from .peers import first_line

BF16, FP16, QAT = "bf16", "fp16", "QAT static, ours"
AUTOCAST_BF16, AUTOCAST_FP16 = "bf16 autocast", "fp16 autocast"
FBGEMM, ONEDNN, FBGEMM_ALL = (f"{each}, torch.ao" for each in ("static by fbgemm", "static by onednn", "all by fbgemm"))
STATIC_RUNTIME, WEIGHT_ONLY_RUNTIME = "static, onnxruntime", "weight-only, onnxruntime"
OURS = WEIGHT_ONLY, DYNAMIC, STATIC, QAT
EXPORTED = {STATIC_RUNTIME: STATIC, WEIGHT_ONLY_RUNTIME: WEIGHT_ONLY}  # from which model
Contenders = dict[str, nn.Module | str]  # or why there is none
Case = tuple[
    Row, nn.Module, Tensor, Tensor
]  # what a row begins with, a float model, images to calibrate and to test it


class In16Bits(nn.Module):
    """A model with 16-bit weights for fp32 images."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x.to(self.dtype))
        return result.float()


class Autocast(nn.Module):
    """An fp32 model under torch's autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            result: Tensor = self.model(x)
        return result.float()


class Runtime(nn.Module):
    """onnxruntime with the file that `export_onnx` writes, on as many threads as torch has."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()
        onnxruntime = importlib.import_module("onnxruntime")
        check_is_on_a_cpu(example)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            export_onnx(model, example.contiguous(), path)
            self.file = path.read_bytes()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # A thread that waits by spinning would take the time of the next contender (as in __main__.py).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(self.file, options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {self.name: x.numpy()})[0])


# ----------------------------------------------------------------------------------------------------- how it is made
def folded(model: nn.Module) -> nn.Module:
    """fp32 with batch norms folded into convolutions, as every int8 contender has them."""
    from torch.ao.quantization.quantize_fx import fuse_fx

    made: nn.Module = fuse_fx(model)
    return made


@torch.no_grad()
def static(model: nn.Module, calibration: Tensor) -> nn.Module:
    prepare_(model)(calibration)
    return convert_(model)


@contextmanager
def engine(name: str) -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def check_is_on_a_cpu(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError("its int8 convolutions are measured on CPUs only")


@torch.no_grad()
def by_torch_ao(model: nn.Module, calibration: Tensor, by: str, transposed: bool = False) -> nn.Module:
    """Static with the engine's defaults. Transposed convolutions stay in fp32 unless `transposed`."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    check_is_on_a_cpu(calibration)
    mapping = get_default_qconfig_mapping(by)
    if not transposed:
        mapping = mapping.set_object_type(nn.ConvTranspose2d, None)
    elif not has(model, nn.ConvTranspose2d):
        raise NotImplementedError("the network has no transposed convolutions")
    with engine(by):
        prepared = prepare_fx(model, mapping, (calibration[:1],))
        prepared(calibration)
        made: nn.Module = convert_fx(prepared)
    return made


def linear_by_torchao(model: nn.Module) -> nn.Module:
    version = importlib.metadata.version("torchao")
    if not has(model, nn.Linear):
        raise NotImplementedError(f"torchao {version} has no int8 convolution, and the network has no linear layer")
    return by_torchao(model, "Int8WeightOnlyConfig")


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With the linear layers of amp_kernels."""
    if not has(model, nn.Linear):
        raise NotImplementedError("the network has no linear layer, and only these would differ")
    return In16Bits(convert_linear_(folded(model)), dtype)


def has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) for layer in model.modules())


def makers(calibration: Tensor, qat: Callable[[nn.Module], nn.Module]) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What each does to the trained model."""
    example = calibration[:1]
    return {
        FP32: folded,
        AUTOCAST_BF16: lambda model: Autocast(folded(model), torch.bfloat16),
        BF16: lambda model: In16Bits(folded(model), torch.bfloat16),
        "bf16, ours": lambda model: converted(model, torch.bfloat16),
        AUTOCAST_FP16: lambda model: Autocast(folded(model), torch.float16),
        FP16: lambda model: In16Bits(folded(model), torch.float16),
        "fp16, ours": lambda model: converted(model, torch.float16),
        WEIGHT_ONLY: lambda model: quantize_(model, "weight_only"),
        DYNAMIC: lambda model: quantize_(model, "dynamic"),
        STATIC: lambda model: static(model, calibration),
        QAT: qat,
        FBGEMM: lambda model: by_torch_ao(model, calibration, "fbgemm"),
        ONEDNN: lambda model: by_torch_ao(model, calibration, "onednn"),
        FBGEMM_ALL: lambda model: by_torch_ao(model, calibration, "fbgemm", transposed=True),
        "weight-only linear layers, torchao": linear_by_torchao,
        STATIC_RUNTIME: lambda model: Runtime(static(model, calibration), example),
        WEIGHT_ONLY_RUNTIME: lambda model: Runtime(quantize_(model, "weight_only"), example),
    }


def make(maker: Callable[[nn.Module], nn.Module], model: nn.Module, example: Tensor) -> nn.Module | str:
    """The contender, or what it raised when it was made or first called."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers: what they deprecate
            made = maker(copy.deepcopy(model))
            with torch.no_grad():
                made(example)
        return made
    except Exception as error:  # whatever a peer raises is its reason
        return first_line(error)


def contenders(task: Task, model: nn.Module, data: Data, seed: int) -> Contenders:
    def qat(model: nn.Module) -> nn.Module:
        return convert_(task.trained(prepare_qat_(model, "static"), data, 100 + seed, task.qat_steps, task.lr / 10))

    made = makers(data.calibration, qat)
    return {name: make(maker, model, data.calibration[:2]) for name, maker in made.items()}


# ------------------------------------------------------------------------------------------------------------ its size
def size_in_bytes(model: nn.Module) -> int:
    return len(model.file) if isinstance(model, Runtime) else file_bytes(model)


def share_of_int8(model: nn.Module) -> Row:
    """Of the weights' bytes in fp32, and the names of weights that stay in floating point. Biases do not count."""
    left = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
    codes = sum(t.numel() for t in model.state_dict().values() if t.dtype is torch.int8 and t.dim() > 1)
    return {"share": codes / (codes + sum(left.values())), "left": " ".join(left)}


# ------------------------------------------------------------------------------------------------------ exact products
def is_int8(layer: nn.Module) -> bool:
    """Whether a layer multiplies codes, here or in torch.ao."""
    ours = isinstance(layer, Int8Conv2d | Int8ConvTranspose2d | Int8Linear)
    return ours or (".quantized" in type(layer).__module__ and hasattr(layer, "weight"))


def exact(layer: Any, x: Tensor) -> Tensor:
    """The result of an int8 layer in fp64, from its codes, scales and bias."""
    weight, bias = (given() if callable(given) else given for given in (layer.weight, layer.bias))
    weight = weight.dequantize() if weight.is_quantized else weight
    operands = x.double(), weight.double(), None if bias is None else bias.double()
    kind = type(layer).__name__
    if "ConvTranspose" in kind:
        result = F.conv_transpose2d(*operands, layer.stride, layer.padding)
    elif "Conv" in kind:
        result = F.conv2d(*operands, layer.stride, layer.padding, layer.dilation)
    else:
        result = F.linear(*operands)
    return result.relu() if "ReLU" in kind else result


def numbers(layer: Any, x: Tensor) -> Tensor:
    """What the codes of an input stand for."""
    if x.is_quantized:
        return x.dequantize()
    return quantize_int8(x, scale=layer.input_scale, zero_point=layer.input_zero_point).dequantize()


def distances(expected: Tensor, output: Tensor) -> Tensor:
    """From exact results, in steps of 8-bit codes. If an output has floats, a step is their range / 255."""
    if output.is_quantized:
        codes = expected / output.q_scale() + output.q_zero_point()
        return (output.int_repr() - codes.clamp(0, 255)).abs()
    return (output - expected).abs() / ((expected.max() - expected.min()) / 255)


def errors(model: nn.Module, x: Tensor) -> Row:
    """Over the outputs of all int8 layers, each with the inputs that it has in the network."""
    found: list[Tensor] = []

    def compare(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found.append(distances(exact(layer, numbers(layer, inputs[0])), output).flatten())

    hooks = [layer.register_forward_hook(compare) for layer in model.modules() if is_int8(layer)]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return outside(torch.cat(found))


def outside(distance: Tensor) -> Row:
    """How many outputs there are, how many are off by more than a step, and the largest distance."""
    return {"outputs": len(distance), "off": int((distance > 1).sum()), "largest": distance.max().item()}


def with_normals(task: Task, data: Data) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of random normal weights, and images of random normals for calibration and test."""
    torch.manual_seed(0)
    model = task.make().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.kaiming_normal_(weight)
    given = data.calibration, data.test[0]
    calibration, test = (by_pixels(torch.randn(t.shape).to(t.device)) for t in given)
    return model.to(test.device), calibration, test


def errors_of_each(cases: Sequence[Case]) -> list[Row]:
    """A row for each static contender that multiplies in torch's process."""
    rows: list[Row] = []
    for about, model, calibration, x in cases:
        made = makers(calibration, lambda model: model)
        for name in (STATIC, FBGEMM, ONEDNN):
            contender = make(made[name], model, calibration[:2])
            found: Row = {"note": contender} if isinstance(contender, str) else errors(contender, x)
            rows.append({**about, "contender": name, **found})
    return rows


# As on a CPU without VNNI instructions. torch's libraries read these variables once.
WITHOUT_VNNI = {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def errors_without_vnni(cases: Sequence[Case]) -> list[Row]:
    """The same in a process of its own."""
    with patch.dict("os.environ", WITHOUT_VNNI), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(errors_of_each, cases).result()
