"""Int8Linear and Int8Embedding against their formulas, and all that is done to a layer of a model."""

import copy
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels
from amp_kernels import reference
from amp_kernels.nn import Int8Conv2d, Int8Embedding, Int8Linear
from amp_kernels.quantization import prepare_qat_, quantize_
from amp_kernels.testing.common import DTYPES, error_and_allowed, randn

MODES = ("weight_only", "dynamic", "static")
SCALE, ZERO_POINT = 0.0173, 11


def linear(inputs=37, outputs=13, bias=True, dtype=torch.float32, device="cpu"):
    layer = nn.Linear(inputs, outputs, bias).to(device, dtype)
    with torch.no_grad():
        layer.weight.copy_(randn(outputs, inputs, seed=1) / inputs**0.5)
        if bias:
            layer.bias.copy_(randn(outputs, seed=2))
    return layer


def int8_layer(mode, layer):
    if mode != "static":
        return Int8Linear.from_linear(layer, mode)
    device = layer.weight.device
    scale = torch.tensor([SCALE], device=device)
    zero_point = torch.tensor([ZERO_POINT], dtype=torch.int32, device=device)
    return Int8Linear.from_linear(layer, mode, input_scale=scale, input_zero_point=zero_point)


def codes(layer, x):
    """Those of x, by the specification."""
    if layer.mode == "dynamic":
        return reference.quantize_int8(x, dim=[-1], symmetric=False)
    return reference.quantize_int8(x, scale=layer.input_scale, zero_point=layer.input_zero_point)


def w8a8(layer, x):
    """int8 times int8, by the specification."""
    values, scale, zero_point = codes(layer, x)
    bias = None if layer.bias is None else layer.bias.detach().float()
    weight = layer.weight_codes.t(), scale, zero_point, layer.weight_scale.t(), None
    return reference.int8_matmul(values, *weight, bias=bias, out_dtype=x.dtype)


class Allocations(TorchDispatchMode):
    """The largest floating-point tensor that any operator returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 37), (37,), (2, 3, 5, 37), (0, 37), (4, 0, 37)])
@pytest.mark.parametrize("bias", [True, False])
def test_weight_only_is_the_product_with_dequantized_weights(shape, bias, dtype, device):
    dtype = DTYPES[dtype]
    original = linear(bias=bias, dtype=dtype, device=device)
    layer = Int8Linear.from_linear(original)
    x = randn(*shape, dtype=dtype).to(device)
    y = layer(x)
    assert y.shape == original(x).shape and y.dtype == dtype
    expected = amp_kernels.quantize_int8(original.weight.detach(), dim=-1)
    assert torch.equal(layer.weight_codes, expected.values) and torch.equal(layer.weight_scale, expected.scale)
    weight = expected.dequantize()
    values = None if not bias else original.bias.detach()
    theirs = F.linear(x.float(), weight, None if values is None else values.float()).to(dtype)
    truth = F.linear(x.double(), weight.double(), None if values is None else values.double())
    error, allowed = error_and_allowed(y, theirs, truth)
    assert error <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("shape", [(64, 37), (37,), (2, 3, 5, 37), (0, 37)])
def test_w8a8_is_bit_for_bit_the_specification(mode, shape, dtype, device):
    layer = int8_layer(mode, linear(dtype=DTYPES[dtype], device=device))
    x = randn(*shape, dtype=DTYPES[dtype]).to(device)
    y = layer(x)
    assert y.shape == (*shape[:-1], 13) and y.dtype == x.dtype
    assert torch.equal(y.reshape(-1, 13), w8a8(layer, x.reshape(-1, 37)))


def test_strides_of_the_input(device):
    x = randn(37, 2, 24).to(device)
    for mode in MODES:
        layer = int8_layer(mode, linear(device=device))
        for view in (x.permute(1, 2, 0), x[:, :, ::2].permute(2, 1, 0), x[:, :1].permute(1, 2, 0).expand(3, -1, -1)):
            # torch multiplies fp32 inputs on a GPU, and cuBLAS adds in another order for other strides.
            is_by_torch = mode == "weight_only" and device.type == "cuda"
            tolerance = 1e-5 * is_by_torch
            torch.testing.assert_close(layer(view), layer(view.contiguous()), rtol=tolerance, atol=tolerance)


def test_no_inputs_give_the_bias(device):
    for mode in MODES:
        layer = int8_layer(mode, linear(0, 5, device=device))
        assert torch.equal(layer(torch.empty(3, 0, device=device)), layer.bias.expand(3, 5))


def test_static_layers_take_codes(device):
    first, second = (int8_layer("static", linear(37, n, device=device)) for n in (37, 13))
    x = randn(2, 8, 37).to(device)
    rows = w8a8(first, x.flatten(0, 1))
    between = amp_kernels.quantize_int8(first(x), scale=second.input_scale, zero_point=second.input_zero_point)
    assert torch.equal(between.values.flatten(0, 1), codes(second, rows)[0])
    assert torch.equal(second(between).flatten(0, 1), w8a8(second, rows))
    assert second(between).dtype == torch.float32 and second.half()(between).dtype == torch.float16


# -------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_weight_only(dtype, device):
    layer = Int8Linear.from_linear(linear(dtype=DTYPES[dtype], device=device))
    x = randn(64, 37, dtype=DTYPES[dtype]).to(device).requires_grad_()
    grad = randn(64, 13, dtype=DTYPES[dtype], seed=3).to(device)
    layer(x).backward(grad)
    weight = layer.weight.float()
    error, allowed = error_and_allowed(x.grad, grad @ weight.to(grad.dtype), grad.double() @ weight.double())
    assert error <= allowed
    error, allowed = error_and_allowed(layer.bias.grad, grad.sum(0), grad.double().sum(0))
    assert error <= allowed


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_gradient_passes_straight_through_codes(mode, device):
    layer = int8_layer(mode, linear(device=device))
    x = (3 * randn(64, 37)).to(device).requires_grad_()  # some of it outside of the static range
    y = layer(x)
    grad = randn(64, 13, seed=3).to(device)
    y.backward(grad)
    scales = {"scale": layer.input_scale, "zero_point": layer.input_zero_point} if mode == "static" else {}
    options = scales or {"dim": -1, "symmetric": False}
    other = x.detach().clone().requires_grad_()
    weight = layer.weight.float()
    (amp_kernels.fake_quantize_int8(other, **options) @ weight.t()).backward(grad)
    assert torch.equal(x.grad == 0, other.grad == 0)
    assert bool((x.grad == 0).any()) == (mode == "static")
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_the_weight_is_never_expanded_as_a_whole(device, monkeypatch):
    layer = Int8Linear.from_linear(linear(96, 64, device=device))
    x, grad = randn(4, 96).to(device).requires_grad_(), randn(4, 64, seed=3).to(device)  # not exact in 16 bits
    (whole,) = torch.autograd.grad(layer(x), x, grad)
    monkeypatch.setattr("amp_kernels.nn.int8.PANEL", 1000)
    with Allocations() as allocations:
        (panels,) = torch.autograd.grad(layer(x), x, grad)
    torch.testing.assert_close(panels, whole, rtol=1e-6, atol=1e-6)
    assert 64 * 10 <= allocations.largest <= 1000


# ------------------------------------------------------------------------------------------------ dtypes and places
@pytest.mark.parametrize("mode", MODES)
def test_dtype_changes_leave_codes_and_scales(mode):
    layer = int8_layer(mode, linear())
    before = {name: (buffer, buffer.clone()) for name, buffer in layer.named_buffers() if name != "weight_dtype"}
    for change, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.type(torch.float16), torch.float16),
        (lambda m: m.float(), torch.float32),
    ):
        change(layer)
        assert layer.dtype == layer.bias.dtype == dtype
        assert layer(randn(3, 37, dtype=dtype)).dtype == dtype
        for name, (buffer, values) in before.items():
            now = getattr(layer, name)
            assert now.dtype == buffer.dtype and torch.equal(now, values), name
    layer.to("meta")
    assert all(buffer.is_meta for buffer in layer.buffers()) and layer.weight_scale.dtype == torch.float32


def shared(one, two):
    return one.weight_codes is two.weight_codes and one.weight_scale is two.weight_scale


def codes_of(layer):
    return amp_kernels.Int8Tensor(layer.weight_codes, layer.weight_scale, None, (1,))


@pytest.mark.parametrize("inference", [False, True])
def test_shared_codes_stay_shared_when_moved(inference):
    original = linear()
    with torch.inference_mode(inference):
        one = Int8Linear.from_linear(original)
        alone = Int8Linear.from_linear(original)
        model = nn.ModuleList([one, Int8Linear.from_linear(original, weight=codes_of(one)), alone])
    model.half()
    assert shared(model[0], model[1])
    copied = copy.deepcopy(model)
    assert shared(copied[0], copied[1]) and not shared(copied[0], model[0])
    clone = model[0].weight_codes.clone()
    model.to("meta")
    assert shared(model[0], model[1]) and model[0].weight_codes.is_meta
    assert not shared(model[0], model[2]) and clone.device.type == "cpu"
    assert shared(*model.to_empty(device="cpu")[:2]) and model[0].weight_codes.device.type == "cpu"


def test_layers_that_share_codes_follow_when_one_of_them_is_moved():
    """As layers that share a parameter do; nothing is remembered, so that no write in between is lost."""
    original = linear()
    one = Int8Linear.from_linear(original)
    two = Int8Linear.from_linear(original, weight=codes_of(one))
    held = weakref.ref(one.weight_codes)  # as torch.compile holds what it has seen
    one._apply(lambda t: t.clone())
    assert held() is two.weight_codes
    one.weight_codes.data.zero_()
    two._apply(lambda t: t.clone())
    assert shared(one, two) and not two.weight_codes.any()


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode, device):
    layer = int8_layer(mode, linear(device=device))
    x = randn(5, 37).to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    # weight-only multiplies what nn.Linear would, codes are made of x as it is
    expected = layer(x.bfloat16()) if mode == "weight_only" else w8a8(layer, x.detach()).bfloat16()
    assert torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and layer.bias.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------- storage
@pytest.mark.parametrize("mode", MODES)
def test_copies_and_checkpoints(mode, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer = int8_layer(mode, linear(dtype=torch.bfloat16))
    x = randn(4, 37, dtype=torch.bfloat16)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    states = (torch.load(stream, weights_only=True), safetensors.load_file(tmp_path / "layer.safetensors"))
    for state in states:
        new = Int8Linear(37, 13, mode=mode, dtype=torch.bfloat16)
        assert not torch.equal(new(x), expected)
        new.load_state_dict(state)
        assert torch.equal(new(x), expected)
    names = {"weight_codes", "weight_scale", "weight", "mode_name", "bias"}
    assert set(layer.state_dict()) == names | ({"input_scale", "input_zero_point"} if mode == "static" else set())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_floats_are_refused(strict, assign):
    layer, table = Int8Linear.from_linear(linear()), Int8Embedding.from_embedding(nn.Embedding(5, 4))
    for int8, floats in ((layer, linear()), (table, nn.Embedding(5, 4))):
        before = copy.deepcopy(int8.state_dict())
        says = r"load_state_dict: weight must be codes called weight_codes, got torch\.float32; load floats first"
        with pytest.raises(RuntimeError, match=says):
            int8.load_state_dict(floats.state_dict(), strict=strict, assign=assign)
        assert all(torch.equal(tensor, before[name]) for name, tensor in int8.state_dict().items())
        prepared = amp_kernels.nn.Linear(4, 5)
        with pytest.raises(RuntimeError, match=r"weight_codes must be floats called weight, got torch\.int8; make"):
            prepared.load_state_dict(int8.state_dict(), strict=strict, assign=assign)
        with pytest.raises(RuntimeError, match=r"size mismatch for weight: .* torch\.Size\(\[\]\) from checkpoint"):
            floats.load_state_dict(int8.state_dict(), strict=strict, assign=assign)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("saved", MODES)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_loads_its_own_mode_alone(mode, saved, strict):
    state = int8_layer(saved, linear()).state_dict()
    layer = int8_layer(mode, nn.Linear(37, 13))
    before = copy.deepcopy(layer.state_dict())
    if mode == saved:
        layer.load_state_dict(state, strict=strict)
        assert torch.equal(layer.weight_codes, state["weight_codes"])
        del state["mode_name"]
        saved = None
    for assign in (False, True):
        layer = layer if saved else int8_layer(mode, linear())
        with pytest.raises(RuntimeError, match="mode_name" if strict else f"mode_name must be {mode!r}, got {saved!r}"):
            layer.load_state_dict(state, strict=strict, assign=assign)
    if saved:
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_another_mode_has_a_name_of_another_length():
    """A loader that sets one tensor after another then refuses another mode by its shape, without reading the name."""
    assert len({len(mode) for mode in MODES}) == len(MODES)
    for mode in MODES:
        layer = int8_layer(mode, linear())
        assert bytes(layer.state_dict()["mode_name"].tolist()).decode() == layer.mode == layer.to("meta").mode == mode


@pytest.mark.parametrize("bias", [True, False])
def test_assigning_a_checkpoint_brings_its_dtype(bias):
    """As torch's layers: a model on the meta device in fp32, a checkpoint in bf16."""
    x, index = randn(4, 37, dtype=torch.bfloat16), torch.tensor([1, 3])
    for made, inputs in ((linear(bias=bias).bfloat16(), x), (nn.Embedding(5, 4).bfloat16(), index)):
        saved = (Int8Linear.from_linear if type(made) is nn.Linear else Int8Embedding.from_embedding)(made)
        with torch.device("meta"):
            layer = Int8Linear(37, 13, bias) if type(made) is nn.Linear else Int8Embedding(5, 4)
        assert layer.dtype == torch.float32
        layer.load_state_dict(saved.state_dict(), assign=True)
        assert layer.dtype == layer.weight.dtype == layer(inputs).dtype == torch.bfloat16
        assert torch.equal(layer(inputs), saved(inputs)) and torch.equal(layer.weight, saved.weight)
        other = Int8Linear(37, 13, bias) if type(made) is nn.Linear else Int8Embedding(5, 4)
        other.load_state_dict(saved.state_dict(), strict=False)
        assert other.dtype == torch.float32  # copied into a layer, as torch does it
        other.load_state_dict(saved.to("meta").state_dict(), assign=True)
        assert other.dtype == torch.bfloat16 and other.weight_codes.is_meta


FLOAT_LAYERS = {
    "linear": (lambda: nn.Linear(37, 13), (4, 37)),
    "embedding": (lambda: nn.Embedding(5, 4), (4,)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 5, 6)),
    "up-convolution": (lambda: nn.ConvTranspose2d(3, 4, 2, 2), (2, 3, 5, 6)),
}


ORDERS = {
    "as it is": list,
    "reversed": lambda state: list(reversed(state)),
    "as in a file of safetensors": lambda state: sorted(state, key=lambda key: (-state[key].element_size(), key)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["as it is", "in vmap", "compiled"])
@pytest.mark.parametrize("name", FLOAT_LAYERS)
def test_functional_call_takes_a_state_dict(name, how, order):
    """As for a float layer. Afterwards the layer has its own tensors and its own dtype again."""
    make, shape = FLOAT_LAYERS[name]
    layer, other = quantize_(make()), quantize_(make()).bfloat16()
    x = torch.arange(4) if name == "embedding" else randn(*shape, dtype=torch.bfloat16)
    own, state = dict(layer.named_buffers()), other.state_dict()
    state = {key: state[key] for key in ORDERS[order](state)}

    def call(x):
        return torch.func.functional_call(layer, state, (x,))

    run = {"as it is": call, "in vmap": torch.vmap(call), "compiled": torch.compile(call, backend="eager")}[how]
    found, expected = run(x), torch.vmap(other)(x) if how == "in vmap" else other(x)
    assert torch.equal(found, expected) and found.dtype == torch.bfloat16
    assert layer.dtype == torch.float32 and all(own[key] is tensor for key, tensor in layer.named_buffers())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FLOAT_LAYERS)
def test_functional_call_takes_a_state_dict_again(name, order):
    """torch writes what it replaces back into the state dict."""
    make, shape = FLOAT_LAYERS[name]
    layers, other = [quantize_(make()), quantize_(make())], quantize_(make()).bfloat16()
    x = torch.arange(4) if name == "embedding" else randn(*shape)
    inputs = x if name == "embedding" else x.bfloat16()
    saved = other.state_dict()
    state = {key: saved[key] for key in ORDERS[order](saved)}
    for layer in layers * 2:
        before, own = layer(x), dict(layer.named_buffers())
        assert torch.equal(torch.func.functional_call(layer, state, (inputs,)), other(inputs))
        assert torch.equal(layer(x), before) and all(own[key] is tensor for key, tensor in layer.named_buffers())
    layers[0].weight = other.weight
    assert layers[0].weight_codes is other.weight_codes and layers[0].weight_dtype is other.weight_dtype


def test_functional_call_takes_the_weight_of_another_layer():
    layer, other, x = quantize_(linear()), quantize_(linear(bias=False)), randn(4, 37)
    before, own = layer(x), dict(layer.named_buffers())
    found = torch.func.functional_call(layer, {"weight": other.weight}, (x,))
    assert torch.equal(found, other(x) + layer.bias)
    assert torch.equal(layer(x), before) and all(own[key] is tensor for key, tensor in layer.named_buffers())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", FLOAT_LAYERS)
def test_parameters_in_a_state_dict_become_no_parameters_of_a_layer(name, assign):
    make, shape = FLOAT_LAYERS[name]
    layer, other = quantize_(make()), quantize_(make())
    x = torch.arange(4) if name == "embedding" else randn(*shape)
    state = {key: nn.Parameter(t) if t.is_floating_point() else t for key, t in other.state_dict().items()}
    names = [list(dict(named())) for named in (layer.named_parameters, layer.named_buffers)]
    layer.load_state_dict(state, assign=assign)
    assert torch.equal(torch.func.functional_call(layer, state, (x,)), other(x)) and torch.equal(layer(x), other(x))
    assert names == [list(dict(named())) for named in (layer.named_parameters, layer.named_buffers)]
    assert type(layer.weight_dtype) is type(layer.weight_scale) is torch.Tensor and layer.half().dtype == torch.float16


def test_the_buffers_in_a_state_dict_have_their_own_names():
    """accelerate looks for the persistent buffers of a layer in its state dict."""
    for make, _ in FLOAT_LAYERS.values():
        layer = quantize_(make())
        persistent = {name for name, _ in layer.named_buffers() if name not in layer._non_persistent_buffers_set}
        assert persistent | dict(layer.named_parameters()).keys() | {"weight"} == layer.state_dict().keys()


def test_repr_and_training_flag():
    original = linear().eval()
    assert "in_features=37, out_features=13, bias=True, mode=dynamic" in repr(
        Int8Linear.from_linear(original, "dynamic")
    )
    assert not Int8Linear.from_linear(original).training
    assert "7, 3, padding_idx=1" in repr(Int8Embedding(7, 3, padding_idx=1))


def test_compiled_is_eager():
    torch.manual_seed(0)
    layers = [int8_layer(mode, linear(37, 37)) for mode in ("weight_only", "dynamic", "static", "static")]
    table = Int8Embedding.from_embedding(nn.Embedding(50, 37))
    model = nn.Sequential(table, *layers)
    index = torch.arange(40).view(4, 10)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.equal(compiled(index), model(index))

    x = [randn(6, 37).requires_grad_() for _ in range(2)]
    trained = nn.Sequential(*layers[:2])
    results = [run(inputs) for run, inputs in zip((torch.compile(trained, fullgraph=True), trained), x, strict=True)]
    assert torch.equal(*results)
    for result in results:
        result.sum().backward()
    torch.testing.assert_close(x[0].grad, x[1].grad, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- embedding
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_dequantizes_the_rows_looked_up(dtype, device):
    original = nn.Embedding(1000, 24, padding_idx=3).to(device, DTYPES[dtype])
    table = Int8Embedding.from_embedding(original)
    whole = amp_kernels.quantize_int8(original.weight.detach(), dim=-1).dequantize(DTYPES[dtype])
    for index in (torch.tensor([[5, 3, 999], [0, 5, 1]]), torch.tensor(7), torch.empty(2, 0, dtype=torch.long)):
        index = index.to(device)
        with Allocations() as allocations:
            rows = table(index)
        assert torch.equal(rows, F.embedding(index, whole)) and rows.dtype == DTYPES[dtype]
        assert allocations.largest <= max(1, index.numel()) * 24
    assert torch.equal(table(torch.tensor(3, device=device)), torch.zeros(24, device=device, dtype=DTYPES[dtype]))
    assert table.half()(index).dtype == torch.float16 and table.weight_scale.dtype == torch.float32
    assert table.padding_idx == 3
    if device.type == "cpu":
        for wrong in (1000, -1):
            with pytest.raises(IndexError):
                table(torch.tensor([wrong]))


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_rows_of_a_table_with_max_norm(norm_type, device):
    """Those of nn.Embedding on the dequantized table, at the first look-up and at the next."""
    torch.manual_seed(0)
    original = nn.Embedding(20, 8, max_norm=2.5, norm_type=norm_type).to(device)
    table, index = Int8Embedding.from_embedding(original), torch.tensor([[1, 2, 1], [5, 19, 0]], device=device)
    original.weight.data = table.weight.clone()
    expected = original(index)
    assert not torch.equal(expected, table.weight[index]) and expected.norm(norm_type, -1).max() <= 2.5001
    for _ in range(2):
        torch.testing.assert_close(table(index), expected, rtol=1e-6, atol=1e-7)
    assert table(index[:0]).shape == (0, 3, 8)


# ------------------------------------------------------------------------------------------------- what `weight` reads
class Operators(TorchDispatchMode):
    """How many operators ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def both_layers(dtype=torch.float32):
    table = nn.Embedding(13, 37).to(dtype)
    return Int8Linear.from_linear(linear(dtype=dtype)), Int8Embedding.from_embedding(table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_is_the_dequantized_tensor(dtype):
    dtype = DTYPES[dtype]
    x, index = randn(5, 37, dtype=dtype), torch.tensor([3, 0, 3])
    for layer in both_layers(dtype):
        expected = codes_of(layer).dequantize(dtype)
        for read in (
            lambda w: w,
            lambda w: w[:5],
            lambda w: x + w[:5],
            lambda w: F.linear(x, w),
            lambda w: F.embedding(index, w),
            lambda w: w.norm(),
            lambda w: w.to(torch.float64),
            lambda w: w.to(w.dtype).t(),
            lambda w: w.data.view(-1),
            lambda w: w.detach().clone(),
            lambda w: torch.cat([w, w[:1]]),
            lambda w: torch.stack(list(w)),
        ):
            assert torch.equal(read(layer.weight), read(expected.clone()))
        weight, inputs = layer.weight, x.clone().requires_grad_()
        with torch.inference_mode():
            assert torch.equal(weight[:2], expected[:2])
        F.linear(inputs, weight).sum().backward()
        torch.testing.assert_close(inputs.grad, torch.ones(5, 13, dtype=dtype) @ expected)


def test_properties_of_a_weight_compute_nothing():
    for layer in both_layers(torch.float16):
        with Operators() as operators:
            weight = layer.weight
            assert weight.dtype == layer.dtype == torch.float16 and weight.device.type == "cpu"
            assert weight.shape == weight.size() == (13, 37) and weight.numel() == 481 and weight.nbytes == 962
            assert weight.is_contiguous() and weight.stride() == (37, 1) and weight.is_floating_point()
            assert weight.dim() == 2 and not weight.requires_grad and len(weight) == 13 and weight.element_size() == 2
            assert weight.to(torch.float16) is weight
        assert operators.count == 0
        with Operators() as operators:
            weight.sum(), weight.norm()
        assert operators.count > 0


WRITES = {
    "operator": lambda w: w.div_(4),
    "init": nn.init.zeros_,
    "data": lambda w: w.data.copy_(torch.zeros(13, 37)),
    "detached": lambda w: w.detach().add_(1),
    "elements": lambda w: w.__setitem__(0, 0),
    "out": lambda w: torch.add(torch.ones(13, 37), 1, out=w),
    "max_norm": lambda w: F.embedding(torch.tensor([3, 0]), w, max_norm=0.1),
    "view": lambda w: w.fill_diagonal_(0),
    "foreach": lambda w: torch._foreach_mul_([w.clone(), w], 2),
    "assigned data": lambda w: setattr(w, "data", torch.zeros(13, 37)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_place_raises(write):
    """It would be lost: RWKV divides weights by powers of 2 before inference."""
    for layer in both_layers():
        before, expected = copy.deepcopy(layer.state_dict()), layer.weight.clone()
        weight = layer.weight
        with pytest.raises(RuntimeError, match=r"an int8 layer must not be changed, .*, got .*; change a clone"):
            WRITES[write](weight)
        assert torch.equal(weight, expected) and torch.equal(layer.weight, expected)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_a_write_that_changes_nothing_passes():
    for layer in both_layers():
        weight = layer.weight
        assert weight.div_(1) is weight and torch.equal(weight, layer.weight)


def test_writes_into_views_do_not_reach_the_codes():
    for layer in both_layers():
        before, expected = copy.deepcopy(layer.state_dict()), layer.weight.clone()
        weight = layer.weight
        rows = weight[1:3]
        rows.data.add_(1)
        assert torch.equal(rows, expected[1:3] + 1)
        assert torch.equal(weight, expected) and torch.equal(layer.weight, expected)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_a_weight_that_was_read_before_follows_its_layer():
    """Nothing is kept of it: a checkpoint, or a write to the codes, would make it stale."""
    for layer in both_layers():
        weight, before = layer.weight, layer.weight.clone()
        assert torch.equal(weight, before)
        layer.load_state_dict(layer.state_dict() | {"weight_scale": 2 * layer.weight_scale})
        assert torch.equal(weight, 2 * before) and torch.equal(weight.data, 2 * before)
        layer.weight_codes.zero_()
        assert weight.abs().max() == 0
        layer.half()
        assert weight.data.dtype == weight.dtype == torch.float32


def test_memory_of_a_weight_is_that_of_any_tensor(tmp_path):
    """torch reads memory without an operator in these cases."""
    for layer in both_layers():
        expected = layer.weight.clone()
        torch.save(layer.weight, tmp_path / "weight.pt")
        assert torch.equal(torch.load(tmp_path / "weight.pt"), expected)
        assert torch.equal(copy.deepcopy(layer.weight), expected)
        assert torch.equal(pickle.loads(pickle.dumps(layer.weight)), expected)
        assert torch.equal(torch.from_dlpack(layer.weight), expected)
        assert layer.weight.tolist() == expected.tolist()
        assert (layer.weight.numpy() == expected.numpy()).all()
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):  # rather than a read of address 0
            torch.utils.dlpack.to_dlpack(layer.weight)


def test_a_torch_without_wrappers_dequantizes_at_every_read(monkeypatch):
    monkeypatch.setattr(amp_kernels.torch_private, "no_torch_function", None)
    for layer in both_layers():
        assert type(layer.weight) is torch.Tensor and torch.equal(layer.weight, codes_of(layer).dequantize())


def test_assigning_to_a_weight_raises():
    for layer in both_layers():
        before = copy.deepcopy(layer.state_dict())
        for value in (nn.Parameter(torch.zeros(13, 37)), torch.zeros(13, 37), None, Int8Linear(3, 4).weight):
            with pytest.raises(
                TypeError, match=r"weight must be the weight of another int8 layer .*; for other values"
            ):
                layer.weight = value
        with pytest.raises(RuntimeError, match=r"must not be changed, .*, got add_\.Tensor"):
            layer.weight += 1
        with pytest.raises(KeyError, match="already exists"):
            layer.register_parameter("weight", nn.Parameter(torch.zeros(13, 37)))
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
        assert "weight" not in dict(layer.named_parameters()) | dict(layer.named_buffers())


def test_pruning_raises_and_leaves_nothing_behind():
    for layer in both_layers():
        before, names = layer.state_dict(), [name for name, _ in layer.named_parameters()]
        for method in (prune.l1_unstructured, prune.random_unstructured):
            with pytest.raises(
                TypeError, match=r"weight_orig must be a parameter with memory of its own, got the weight"
            ):
                method(layer, "weight", 0.5)
        assert [name for name, _ in layer.named_parameters()] == names and layer.state_dict().keys() == before.keys()


def test_the_weight_of_another_layer_ties_both():
    head, table = both_layers()
    head.half()
    index = torch.tensor([2, 12])
    weight = table.weight
    weight.norm()  # a read is no change
    head.weight = weight
    assert shared(head, table) and head.dtype == torch.float32
    assert torch.equal(head.weight, table.weight)
    torch.testing.assert_close(head(table(index)), F.linear(table(index), table.weight, head.bias.float()))
    nn.ModuleList([head, table]).bfloat16()
    assert shared(head, table) and head.dtype == table.dtype == torch.bfloat16
    other = both_layers(torch.bfloat16)[1]
    table.load_state_dict(other.state_dict())
    assert torch.equal(head.weight, other.weight)
    head.weight = head.weight  # changes nothing
    assert shared(head, table)
    with torch.device("meta"):
        empty = Int8Linear(37, 13)
    empty.weight = table.weight  # of a model on the meta device, whose checkpoint holds a tied weight once
    assert shared(empty, table) and empty.dtype == torch.bfloat16


def test_a_weight_is_found_where_parameters_are_looked_for():
    """By transformers' tie_weights since 5.0; a float layer that gets it has a float parameter of these values."""
    model = nn.ModuleDict(dict(zip(("head", "table"), both_layers(), strict=True)))
    assert isinstance(model["head"].weight, nn.Parameter) and len(list(model.parameters())) == 1
    model["head"].weight = model.get_parameter("table.weight")
    assert shared(model["head"], model["table"])
    floats, x = nn.Linear(37, 13, bias=False), randn(3, 37)
    floats.weight = model["table"].weight
    expected = F.linear(x, model["table"].weight)
    pickled = pickle.loads(pickle.dumps(floats))
    for layer in (floats, copy.deepcopy(floats), pickled, copy.deepcopy(floats).double().float()):
        assert isinstance(layer.weight, nn.Parameter) and torch.equal(layer(x), expected)
        assert torch.equal(layer.state_dict()["weight"], model["table"].weight)


class ReadsWeights(nn.Module):
    """Positions added as a slice of a table, and a layer applied by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.positions = nn.Embedding(50, 16), nn.Embedding(40, 16)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, index):
        x = self.table(index).to(self.last.weight.dtype) + self.positions.weight[: index.shape[-1]]
        return F.linear(self.first(x), self.last.weight)


def test_compiling_and_exporting_what_reads_weights():
    model, index = amp_kernels.quantization.quantize_(ReadsWeights()), torch.arange(12).view(2, 6)
    expected = model(index)
    assert torch.equal(torch.compile(model, fullgraph=True)(index), expected)
    assert torch.equal(torch.export.export(model, (index,)).module()(index), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
def test_traced_is_eager(mode):
    model = amp_kernels.quantization.quantize_(ReadsWeights(), mode)
    index, more = torch.arange(12).view(2, 6), randn(5, 16)
    assert torch.equal(torch.jit.trace(model, (index,))(index), model(index))
    layer = torch.jit.trace(model.first, (randn(3, 16),))
    assert torch.equal(layer(more), model.first(more))


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
def test_shapes_on_the_meta_device(mode):
    with torch.device("meta"):
        model = amp_kernels.quantization.quantize_(ReadsWeights().half(), mode)
        result = model(torch.zeros(2, 6, dtype=torch.int64))
    assert (result.device.type, result.shape, result.dtype) == ("meta", (2, 6, 16), torch.float16)


# ----------------------------------------------------------------------------------------------------------- errors
def test_errors_are_sentences():
    with pytest.raises(ValueError, match="mode must be one of weight_only, dynamic, static, got 'int4'"):
        Int8Linear(4, 4, mode="int4")
    with pytest.raises(ValueError, match="in_features must be at most 131071 with int8 activations, got 131072"):
        Int8Linear(131072, 1, mode="dynamic")
    assert Int8Linear(131072, 1).in_features == 131072
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 37\), got \(3, 36\)"):
        Int8Linear.from_linear(linear())(torch.zeros(3, 36))
    with pytest.raises(ValueError, match="must both be given with mode='static', and with no other"):
        Int8Linear.from_linear(linear(), "static")
    with pytest.raises(ValueError, match="must both be given with mode='static', and with no other"):
        Int8Linear.from_linear(linear(), input_scale=torch.ones(1), input_zero_point=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(TypeError, match="got an Int8Tensor; dequantize it"):
        Int8Linear.from_linear(linear())(amp_kernels.quantize_int8(torch.ones(2, 37)))
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        Int8Linear.from_linear(linear())(torch.zeros(2, 37, dtype=torch.float64))
    with pytest.raises(AttributeError, match="mode"):
        Int8Linear.from_linear(linear()).mode = "dynamic"


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: Int8Linear(4, 4)([1]), TypeError, "Int8Linear: x must be a Tensor, got list"),
        (lambda: prepare_qat_(nn.Linear(4, 4))(None), TypeError, "QATLinear: x must be a Tensor, got None"),
        (
            lambda: Int8Linear.from_linear(nn.LazyLinear(3)), ValueError,
            "Int8Linear.from_linear: the weight of the float layer must have a shape, got an uninitialized one in",
        ),
        (
            lambda: Int8Linear.from_linear(nn.ReLU()), TypeError,
            "Int8Linear.from_linear: the float layer must be an nn.Module with a weight, got ReLU",
        ),
        (
            lambda: Int8Embedding.from_embedding([1]), TypeError,
            "Int8Embedding.from_embedding: the float layer must be an nn.Module with a weight, got list",
        ),
    ],
)  # fmt: skip
def test_what_is_no_tensor_or_no_layer(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.parametrize(
    ("key", "forge", "sentence"),
    [
        (
            "weight_codes",
            lambda t: t.int(),
            r"weight_codes must be torch\.int8, got torch\.int32; save it in",
        ),
        ("input_zero_point", lambda t: t.long(), r"input_zero_point must be torch\.int32, got torch\.int64; save it"),
        ("mode_name", lambda t: t.roll(1), "mode_name must be 'static', got 'cstati'; convert the model in the mode"),
        ("mode_name", lambda t: t.int(), r"mode_name must be torch\.uint8, got torch\.int32"),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_forged_state_dicts_are_refused(key, forge, sentence, assign):
    layer = int8_layer("static", linear())
    before = layer.state_dict()
    with pytest.raises(RuntimeError, match=f"load_state_dict: {sentence}"):
        layer.load_state_dict(before | {key: forge(before[key])}, assign=assign)
    with torch.device("meta"):
        empty = Int8Linear(37, 13, mode="static")
    empty.load_state_dict(before, assign=True)
    assert torch.equal(empty.weight_codes, layer.weight_codes)
    layer.load_state_dict({name: tensor.to("meta") for name, tensor in before.items()}, assign=True)
    assert layer.mode == "static" and layer.weight_codes.is_meta


def test_the_mode_may_have_a_hyphen():
    for layer in (
        Int8Linear(37, 13, mode="weight-only"),
        Int8Linear.from_linear(linear(), "weight-only"),
        Int8Conv2d.from_conv(nn.Conv2d(3, 4, 3), "weight-only"),
        quantize_(nn.Sequential(linear()), "weight-only")[0],
    ):
        assert layer.mode == "weight_only" and bytes(layer.mode_name.tolist()) == b"weight_only"


# ------------------------------------------------------------------------------------------------------------ forgeries
def test_codes_that_do_not_fit_a_layer_are_refused():
    good = amp_kernels.quantize_int8(randn(5, 4), dim=-1)
    shifted = amp_kernels.quantize_int8(randn(5, 4), dim=-1, symmetric=False)
    Codes = amp_kernels.Int8Tensor
    forged = {
        "float codes": Codes(good.values.float(), good.scale),
        "other shape": Codes(good.values.t(), good.scale),
        "one scale": amp_kernels.quantize_int8(randn(5, 4)),
        "too few scales": Codes(good.values, good.scale[:3]),
        "fp64 scales": Codes(good.values, good.scale.double()),
        "scales elsewhere": Codes(good.values, good.scale.to("meta")),
        "zero points": shifted,
        "blocks": amp_kernels.quantize_int8(randn(5, 4), block_size=4),
    }
    for name, codes in forged.items():
        with pytest.raises(ValueError, match=r"Int8Linear\.from_linear: weight must be what .*\(5, 4\).*, got torch"):
            Int8Linear.from_linear(linear(4, 5), "dynamic", weight=codes), name
        with pytest.raises(ValueError, match=r"Int8Embedding\.from_embedding: weight must be what .*, got torch"):
            Int8Embedding.from_embedding(nn.Embedding(5, 4), weight=codes), name
    layer = Int8Linear.from_linear(linear(4, 5), "dynamic")
    with pytest.raises(ValueError, match="int8_matmul: a must not be quantized in blocks, got block_size 4"):
        layer(amp_kernels.quantize_int8(randn(3, 4), block_size=4))
