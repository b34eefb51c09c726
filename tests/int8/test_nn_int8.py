"""Int8Linear and Int8Embedding against their formulas, and all that is done to a layer of a model."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels
from amp_kernels import reference
from amp_kernels.nn import Int8Embedding, Int8Linear
from amp_kernels.testing import DTYPES, error_and_allowed, randn

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
    weight = layer.weight.t(), scale, zero_point, layer.weight_scale.t(), None
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
    assert torch.equal(layer.weight, expected.values) and torch.equal(layer.weight_scale, expected.scale)
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
            assert torch.equal(layer(view), layer(view.contiguous()))


def test_no_inputs_give_the_bias(device):
    for mode in MODES:
        layer = int8_layer(mode, linear(0, 5, device=device))
        assert torch.equal(layer(torch.empty(3, 0, device=device)), layer.bias.expand(3, 5))


def test_static_layers_pass_codes_on(device):
    first, second = (int8_layer("static", linear(37, n, device=device)) for n in (37, 13))
    first.output_scale, first.output_zero_point = second.input_scale, second.input_zero_point
    x = randn(2, 8, 37).to(device)
    between = first(x)
    assert isinstance(between, amp_kernels.Int8Tensor) and between.shape == (2, 8, 37)
    rows = w8a8(first, x.flatten(0, 1))
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
    weight = amp_kernels.Int8Tensor(layer.weight, layer.weight_scale, None, (1,)).dequantize()
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
    weight = amp_kernels.Int8Tensor(layer.weight, layer.weight_scale, None, (1,)).dequantize()
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
    before = {name: (buffer, buffer.clone()) for name, buffer in layer.named_buffers()}
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


def test_shared_codes_stay_shared_when_moved():
    original = linear()
    one = Int8Linear.from_linear(original)
    weight = amp_kernels.Int8Tensor(one.weight, one.weight_scale, None, (1,))
    model = nn.ModuleList([one, Int8Linear.from_linear(original, weight=weight), Int8Linear.from_linear(original)])
    model.half()
    assert model[0].weight is model[1].weight and model[0].weight_scale is model[1].weight_scale
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight and copied[0].weight is not model[0].weight
    alone = model[0].weight.clone()
    model.to("meta")
    assert model[0].weight is model[1].weight and model[0].weight_scale is model[1].weight_scale
    assert model[2].weight is not model[0].weight and alone.device.type == "cpu"


@pytest.mark.parametrize("writes", [False, True])
def test_shared_codes_that_are_moved_one_by_one(writes):
    """They stay shared, unless somebody wrote to one of them in between; `.data` raises no version."""
    original = linear()
    one = Int8Linear.from_linear(original)
    two = Int8Linear.from_linear(original, weight=amp_kernels.Int8Tensor(one.weight, one.weight_scale, None, (1,)))
    codes = two.weight.clone()
    one._apply(lambda t: t.clone())
    if writes:
        one.weight.data.zero_()
    two._apply(lambda t: t.clone())
    assert torch.equal(two.weight, codes) and (two.weight is one.weight) is not writes


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
    names = {"weight", "weight_scale", "bias"}
    assert set(layer.state_dict()) == names | ({"input_scale", "input_zero_point"} if mode == "static" else set())


def test_codes_have_another_shape_in_a_state_dict_than_floats():
    """So that what loads the float model, torch's layers too, refuses codes whatever `strict` is."""
    for int8, floats in (
        (Int8Linear.from_linear(linear()), linear()),
        (Int8Embedding.from_embedding(nn.Embedding(5, 4)), nn.Embedding(5, 4)),
    ):
        before = floats.weight.detach().clone()
        state = int8.state_dict()
        assert state["weight"].shape == (1, *int8.weight.shape) and state["weight"].data_ptr() == int8.weight.data_ptr()
        for assign in (False, True):
            with pytest.raises(RuntimeError, match="size mismatch for weight"):
                floats.load_state_dict(state, strict=False, assign=assign)
        assert torch.equal(floats.weight, before)
        new = copy.deepcopy(int8)
        new.weight.zero_()
        new.load_state_dict({**state, "weight": state["weight"][0]})  # as before they had a shape of their own
        assert torch.equal(new.weight, int8.weight)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_floats_are_not_loaded_as_codes(strict, assign):
    layer, table = Int8Linear.from_linear(linear()), Int8Embedding.from_embedding(nn.Embedding(5, 4))
    for int8, floats in ((layer, linear()), (table, nn.Embedding(5, 4))):
        before = copy.deepcopy(int8.state_dict())
        with pytest.raises(RuntimeError, match=r"load_state_dict: weight must be codes, got torch\.float32; load"):
            int8.load_state_dict(floats.state_dict(), strict=strict, assign=assign)
        assert all(torch.equal(tensor, before[name]) for name, tensor in int8.state_dict().items())


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
    layers[2].output_scale, layers[2].output_zero_point = layers[3].input_scale, layers[3].input_zero_point
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


# ----------------------------------------------------------------------------------------------------------- errors
def test_errors_are_sentences():
    with pytest.raises(ValueError, match="mode must be one of weight_only, dynamic, static, got 'int4'"):
        Int8Linear(4, 4, mode="int4")
    with pytest.raises(ValueError, match="in_features must be at most 131071 with int8 activations, got 131072"):
        Int8Linear(131072, 1, mode="dynamic")
    assert Int8Linear(131072, 1).in_features == 131072
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 37\), got \(3, 36\)"):
        Int8Linear.from_linear(linear())(torch.zeros(3, 36))
    with pytest.raises(ValueError, match="must be given for mode='static' and for no other"):
        Int8Linear.from_linear(linear(), "static")
    with pytest.raises(ValueError, match="must be given for mode='static' and for no other"):
        Int8Linear.from_linear(linear(), input_scale=torch.ones(1), input_zero_point=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(TypeError, match="got an Int8Tensor; dequantize it"):
        Int8Linear.from_linear(linear())(amp_kernels.quantize_int8(torch.ones(2, 37)))
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        Int8Linear.from_linear(linear())(torch.zeros(2, 37, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"max_norm must be None, got 1\.0"):
        Int8Embedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0))


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
