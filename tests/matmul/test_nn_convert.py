"""convert_linear_: what it changes of a model, and what it leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from amp_kernels.nn import Linear, convert_linear_
from amp_kernels.testing.common import randn
from amp_kernels.testing.matmul import compare


def transformer(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(36, 4, 61, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(nn.Linear(17, 36), nn.TransformerEncoder(layer, 2), nn.Linear(36, 11)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("train", [True, False])  # torch's fused kernel of the encoder is for inference
def test_a_converted_transformer(train: bool, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    model = transformer(dtype).train(train)
    x = randn(2, 5, 17, dtype=dtype)
    with torch.set_grad_enabled(train):
        yardstick, truth = model(x), copy.deepcopy(model).double()(x.double())
        model.to(device)
        before = dict(model.named_parameters())
        assert convert_linear_(model) is model
        y = model(x.to(device))
    assert sum(type(layer) is Linear for layer in model.modules()) == 2 + 2 * 2  # not those of the attention
    assert all(p is before[name] for name, p in model.named_parameters())
    result = compare("y", y.detach(), yardstick.detach(), truth.detach())
    assert result.passed, result


def test_an_optimizer_that_exists_goes_on() -> None:
    model = nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_linear_(model)
    before = [p.detach().clone() for p in model.parameters()]
    model(randn(8, 9).half()).sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_what_a_layer_carries_stays() -> None:
    layer = nn.Linear(9, 5).half()
    layer.is_special = True  # type: ignore[assignment]
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    assert convert_linear_(layer) is layer and type(layer) is Linear and layer.activation is None
    layer(randn(2, 9).half().requires_grad_()).sum().backward()
    assert calls == ["after", "backward"] and layer.is_special


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 9), "head": nn.Linear(9, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    convert_linear_(model)
    assert type(model["head"]) is Linear and model["head"].weight is model["embedding"].weight


class Subclass(nn.Linear):
    pass


def test_what_is_left_alone() -> None:
    own, attribute = nn.Linear(9, 9), nn.Linear(9, 9)
    own.forward = lambda x: x  # type: ignore[method-assign,assignment]
    attribute.activation = nn.ReLU()
    parametrized = parametrizations.weight_norm(nn.Linear(9, 9))
    layers = [own, attribute, parametrized, Subclass(9, 9), nn.MultiheadAttention(9, 3), nn.LazyLinear(9)]
    kinds = [type(layer) for layer in layers]
    model = nn.Sequential(*layers, nn.Linear(9, 9))
    convert_linear_(model)
    assert [type(layer) for layer in layers] == kinds and type(model[-1]) is Linear
    assert not any(isinstance(layer, Linear) for layer in layers[4].modules())


def test_parametrized_after_conversion() -> None:
    plain = nn.Linear(9, 5).bfloat16()
    layer = parametrizations.weight_norm(convert_linear_(copy.deepcopy(plain)))
    assert isinstance(layer, Linear)
    x = randn(4, 9).bfloat16()
    torch.testing.assert_close(layer(x), plain(x), rtol=2e-2, atol=2e-2)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_hook_that_computes_the_weight_stays() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(9, 5))
    x = randn(4, 9)
    expected = layer(x)
    convert_linear_(layer)
    assert type(layer) is Linear and torch.equal(layer(x), expected)


def test_filter_fn() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(9, 9)), nn.Linear(9, 8))
    convert_linear_(model, lambda layer, name: name != "1.0" and layer.out_features == 9)
    assert [type(layer) for layer in (model[0], model[1][0], model[2])] == [Linear, nn.Linear, nn.Linear]


def test_twice_is_once() -> None:
    model = convert_linear_(nn.Sequential(nn.Linear(9, 9)))
    assert convert_linear_(model) is model


@pytest.mark.parametrize(
    ("model", "filter_fn", "sentence"),
    [
        (nn.ReLU(), None, "convert_linear_: model must have an nn.Linear to convert, got ReLU without any$"),
        (nn.Linear(3, 3), lambda *_: False, "got Linear without any that filter_fn accepts"),
        (Subclass(3, 3), None, "got Subclass without any$"),
    ],
)
def test_nothing_to_convert_gets_a_sentence(model: nn.Module, filter_fn: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        convert_linear_(model, filter_fn)


def test_no_model_gets_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"convert_linear_: model must be an nn\.Module, got NoneType"):
        convert_linear_(None)  # type: ignore[arg-type]


def test_it_says_what_it_converted_and_left(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Conv2d(8, 3, 1, bias=False)))
    with caplog.at_level("INFO", "amp_kernels"):
        convert_linear_(model)
    assert caplog.record_tuples == [
        ("amp_kernels", 20, "convert_linear_: converted 72.7% (*.weight 72.7%) of the parameters' bytes; left 27.3% "
         "(*.*.weight of Conv2d 27.3%)")
    ]  # fmt: skip


def test_codes_are_not_loaded_as_floats() -> None:
    layer = convert_linear_(nn.Sequential(nn.Linear(4, 4)))
    before = layer[0].weight.clone()
    codes = {"0.weight": torch.ones(4, 4, dtype=torch.int8)}
    with pytest.raises(RuntimeError, match=r"load_state_dict: 0\.weight must be floats, got torch\.int8; make"):
        layer.load_state_dict(codes, strict=False)
    assert torch.equal(layer[0].weight, before)
