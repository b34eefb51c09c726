"""amp_kernels.nn.Linear beside nn.Linear: results, gradients, and all that is done to a layer of a model."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_kernels
from amp_kernels.nn import Linear, convert_linear_
from amp_kernels.reference.matmul import activate
from amp_kernels.testing.common import error_and_allowed, randn
from amp_kernels.testing.matmul import ACTIVATIONS, LAYOUTS, compare

LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def torchs(inputs: int, outputs: int, dtype: torch.dtype, device: Any = "cpu", bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias).to(device, dtype)
    with torch.no_grad():
        layer.weight.copy_(randn(outputs, inputs, seed=1) / max(inputs, 1) ** 0.5)
        if bias:
            layer.bias.copy_(randn(outputs, seed=2))
    return layer


def ours(layer: nn.Linear, activation: Any = None) -> Linear:
    """The same weights in a layer of ours."""
    result = Linear(
        layer.in_features, layer.out_features, layer.bias is not None, layer.weight.device, layer.weight.dtype,
        activation=activation,
    )  # fmt: skip
    result.load_state_dict(layer.state_dict())
    return result


def trained(layer: nn.Linear, x: Tensor, activation: Any, lr: float = 0.5) -> list[Tensor]:
    """The result, the gradient of x, and the weights after a step of SGD."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y = y if isinstance(layer, Linear) else activate(y, activation)
    y.backward(randn(*y.shape, seed=5).to(y))
    with torch.no_grad():
        return [y.detach(), x.grad, *(p - lr * p.grad for p in layer.parameters())]  # type: ignore[list-item]


def check_against_torch(layer: nn.Linear, x: Tensor, activation: Any = None) -> None:
    """`trained` under the error rule: fp64 is the truth, nn.Linear in the same dtype and place the yardstick."""
    yardstick = [t.cpu() for t in trained(copy.deepcopy(layer), x, activation)]
    truth = trained(copy.deepcopy(layer).cpu().double(), x.cpu().double(), activation)
    for name, *three in zip(
        ("y", "dx", "weight", "bias"), trained(ours(layer, activation), x, activation), yardstick, truth, strict=False
    ):
        result = compare(name, *three)
        # Gradients go through an activation's argument that was rounded, by torch too.
        slack = 1 if name == "y" or activation is None else 4
        assert result.error <= slack * result.allowed, result


# ----------------------------------------------------------------------------------------------------- as nn.Linear
@LOW
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("inputs", "outputs"), [(63, 65), (64, 128), (31, 1), (8, 7), (1, 3), (1023, 9)])
def test_a_trained_step(
    inputs: int, outputs: int, activation: Any, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    layer = torchs(inputs, outputs, dtype, device)
    check_against_torch(layer, randn(19, inputs, dtype=dtype).to(device), activation)


@pytest.mark.parametrize("shape", [(33,), (1, 33), (2, 3, 5, 33), (0, 33), (2, 0, 33)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    layer = torchs(33, 10, torch.float16, device)
    check_against_torch(layer, randn(*shape, dtype=torch.float16).to(device))
    check_against_torch(torchs(33, 10, torch.float16, device, bias=False), randn(*shape).half().to(device))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_leading_dimension(layout: str, backend: str, device: torch.device) -> None:
    layer = torchs(33, 10, torch.float16, device)
    x = LAYOUTS[layout](randn(17, 33, dtype=torch.float16).to(device))
    result = compare(
        "y", ours(layer)(x).detach(), layer.cpu()(x.cpu()), copy.deepcopy(layer).double()(x.cpu().double())
    )
    assert result.passed, result


def test_a_gradient_without_strides(backend: str, device: torch.device) -> None:
    layer, x = ours(torchs(33, 10, torch.float16, device)), randn(17, 33).half().to(device).requires_grad_()
    layer(x).sum().backward()  # expands one element
    expected = layer.weight.double().sum(0).expand(17, -1)
    assert x.grad is not None and layer.bias.grad is not None
    torch.testing.assert_close(x.grad.double(), expected, rtol=2e-3, atol=2e-3)
    assert (layer.bias.grad == 17).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_dtypes_are_torchs(activation: Any, dtype: torch.dtype) -> None:
    layer, x = torchs(9, 5, dtype), randn(4, 9, dtype=dtype)
    assert torch.equal(ours(layer, activation)(x), activate(layer(x), activation))


@pytest.mark.parametrize("forgotten", ["input", "layer", "bias", "other"])
def test_a_forgotten_half_gets_a_remedy(forgotten: str) -> None:
    layer, x = Linear(16, 8).half(), torch.ones(2, 16).half()
    name = "bias" if forgotten == "bias" else "weight"
    if forgotten == "input":
        x = x.float()
    elif forgotten == "bias":
        layer.bias.data = layer.bias.data.float()
    else:
        layer = layer.float() if forgotten == "layer" else layer.bfloat16()
    got = "torch.bfloat16" if forgotten == "other" else "torch.float32"
    sentence = f"linear: {name} must be torch.float16 as the first operand is, got {got}; convert it with .to"
    if forgotten == "input":
        got = "float32 (2, 16) on cpu, float16 (8, 16) on cpu, float16 (8,) on cpu"
        sentence = f"linear: operands must have one dtype, got {got}; convert them with .to(), or use torch.autocast"
    with pytest.raises(TypeError, match=re.escape(sentence)):
        layer(x)


def test_no_inputs_no_outputs() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = Linear(0, 5, dtype=torch.float16)
        none = Linear(5, 0, dtype=torch.float16)
    assert torch.equal(layer(torch.empty(3, 0).half()), layer.bias.expand(3, 5))
    assert none(randn(2, 3, 5).half()).shape == (2, 3, 0)


@LOW
def test_autocast(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    layer, x = torchs(33, 10, torch.float32, device), randn(6, 33).to(device)
    mine = ours(layer)
    with torch.autocast(device.type, dtype=dtype):
        y = mine(x)
        expected = layer(x)
    y.float().sum().backward()
    assert y.dtype == expected.dtype == dtype and mine.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    truth = x.to(dtype).double() @ layer.weight.to(dtype).double().t() + layer.bias.to(dtype).double()
    assert compare("y", y.detach(), expected.cpu(), truth.cpu()).passed


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_double_backward(activation: Any, backend: str, device: torch.device) -> None:
    # So many that the largest errors of two ways to round are about the same.
    layer, inputs = torchs(33, 40, torch.float16, device), randn(64, 33).half().to(device)

    def penalty(dtype: torch.dtype, mine: bool) -> list[Tensor]:
        module = ours(layer, activation) if mine else copy.deepcopy(layer).to(dtype)
        x = inputs.to(dtype).requires_grad_()
        y = module(x) if mine else activate(module(x), activation)
        wide = torch.promote_types(dtype, torch.float32)
        (grad,) = torch.autograd.grad(y.to(wide).square().sum(), x, create_graph=True)
        return [t.cpu() for t in torch.autograd.grad(grad.to(wide).square().sum(), (x, module.weight))]

    mine, theirs, truth = penalty(torch.float16, True), penalty(torch.float16, False), penalty(torch.float64, False)
    for our, their, true in zip(mine, theirs, truth, strict=True):
        error, allowed = error_and_allowed(our, their, true)
        assert error <= allowed


def test_the_operator_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "amp_kernels.nn.linear.linear", lambda *args: (calls.append(args), amp_kernels.linear(*args))[1]
    )
    layer = ours(torchs(9, 5, torch.float16), "relu")
    x = randn(4, 9).half()
    layer(x)
    assert len(calls) == 1 and calls[0][1] is layer.weight and calls[0][2:] == (layer.bias, "relu")


# ------------------------------------------------------------------------------------------------------ the parameters
def test_the_same_initial_values_and_names() -> None:
    layers = []
    for kind in (nn.Linear, Linear):
        torch.manual_seed(3)
        layers.append(kind(13, 7))
    theirs, mine = (layer.state_dict() for layer in layers)
    assert list(theirs) == list(mine) and all(torch.equal(theirs[name], mine[name]) for name in theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_go_both_ways(bias: bool) -> None:
    theirs, mine = nn.Linear(13, 7, bias), Linear(13, 7, bias, activation="gelu")
    mine.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(mine.weight, theirs.weight) and mine.weight is not theirs.weight
    nn.Linear(13, 7, bias).load_state_dict(mine.state_dict(), strict=True)


def test_parameters_are_dense(backend: str, device: torch.device) -> None:
    layer = ours(torchs(1023, 9, torch.float16, device))
    layer(randn(2, 1023).half().to(device)).sum().backward()
    assert layer.weight.is_contiguous() and layer.weight.grad.is_contiguous()  # type: ignore[union-attr]
    assert layer.weight.untyped_storage().nbytes() == 2 * 9 * 1023


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_copies(activation: Any) -> None:
    layer = ours(torchs(9, 5, torch.float16), activation)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = (
        copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False),
    )  # fmt: skip
    x = randn(4, 9).half()
    for other in copies:
        assert type(other) is Linear and other.activation == activation and other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


def test_repr() -> None:
    assert repr(Linear(3, 5)) == "Linear(in_features=3, out_features=5, bias=True)"
    assert repr(Linear(3, 5, False, activation="relu")).endswith("bias=False, activation=relu)")


@pytest.mark.parametrize("name", ["silu", "", 1, "GELU"])
def test_unknown_activations_get_a_sentence(name: Any) -> None:
    with pytest.raises(ValueError, match="Linear: activation must be one of None, 'relu', 'gelu', 'gelu_tanh', got"):
        Linear(3, 5, activation=name)


def test_a_tied_weight(backend: str, device: torch.device) -> None:
    tokens = torch.tensor([[1, 5, 5], [0, 2, 6]], device=device)

    def grad_of(dtype: torch.dtype, kind: type[nn.Linear]) -> Tensor:
        embedding = nn.Embedding(7, 9).to(device, dtype)
        head = kind(9, 7, False, device, dtype)
        with torch.no_grad():
            embedding.weight.copy_(randn(7, 9, seed=1))
        head.weight = embedding.weight
        assert len(list(nn.ModuleList([embedding, head]).parameters())) == 1
        logits = head(embedding(tokens))
        F.cross_entropy(logits.float().view(-1, 7), tokens.view(-1)).backward()
        return embedding.weight.grad  # type: ignore[return-value]

    expected = grad_of(torch.float32, nn.Linear)
    torch.testing.assert_close(grad_of(torch.float16, Linear).float(), expected, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool, backend: str, device: torch.device) -> None:
    model = nn.Sequential(
        ours(torchs(33, 10, torch.float16, device), "gelu"), ours(torchs(10, 7, torch.float16, device))
    )
    x = randn(6, 33).half().to(device)

    def grads(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        call(leaf).sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    plain = grads(model)
    for again, grad in zip(grads(lambda t: checkpoint(model, t, use_reentrant=use_reentrant)), plain, strict=True):
        assert torch.equal(again, grad)


# -------------------------------------------------------------------------------------------- compilers, transforms
@pytest.fixture
def model() -> nn.Module:
    first, second = torchs(33, 10, torch.float16), torchs(10, 7, torch.float16, bias=False)
    return nn.Sequential(ours(first, "gelu_tanh"), ours(second))


def passes(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    y = call(leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item,union-attr]


def compiled(call: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True)


def test_compiled_without_graph_breaks(model: nn.Module) -> None:
    """Not to the bit: what one layer rounds to fp16 and the next widens Inductor does not round at all."""
    dtype = torch.float16
    model, call = model.to(dtype), compiled(model)
    exact = copy.deepcopy(model).double()
    for rows in (2, 19, 40):  # dynamic from the second on
        x = randn(rows, 3, 33).to(dtype)
        results = (passes(call, model, x), passes(model, model, x), passes(exact, exact, x.double()))
        for mine, eager, true in zip(*results, strict=True):
            error, allowed = error_and_allowed(mine, eager, true)
            assert error <= allowed
    with torch.no_grad():
        error, allowed = error_and_allowed(call(x), model(x), exact(x.double()))
        assert error <= allowed


def test_compiled_under_autocast() -> None:
    layer = ours(torchs(33, 10, torch.float32))

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    x = randn(5, 33)
    for mine, eager in zip(passes(compiled(call), layer, x), passes(call, layer, x), strict=True):
        assert mine.dtype == eager.dtype
        torch.testing.assert_close(mine, eager, rtol=1e-2, atol=1e-2)


def test_compiled_transforms(model: nn.Module) -> None:
    x, direction = randn(4, 33).half(), randn(4, 33, seed=1).half()

    def derivative(x: Tensor, direction: Tensor) -> Tensor:
        return torch.func.jvp(model, (x,), (direction,))[1]

    call = compiled(derivative)
    torch.testing.assert_close(call(x, direction), derivative(x, direction), rtol=5e-3, atol=5e-3)


@LOW
def test_export(model: nn.Module, dtype: torch.dtype) -> None:
    model, x = model.to(dtype), randn(4, 33).to(dtype)
    exported = torch.export.export(model.eval(), (x,))
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert called and all(op.startswith("aten.") for op in called)
    assert torch.equal(exported.module()(x), model(x))


def test_meta() -> None:
    layer = Linear(9, 5, device="meta", dtype=torch.float16, activation="relu")
    assert layer(torch.empty(2, 4, 9, dtype=torch.float16, device="meta")).shape == (2, 4, 5)


def test_gradients_of_each_sample(model: nn.Module) -> None:
    x = randn(4, 33).half()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (row,)).float().square().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for i, row in enumerate(x):
        passes(model, model, row)
        for name, p in model.named_parameters():
            torch.testing.assert_close(together[name][i], p.grad, rtol=1e-2, atol=1e-2)


def test_forward_mode(model: nn.Module) -> None:
    plain = nn.Sequential(nn.Linear(33, 10), nn.GELU("tanh"), nn.Linear(10, 7, False))
    plain.load_state_dict({name.replace("1.", "2."): p.float() for name, p in model.state_dict().items()})
    x, direction = randn(4, 33), randn(4, 33, seed=1)
    expected = torch.func.jvp(plain, (x,), (direction,))[1]
    ours = torch.func.jvp(model, (x.half(),), (direction.half(),))[1]
    torch.testing.assert_close(ours.float(), expected, rtol=2e-2, atol=2e-2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.half(), direction.half())
        ours = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    torch.testing.assert_close(ours.float(), expected, rtol=2e-2, atol=2e-2)


def test_nested_tensors() -> None:
    layer, rows = torchs(33, 10, torch.float16), [randn(n, 33).half() for n in (3, 1, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for part, x in zip(ours(layer)(nested).unbind(), rows, strict=True):
        torch.testing.assert_close(part, layer(x), rtol=2e-3, atol=2e-3)


class Codes(Tensor):
    """A tensor as quantization libraries have it: of all operators it supports only torch's linear."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, bias = args
            return F.linear(x, 2 * weight.as_subclass(Tensor), bias)
        assert "amp_kernels" not in str(function)
        return super().__torch_function__(function, types, args, kwargs or {})

    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError

    __tensor_unflatten__ = __tensor_flatten__


def test_a_weight_of_another_class() -> None:
    layer, x = ours(torchs(9, 5, torch.float16), "relu"), randn(4, 9).half()
    expected = F.relu(F.linear(x, 2 * layer.weight, layer.bias))
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Codes), requires_grad=False)
    assert torch.equal(layer(x), expected)


# ------------------------------------------------------------------------------------------------------ distributed
def test_fsdp2(mesh: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(33, 10), nn.Linear(10, 7))
    truth, by_torch, sharded = (copy.deepcopy(plain) for _ in range(3))
    truth.double()
    convert_linear_(sharded)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for model in (by_torch, sharded):
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    assert all(isinstance(layer, Linear) for layer in sharded)
    x = randn(6, 33)
    for network in (truth, by_torch, sharded):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for _ in range(3):
            y = network(x.to(next(network.parameters()).dtype))
            y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs, true in zip(*(model.parameters() for model in (sharded, by_torch, truth)), strict=True):
        assert mine.to_local().dtype == torch.float32
        error, allowed = error_and_allowed(mine.full_tensor(), theirs.full_tensor(), true)
        assert error <= allowed


def test_tensor_parallel(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plain = nn.Sequential(torchs(33, 10, torch.bfloat16), torchs(10, 7, torch.bfloat16))
    parallel = parallelize_module(
        convert_linear_(copy.deepcopy(plain)), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    x = randn(6, 33).bfloat16()
    torch.testing.assert_close(parallel(x), plain(x), rtol=2e-2, atol=2e-2)
