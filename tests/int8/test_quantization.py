"""Models to int8: which layers are replaced, calibration, QAT, and chains of codes."""

import collections
import copy
import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from gpt2 import GPT2, Conv1D
from int8_networks import codes_passed
from torch import nn

import amp_kernels
from amp_kernels.nn import Int8Conv1d, Int8Embedding, Int8Linear
from amp_kernels.quantization import ObservedLinear, _affine, convert_, prepare_, prepare_qat_, quantize_
from amp_kernels.testing.common import randn


def mlp(device="cpu", seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 20), nn.ReLU(), nn.Linear(20, 5)).to(device)


class Tied(nn.Module):
    """A language model's embedding, which is the weight of its last layer too."""

    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index):
        return self.head(self.middle(self.table(index)))


# --------------------------------------------------------------------------------------------------------- quantize_
def test_layers_are_replaced_in_place(device):
    model = mlp(device)
    x = randn(8, 16).to(device)
    expected = [Int8Linear.from_linear(model[i], "dynamic") for i in (0, 2, 4)]
    assert quantize_(model, "dynamic") is model
    by_hand = expected[2](F.relu(expected[1](F.relu(expected[0](x)))))
    assert torch.equal(model(x), by_hand)
    assert [type(layer) for layer in model] == [Int8Linear, nn.ReLU, Int8Linear, nn.ReLU, Int8Linear]


def test_a_weight_only_model_takes_half_of_fp16():
    model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).half()
    fp16 = sum(tensor.nbytes for tensor in model.state_dict().values())
    quantize_(model)
    int8 = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert [type(layer) for layer in model] == [Int8Embedding, Int8Linear, nn.ReLU, Int8Linear]
    scales = 4 * (1000 + 1024 + 256) + 1024 + 256  # scales; and biases have two bytes in both
    kinds = 3 * 2 + 2 * len("weight_only")  # dtypes and modes
    assert int8 == fp16 / 2 + scales + kinds and int8 < 0.51 * fp16
    assert model(torch.arange(10)).dtype == torch.float16


def test_filter_and_names():
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(5, 5)})
    seen = []
    quantize_(model, filter_fn=lambda layer, name: seen.append((type(layer), name)) or name != "head")
    assert seen == [(nn.Linear, name) for name in ("body.0", "body.2", "body.4", "head")]
    assert type(model["head"]) is nn.Linear and type(model["body"][4]) is Int8Linear


def test_a_model_that_is_a_layer_is_returned_new():
    assert type(quantize_(nn.Linear(3, 3))) is Int8Linear
    assert type(prepare_(nn.Linear(3, 3))) is ObservedLinear


@pytest.mark.parametrize("prepare", [prepare_, prepare_qat_])
def test_prepared_layers_keep_plain_attributes(prepare):
    layers = nn.Linear(3, 3), nn.Conv2d(3, 3, 1), nn.Embedding(3, 3, padding_idx=1)
    for layer in layers:
        layer.note = "of the user"
    for prepared, layer in zip(prepare(nn.Sequential(*layers)), layers, strict=True):
        assert isinstance(prepared, type(layer)) and type(prepared) is not type(layer)
        plain = {name: value for name, value in vars(layer).items() if name not in vars(nn.Module())}
        assert plain.items() <= vars(prepared).items() and "note" in plain


def test_a_layer_used_twice_stays_one():
    layer = nn.Linear(16, 16)
    model = quantize_(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2] and type(model[0]) is Int8Linear


class Equal(nn.Module):
    """It has no hash."""

    def __eq__(self, other):
        return type(other) is Equal

    __hash__ = None


class Attributes(nn.Module):
    """Layers in lists, dicts and tuples. A list and a tuple hold themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.MultiheadAttention(4, 2)])
        self.list = [*self.layers, Equal()]
        self.same, self.dict = self.list, collections.OrderedDict(layers=[*self.layers], names=["a"])
        self.list.append(self.list)
        self.tuple = ([*self.layers],)
        self.tuple[0].append(self.tuple)
        self.deque = collections.deque(self.layers)
        self.named = collections.namedtuple("Layers", "linear attention")(*self.layers)
        self.vocabulary = {str(i): i for i in range(9)}

    def containers(self):
        return self.list, self.dict, self.dict["layers"], self.tuple[0], self.deque, self.vocabulary


@pytest.mark.parametrize("convert", [quantize_, prepare_, prepare_qat_])
def test_lists_and_dicts_stay_the_same_objects(convert):
    model = Attributes()
    before, named = model.containers(), type(model.named)
    elements = [[id(element) for element in container] for container in before]
    model.refused = nn.Linear(4, 4).double()
    attention = model.layers[1]
    with pytest.raises(TypeError, match="the weight of 'refused' must be"):
        convert(model)
    assert model.layers[1] is attention
    del model.refused
    for _ in range(2):  # after the error, and after the conversion
        for now, was in zip(model.containers(), before, strict=True):
            assert now is was
        assert model.same is model.list and model.list[-1] is model.list and type(model.named) is named
        assert model.list[:2] == model.dict["layers"] == model.tuple[0][:2] == [*model.deque] == [*model.named]
        assert all(a is b for a, b in zip(model.list, model.layers, strict=False))
        if attention is model.layers[1]:
            assert [[id(element) for element in container] for container in before] == elements
            convert(model)
            assert model.layers[1] is not attention and type(model.layers[0]) is not nn.Linear


@pytest.mark.parametrize("convert", [quantize_, prepare_, prepare_qat_])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Embedding(4, 4),
        lambda: nn.Conv2d(4, 4, 1),
        lambda: nn.ConvTranspose2d(4, 4, 1),
        lambda: Conv1D(4, 4),
    ],
)
def test_what_was_added_to_a_layer_is_not_lost(make, convert):
    for name, add in (
        ("gain", lambda layer: layer.register_parameter("gain", nn.Parameter(torch.ones(4)))),
        ("seen", lambda layer: layer.register_buffer("seen", torch.ones(4))),
        ("extra", lambda layer: layer.add_module("extra", nn.ReLU())),
    ):
        model = nn.Sequential(nn.Linear(4, 4), make())
        add(model[1])
        with pytest.raises(ValueError, match=f"'1' must have no parameters, .*, got {name}, .* with filter_fn"):
            convert(model)
        assert type(model[0]) is nn.Linear
        convert(model, filter_fn=lambda _, name: name == "0")
        assert type(model[0]) is not nn.Linear and hasattr(model[1], name)
        prepared = prepare_(nn.Sequential(make()))
        add(prepared[0])
        with pytest.raises(ValueError, match=f"convert_: '0' must have no parameters, .*, got {name},"):
            convert_(prepared)


def in_int8(model, kind, *inputs, filter_fn=None):
    """In the way that `kind` names; after `inputs`, where ranges are needed."""
    if kind in ("weight_only", "dynamic"):
        return quantize_(model, kind, filter_fn)
    prepare_(model, filter_fn) if kind == "static" else prepare_qat_(model, kind.removeprefix("qat "), filter_fn)
    model(*inputs)
    return convert_(model)


KINDS = ("weight_only", "dynamic", "static", "qat dynamic", "qat static")


@pytest.mark.parametrize("kind", KINDS)
def test_shared_weights_are_quantized_once(kind):
    model = in_int8(Tied(), kind, torch.arange(50))
    expected, state = model(torch.arange(50)), model.state_dict()
    for _ in range(2):
        assert model.table.weight_codes is model.head.weight_codes
        assert model.table.weight_scale is model.head.weight_scale
        assert model.table.weight_dtype is model.head.weight_dtype
        assert torch.equal(model(torch.arange(50)), expected)
        model.head.weight = model.table.weight  # tie_weights of transformers, which may come at any time
    ranges = 2 * (4 + 4) if "static" in kind else 0
    parameters = 50 * 20 + 16 * 20 + 16 * 4
    kinds = 2 * 4 + 2 * len(model.head.mode)
    assert sum({t.data_ptr(): t.nbytes for t in state.values()}.values()) == parameters + ranges + kinds
    with pytest.raises(TypeError, match="Int8Linear: weight must be the weight of another int8 layer"):
        model.head.weight = nn.Embedding(50, 16).weight


@pytest.mark.parametrize("kind", KINDS)
def test_tied_layers_are_converted_both_or_neither(kind):
    class Normed(nn.Embedding):
        """A class that is not converted."""

        def forward(self, index):
            return F.normalize(super().forward(index), dim=-1)

    index = torch.arange(50)
    for spared in (nn.Embedding, nn.Linear):
        model = in_int8(Tied(), kind, index, filter_fn=lambda m, n, s=spared: n == "middle" or type(m) is not s)
        assert type(model.middle) is Int8Linear
        assert model.head.weight is model.table.weight and type(model.head.weight) is nn.Parameter
        model.head.weight = model.table.weight
        assert model(index).isfinite().all()
    model = Tied()
    model.table = Normed(50, 16)
    model.head.weight = model.table.weight
    assert type(in_int8(model, kind, index).head.weight) is nn.Parameter and type(model.middle) is Int8Linear
    with pytest.raises(ValueError, match="where each of these shares its weight with a layer that is not replaced"):
        quantize_(nn.ModuleList([model.table, model.head]))
    model = prepare_(Tied(), lambda layer, name: name == "middle" or type(layer) is nn.Linear)
    model(index)
    prepared = prepare_(nn.Linear(16, 50))
    prepared(torch.ones(1, 16))
    prepared.weight, model.head = model.table.weight, prepared  # tied after it was prepared
    with pytest.raises(ValueError, match="convert_: 'head' must share its weight only with prepared layers, got one"):
        convert_(model)
    assert isinstance(model.middle, ObservedLinear)


class Inherits(nn.Linear):
    pass


class TransposesItsWeight(nn.Linear):
    """As transformers' FalconLinear."""

    def forward(self, input):
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Scaled(nn.Embedding):
    """As the tables of words of BART and NLLB."""

    def __init__(self, rows, width, scale):
        super().__init__(rows, width)
        self.scale = scale

    def forward(self, index):
        return super().forward(index) * self.scale


class ScaledByABuffer(nn.Embedding):
    """As the table of words of Gemma."""

    def __init__(self, rows, width, scale):
        super().__init__(rows, width)
        self.register_buffer("embed_scale", torch.tensor(scale), persistent=False)

    def forward(self, index):
        return super().forward(index) * self.embed_scale.to(self.weight.dtype)


class InheritsConv(nn.Conv1d):
    pass


class OfSubclasses(nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.one, self.two = table(50, 16, 5.3), Inherits(16, 24), TransposesItsWeight(24, 16)
        self.conv, self.head = InheritsConv(16, 16, 1), nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index):
        x = self.two(F.gelu(self.one(self.table(index))))
        return self.head(x + self.conv(x.mT).mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", [Scaled, ScaledByABuffer])
@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_that_compute_the_same_are_converted(kind, table, dtype):
    model, index = OfSubclasses(table).to(dtype), torch.arange(50).view(2, 25)
    if table is ScaledByABuffer:
        model.table.embed_scale = torch.tensor(5.3)  # it is rounded in each call, as the weight may be of 16 bits
    original, expected = copy.deepcopy(model), model(index)
    if kind.startswith("qat"):
        prepare_qat_(model, kind.removeprefix("qat "))(index).square().sum().backward()
        predicted = model.eval()(index)
        assert torch.equal(convert_(model)(index), predicted)
    else:
        in_int8(model, kind, index)
    kinds = {type(layer).__name__ for layer in model.modules()} - {"OfSubclasses"}
    assert kinds == {"Int8Linear", "Int8Embedding", "Int8Conv1d"}
    assert model.head.weight_codes is model.table.weight_codes
    assert (model(index) - expected).norm() < 0.03 * expected.norm()
    rounded = original.table.weight.data.copy_(model.table.weight)
    assert torch.equal(model.table(index), original.table(index)) and rounded.isfinite().all()


class Activated(nn.Linear):
    def forward(self, input):
        return super().forward(input).relu()


class Limited(nn.Linear):
    def forward(self, input):
        return super().forward(input).clamp(-1e4, 1e4)


class Dropped(nn.Linear):
    def forward(self, input):
        return F.dropout(super().forward(input), 0.5, self.training)


class WithAnArgument(nn.Linear):
    def forward(self, input, scale=1.0):
        return scale * super().forward(input)


class WithAParameter(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, input):
        return super().forward(input) * self.gain


class ScaledLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Shifted(nn.Embedding):
    """As the positions of BART."""

    def forward(self, index):
        return super().forward(index + 2)


class DividedByItsWidth(nn.Embedding):
    def forward(self, index):
        return super().forward(index) / self.weight.shape[1]


class ScaledByTheWidthOfRows(nn.Embedding):
    def forward(self, index):
        rows = super().forward(index)
        return rows * rows.shape[-1] ** 0.5


class Masked(nn.Embedding):
    def forward(self, index):
        rows = super().forward(index)
        return rows if self.padding_idx is None else rows * (index != self.padding_idx).unsqueeze(-1)


class MasksTheLastRow(nn.Embedding):
    def forward(self, index):
        return super().forward(index) * (index != self.num_embeddings - 1).unsqueeze(-1)


class Hashed(nn.Embedding):
    def forward(self, index):
        return super().forward(index % self.num_embeddings)


class Clamped(nn.Embedding):
    def forward(self, index):
        return super().forward(index.clamp(min=0))


class TakesBytes(nn.Embedding):
    def forward(self, index):
        return super().forward(index.long())


class CastsItsInput(nn.Linear):
    def forward(self, input):
        return super().forward(input.to(self.weight.dtype))


class ComputesInFp32(nn.Linear):
    def forward(self, input):
        return F.linear(input.float(), self.weight.float()) if input.dtype == torch.bfloat16 else super().forward(input)


class CutsItsOutput(nn.Linear):
    def forward(self, input):
        return super().forward(input)[..., :50]


class CutsItsInput(nn.Linear):
    def forward(self, input):
        return super().forward(input[..., : self.weight.shape[1]])


class Flattens(nn.Linear):
    def forward(self, input):
        return super().forward(input.reshape(-1, self.weight.shape[1])).view(*input.shape[:-1], -1)


class WithAMethod(nn.Embedding):
    def attend(self, x):
        return x @ self.weight.T


class WithAnAttribute(nn.Linear):
    rank = 0


class WithPositions(nn.Embedding):
    def __init__(self, rows, width):
        super().__init__(rows, width)
        self.register_buffer("positions", torch.arange(rows), persistent=False)


class WithAScale(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.ones(()), persistent=False)


class Standardized(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean(), bias)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: kind(64, 64) for kind in (Activated, Limited, Dropped, WithAnArgument, WithAParameter)),
        lambda: ScaledLinear(64, 64), lambda: Shifted(64, 64), lambda: Standardized(64, 64, 1),
        lambda: Masked(64, 64, padding_idx=0),
        *(
            lambda kind=kind: kind(64, 64) for kind in (
                DividedByItsWidth, ScaledByTheWidthOfRows, MasksTheLastRow, Hashed, Clamped, TakesBytes, CastsItsInput,
                ComputesInFp32, CutsItsOutput, CutsItsInput, Flattens, WithAMethod, WithAnAttribute, WithPositions,
                WithAScale,
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("convert", [quantize_, prepare_, prepare_qat_])
def test_subclasses_that_compute_something_else_are_named_with_their_modules(convert, make, caplog):
    model = nn.Sequential(nn.Linear(64, 64), make())
    left, random = model[1], torch.get_rng_state()
    _, line, warns = said(caplog, lambda: convert(model))
    assert model[1] is left and warns and type(model[0]) is not nn.Linear
    assert f"*.weight of {__name__}.{type(left).__name__} " in line
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_times_0_stays_0(kind):
    """As a gate that is not trained yet."""
    index = torch.arange(50)
    model = in_int8(nn.Sequential(Scaled(50, 16, 0.0), nn.Linear(16, 4)), kind, index)
    assert type(model[0]) is Int8Embedding and model[0].embed_scale == 0 and not model[0](index).any()


def test_a_layer_that_torch_reads_and_does_not_call_is_left():
    """The projection of a subclass of nn.MultiheadAttention, which no MultiheadAttention of ours replaces."""

    class Attention(nn.MultiheadAttention):
        pass

    model = nn.ModuleList([Attention(16, 2), nn.Linear(16, 16), nn.LazyLinear(4)])
    quantize_(model)
    assert type(model[0].out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
    assert type(model[1]) is Int8Linear and type(model[2]) is nn.LazyLinear


@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 16), lambda: nn.Conv1d(4, 4, 3)])
def test_a_parametrized_layer_is_named_with_the_way_out(make, caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(make()))
    _, line, warns = said(caplog, lambda: quantize_(model))
    assert warns and "of ParametrizationList, see torch.nn.utils.parametrize.remove_parametrizations" in line
    with pytest.raises(ValueError, match=r"without any; call torch\.nn\.utils\.parametrize\.remove_parametrizations"):
        prepare_(model[1:])
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert type(quantize_(model[1:])[0]) in (Int8Linear, Int8Conv1d)


def test_a_layer_that_no_batch_reaches_is_named_with_the_way_out():
    """As the global projections of Longformer."""
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "query_global": nn.Linear(4, 4)})
    model["query"](torch.ones(1, 4))
    prepared = prepare_(copy.deepcopy(model))
    prepared["query"](torch.ones(1, 4))
    with pytest.raises(
        ValueError, match=r"layer 'query_global' must .* if its input never reaches the layer, leave"
    ) as e:
        convert_(prepared)
    filter_fn = eval(str(e.value).rpartition("filter_fn=")[2])
    prepare_(model, filter_fn)["query"](torch.ones(1, 4))
    assert type(convert_(model)["query"]) is Int8Linear and type(model["query_global"]) is nn.Linear


@pytest.mark.parametrize("unused", ["0", "10.0"])
def test_the_way_out_leaves_no_other_layer(unused):
    layers = {str(i): nn.Sequential(nn.Linear(4, 4)) if i == 10 else nn.Linear(4, 4) for i in range(12)}
    model, x = nn.ModuleDict(layers), torch.ones(1, 4)

    def run():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != unused:
                layer(x)

    original = copy.deepcopy(model)
    prepare_(model)
    run()
    with pytest.raises(ValueError, match=f"layer '{unused}' must have seen a batch") as e:
        convert_(model)
    model = prepare_(original, eval(str(e.value).rpartition("filter_fn=")[2]))
    run()
    convert_(model)
    assert [name for name, layer in model.named_modules() if type(layer) is nn.Linear] == [unused]


class ReadsWeights(nn.Module):
    """Reads weights next to calling layers: positions as CLIP, a dtype as T5, a product by hand as RWKV."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.positions = nn.Embedding(50, 16), nn.Embedding(60, 16)
        self.wi, self.wo = nn.Linear(16, 32), Conv1D(16, 32)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, index):
        x = self.table(index) + self.positions.weight[: index.shape[-1]]
        hidden = self.wi(x).relu().to(self.wo.weight.dtype)
        x = x + hidden @ self.wo.weight + self.wo(hidden)
        return F.linear(x, self.head.weight) + self.head(x)


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_read_weights(kind):
    """By hand, as if each weight was a rounded float; the layers that are called compute as they did."""
    model, index = ReadsWeights(), torch.arange(50).view(2, 25)
    rounded = copy.deepcopy(model)
    for layer in (rounded.table, rounded.positions, rounded.wi, rounded.head):
        layer.weight.data = amp_kernels.quantize_int8(layer.weight.detach(), dim=-1).dequantize()
    rounded.wo.weight.data = amp_kernels.quantize_int8(rounded.wo.weight.detach(), dim=0).dequantize()
    floats, expected = model(index), rounded(index)
    found = in_int8(model, kind, index)(index)
    for name in ("table", "positions", "wi", "wo", "head"):
        assert torch.equal(getattr(model, name).weight, getattr(rounded, name).weight), name
        assert getattr(model, name).weight.shape == getattr(rounded, name).weight.shape
    if kind == "weight_only":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:  # inputs have codes too
        assert (found - floats).abs().max() < 4 * (expected - floats).abs().max()


class ReadsAConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3)

    def forward(self, x):
        return F.conv1d(self.conv(x), self.conv.weight)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_weights_that_were_read_in_training_are_named(mode, caplog):
    """Their readers had floats until then."""
    index, line = torch.arange(50).view(2, 25), torch.randn(2, 1, 20)
    cases = (ReadsWeights(), index, "positions, wo, head"), (ReadsAConvolution(), line, "conv"), (Tied(), index, None)
    for model, x, names in cases:
        optimizer = torch.optim.SGD(prepare_qat_(model, mode).parameters(), 0.1)
        model(x).square().mean().backward()
        optimizer.step()
        before = model.eval()(x)
        caplog.clear()
        with caplog.at_level("INFO", "amp_kernels"):
            convert_(model)
        assert torch.equal(model(x), before) == (names is None) and len(caplog.messages) == 1 + (names is not None)
        assert names is None or caplog.messages[0].endswith(f"what is computed from them may change: {names}")
        assert names is None or "in forward or elsewhere" in caplog.messages[0]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_with_max_norm(kind):
    """In every mode, rows that are looked up have at most this norm. QAT looks up the rows of the later int8 table."""
    torch.manual_seed(0)
    index = torch.arange(25).view(5, 5)
    table = nn.Embedding(50, 16, max_norm=3.0, norm_type=2.0)
    model = nn.Sequential(table, nn.Linear(16, 4))
    exact = copy.deepcopy(model)[0]
    expected = exact(index)
    if kind.startswith("qat"):
        prepare_qat_(model, kind.removeprefix("qat "))(index)
        before = model[0](index)
        (before * randn(5, 5, 16, seed=1)).sum().backward()
        assert table.weight.grad[:25].ne(0).all() and not table.weight.grad[25:].any()
        found = convert_(model)[0](index)
        assert torch.equal(found, before)
    else:
        found = in_int8(model, kind, index)[0](index)
    step = model[0].weight_scale[index]
    assert found.norm(2, -1).max() < 3.0001 and ((found - expected).abs() < 2 * step).all()
    assert not torch.equal(model[0].weight[index], found)  # `weight` holds the rows before they are scaled down


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_int8_in_every_mode_unless_told_otherwise(kind, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16, padding_idx=3), nn.Linear(16, 5)).to(device)
    index = torch.arange(50, device=device)
    expected = Int8Embedding.from_embedding(model[0])
    spared = in_int8(copy.deepcopy(model), kind, index, filter_fn=lambda layer, _: type(layer) is not nn.Embedding)
    assert type(spared[0]) is nn.Embedding and torch.equal(spared[0].weight, model[0].weight)
    table = in_int8(model, kind, index)[0]
    assert type(table) is Int8Embedding and table.padding_idx == 3
    assert torch.equal(table(index), expected(index))


def test_a_model_of_embeddings_alone_needs_no_batch():
    model = convert_(prepare_(nn.Embedding(4, 4)))
    assert type(model) is Int8Embedding


@pytest.mark.parametrize("sparse", [False, True])
def test_qat_trains_a_table(sparse, device):
    """Straight through the rounding: the gradient is that of the float table, where nothing is clamped."""
    table = nn.Embedding(20, 8, padding_idx=2, sparse=sparse).to(device)
    index, weights = torch.tensor([[1, 2, 1], [5, 19, 0]], device=device), randn(2, 3, 8).to(device)
    (table(index) * weights).sum().backward()
    expected, table.weight.grad = table.weight.grad, None
    trained = prepare_qat_(table)
    assert trained.weight is table.weight
    found = trained(index)
    (found * weights).sum().backward()
    assert trained.weight.grad.is_sparse == sparse
    assert torch.equal(trained.weight.grad.to_dense(), expected.to_dense())
    assert torch.equal(convert_(trained)(index), found)


def test_attention_and_transformer_layers(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval().to(device)
    x = randn(2, 5, 32).to(device)
    with torch.no_grad():  # where torch has a fused kernel that reads the weights itself
        expected = model(x)
        found = quantize_(model)(x)
    assert type(model.layers[0].linear1) is Int8Linear
    assert type(model.layers[0].self_attn.out_proj) is type(model.layers[0].self_attn.in_proj) is Int8Linear
    assert 0 < (found - expected).abs().max() < 0.03


class Classifier(nn.Module):
    """An encoder deep inside, whose layers torch's fused kernel takes."""

    def __init__(self, activation):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, activation=activation)
        self.body = nn.ModuleList([nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))])
        self.head = nn.Linear(32, 4)

    def forward(self, x, mask):
        return self.head(self.body[0](x, src_key_padding_mask=mask))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("kind", [*KINDS, "prepared", "second layer alone"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padding_mask_of_a_transformer(kind, activation, device):
    """torch makes nested tensors of the batch in eval mode without gradients, for its fused kernel alone."""
    torch.manual_seed(0)
    model, x = Classifier(activation).eval().to(device), randn(3, 5, 32).to(device)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]], device=device)
    expected = model(x, mask).detach()  # without torch's fused kernel, whose gelu is approximated on CUDA
    with torch.no_grad():
        if kind == "prepared":
            prepare_(model)
        elif kind == "second layer alone":
            quantize_(model, filter_fn=lambda _, name: name.startswith("body.0.layers.1"))
        else:
            if kind == "qat static":
                prepare_qat_(model, "static").train()(x, mask)
                model.eval()
            elif kind == "static":
                prepare_(model)(x, mask)
            convert_(model) if "static" in kind else in_int8(model, kind, x, mask)
        found = model(x, mask)
    error = (found - expected)[~mask].abs().max()  # what is made of padding is nobody's
    assert error < 1e-6 if kind == "prepared" else 0 < error < 0.06
    for sentence, length in zip(range(3), (5, 3, 4), strict=True):  # as without padding
        with torch.no_grad():
            alone = model(x[sentence : sentence + 1, :length], torch.zeros(1, length, dtype=torch.bool, device=device))
        torch.testing.assert_close(found[sentence, :length], alone[0], rtol=1e-3, atol=0.02)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_words():
    """As an encoder makes them whose layers were converted without it."""
    x, mask = randn(1, 5, 32), torch.tensor([[False, False, False, True, True]])
    for convert in (quantize_, prepare_, prepare_qat_):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
        convert(encoder.layers)
        with torch.no_grad(), pytest.raises(TypeError, match=r"x must be a dense tensor, got a nested one; .*_nested"):
            encoder(x, src_key_padding_mask=mask)
        encoder.use_nested_tensor = False
        with torch.no_grad():
            encoder(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("kind", ["weight_only", "dynamic", "static", "qat static"])
def test_a_checkpoint_fits_a_new_model(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    x = randn(8, 16)

    def made(seed):
        return in_int8(mlp(seed=seed), kind, randn(8, 16, seed=seed))

    model, new = made(0), made(1)
    expected = model(x)
    assert not torch.equal(new(x), expected)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    new.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(new(x), expected)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)


# ------------------------------------------------------------------------------------------------------------- Conv1D
def linears_of(model):
    """The same model with nn.Linear in the place of Conv1D."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, Conv1D):
                linear = nn.Linear(layer.nx, layer.nf)
                with torch.no_grad():
                    linear.weight.copy_(layer.weight.t())
                    linear.bias.copy_(layer.bias)
                setattr(parent, name, linear)
    return model


@pytest.mark.parametrize("mode", ["weight_only", "dynamic", "static", "qat dynamic", "qat static"])
def test_conv1d_is_converted_as_linear(mode, device):
    torch.manual_seed(0)
    model = GPT2().to(device)
    index = (torch.arange(40, device=device) * 7 % 50).view(4, 10)
    results = []
    for changed in (model, linears_of(model).to(device)):
        before = changed(index)
        if mode in ("weight_only", "dynamic"):
            quantize_(changed, mode)
        elif mode == "static":
            assert torch.equal(prepare_(changed)(index), before)
            convert_(changed)
        else:
            weights = dict(changed.named_parameters())
            prepare_qat_(changed, mode.removeprefix("qat "))
            assert all(p is weights[name] for name, p in changed.named_parameters())  # as an optimizer may have them
            changed(index).square().sum().backward()
            grads = {name: p.grad for name, p in changed.named_parameters()}
            assert grads["h.0.c_fc.weight"].shape == weights["h.0.c_fc.weight"].shape
            predicted = changed(index)
            convert_(changed)
            assert torch.equal(changed(index), predicted)
        layers = [changed.h[0].c_fc, changed.h[1].c_proj, changed.lm_head]
        assert all(type(layer) is Int8Linear and layer.weight_codes.is_contiguous() for layer in layers)
        assert layers[0].weight_codes.shape == (128, 32) and layers[0].in_features == 32
        results.append((changed(index), layers[0].weight_codes))
    assert torch.equal(results[0][1], results[1][1]) or mode.startswith("qat")
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])


def test_gradients_of_a_conv1d_in_training():
    torch.manual_seed(0)
    conv = Conv1D(24, 16)
    linear = nn.Linear(16, 24)
    linear.weight, linear.bias = (
        nn.Parameter(conv.weight.detach().t().clone()),
        nn.Parameter(conv.bias.detach().clone()),
    )
    x = randn(8, 16)
    for layer in (conv, linear):
        prepare_qat_(layer)(x).square().sum().backward()
    torch.testing.assert_close(conv.weight.grad.t(), linear.weight.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(conv.bias.grad, linear.bias.grad)


def test_a_subclass_of_conv1d_and_other_classes_of_the_name_are_left_alone():
    class Sub(Conv1D):
        pass

    class Other(nn.Module):
        pass

    Other.__name__ = "Conv1D"
    for layer in (Sub(4, 4), Other()):
        with pytest.raises(
            ValueError,
            match=r"must have an nn\.Linear, nn\.Conv1d, .*, nn\.ConvTranspose2d or nn\.Embedding to replace",
        ):
            prepare_(nn.Sequential(layer))


# ------------------------------------------------------------------------------------------------- what it says
def said(caplog, call):
    caplog.clear()
    with caplog.at_level("INFO", "amp_kernels"):
        result = call()
    ((name, level, line),) = caplog.record_tuples
    assert name == "amp_kernels"
    return result, line, level == logging.WARNING


def test_what_was_converted_and_left_is_said(caplog):
    matrices = 2 * 2 * 128 * 32 * 4
    table, vectors = 50 * 32 * 4, 2 * (128 + 32 + 64) * 4
    total = matrices + table + vectors
    blocks = f"h.*.c_fc.weight {matrices / 2 / total:.1%}, h.*.c_proj.weight {matrices / 2 / total:.1%}"
    both = f"{blocks}, wte.weight {table / total:.1%}"
    biases = f"h.*.c_fc.bias of transformers.pytorch_utils.Conv1D {2 * 128 * 4 / total:.1%}"
    expected = (
        f"converted {(matrices + table) / total:.1%} ({both}) of the parameters' bytes; "
        f"left {vectors / total:.1%} ({biases})"
    )
    calls = (quantize_, functools.partial(quantize_, mode="dynamic"), prepare_, prepare_qat_)
    for call, name in zip(calls, ("quantize_", "quantize_", "prepare_", "prepare_qat_"), strict=True):
        model, text, warns = said(caplog, lambda call=call: call(GPT2()))
        assert (text, warns) == (f"{name}: {expected}", False)
    of_prepared = expected.replace("transformers.pytorch_utils.Conv1D", "QATLinear")
    assert said(caplog, lambda: convert_(model))[1:] == (f"convert_: {of_prepared}", False)
    # The weight that the last layer shares stays for an embedding that is left.
    spares = functools.partial(quantize_, filter_fn=lambda layer, _: type(layer) is not nn.Embedding)
    _, text, warns = said(caplog, lambda: spares(GPT2()))
    assert f"converted {matrices / total:.1%} ({blocks})" in text
    assert f"(wte.weight of Embedding by filter_fn {table / total:.1%}" in text
    assert not warns


def test_a_sizable_part_that_is_left_is_a_warning(caplog):
    def model(width):
        return nn.Sequential(nn.Linear(16, 16, bias=False), nn.ConvTranspose2d(1, width, 5, bias=False))

    assert not said(caplog, lambda: quantize_(model(1)))[2]
    converted, line, warns = said(caplog, lambda: quantize_(model(4)))
    assert warns and type(converted[0]) is Int8Linear
    left = "left 28.1% (*.weight of ConvTranspose2d with kernel_size=(5, 5), stride=(1, 1) 28.1%)"
    assert line == f"quantize_: converted 71.9% (*.weight 71.9%) of the parameters' bytes; {left}"
    two = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    assert not said(caplog, lambda: quantize_(two, filter_fn=lambda _, name: name == "0"))[
        2
    ]  # filter_fn left the other


# -------------------------------------------------------------------------------------------------------- checkpoints
def test_the_two_lines_that_save_and_load(tmp_path):
    torch.manual_seed(0)
    model, index = quantize_(GPT2()), torch.arange(50)
    expected = model(index)
    torch.save(model.state_dict(), tmp_path / "int8.pt")
    new = quantize_(GPT2())
    assert not torch.equal(new(index), expected)
    new.load_state_dict(torch.load(tmp_path / "int8.pt"))
    assert torch.equal(new(index), expected) and new.lm_head.weight_codes is new.wte.weight_codes
    parameters = sum(p.nbytes for p in GPT2().parameters())
    assert (tmp_path / "int8.pt").stat().st_size < parameters / 4 + 4 * (50 + 2 * (128 + 32)) + 2 * 224 * 4 + 8192
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, tmp_path / "int8.safetensors")
    again = quantize_(GPT2())
    assert safetensors.load_model(again, tmp_path / "int8.safetensors") == (set(), [])
    assert torch.equal(again(index), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_int8_and_float_checkpoints_are_not_mixed(strict):
    index = torch.arange(50)
    for prepare in (lambda model: model, prepare_, prepare_qat_):
        floats, int8 = prepare(GPT2()), quantize_(GPT2())
        table, weight = int8.wte(index), floats.lm_head.weight.clone()
        with pytest.raises(RuntimeError, match=r"wte\.weight must be codes called weight_codes, got torch\.float32"):
            int8.load_state_dict({k: v for k, v in floats.state_dict().items() if k.endswith("weight")}, strict=strict)
        codes = {k: v for k, v in int8.state_dict().items() if "norm" not in k}
        with pytest.raises(RuntimeError, match=r"h\.1\.c_fc\.weight"):
            floats.load_state_dict(codes, strict=strict)
        assert torch.equal(int8.wte(index), table) and torch.equal(floats.lm_head.weight, weight)


# -------------------------------------------------------------------------------------------------------- calibration
def test_calibration_sees_every_batch_and_changes_nothing(device):
    model = mlp(device)
    batches = [randn(7, 16, seed=seed).to(device) for seed in range(3)] + [torch.empty(0, 16, device=device)]
    expected = [model(x) for x in batches]
    prepare_(model)
    assert all(torch.equal(model(x), y) for x, y in zip(batches, expected, strict=True))
    range_ = torch.stack([torch.cat(batches).min(), torch.cat(batches).max()])
    whole = amp_kernels.quantize_int8(range_, symmetric=False)
    convert_(model)
    assert torch.equal(model[0].input_scale, whole.scale) and torch.equal(model[0].input_zero_point, whole.zero_point)


def test_ranges_keep_their_dtype_and_place():
    model = prepare_(nn.Linear(4, 4))
    model(torch.full((1, 4), 1e5))
    model.half()
    assert model.observer.high.item() == 1e5 and model.observer.high.dtype == torch.float32


def test_codes_go_from_layer_to_layer(device):
    model = mlp(device)
    x = randn(64, 16).to(device)
    prepare_(model)
    model(x[:32])
    by_hand = copy.deepcopy(model)
    convert_(model)
    assert [type(layer) for layer in model] == [Int8Linear, nn.ReLU, Int8Linear, nn.ReLU, Int8Linear]
    assert codes_passed(model, x) == 2
    alone = [convert_(copy.deepcopy(by_hand[i])) for i in (0, 2, 4)]
    assert torch.equal(model(x), alone[2](F.relu(alone[1](F.relu(alone[0](x))))))
    assert model(x).dtype == torch.float32


def test_codes_stop_where_another_sees_them(device):
    x = randn(8, 16).to(device)
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)

    class Other(nn.Sequential):
        pass

    for model in (
        nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)),
        nn.Sequential(nn.Linear(16, 16), hooked, nn.Linear(16, 16)),
        Other(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)),
    ):
        prepare_(model.to(device))
        model(x)
        assert codes_passed(convert_(model), x) == 0


def test_a_chain_of_what_was_always_0_still_has_its_relu(device):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).to(device)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
    prepare_(model)
    model(torch.tensor([[-100.0, -50.0]], device=device))
    convert_(model)
    assert model(torch.tensor([[-100.0, -50.0]], device=device)).abs().max() == 0


# ---------------------------------------------------------------------------------------------------------------- QAT
@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qat_predicts_what_the_converted_model_predicts(mode, dtype, device):
    model = prepare_qat_(mlp(device).to(dtype), mode)
    x, y = randn(64, 16, dtype=dtype).to(device), (torch.arange(64) % 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    model.eval()
    unseen = 3 * randn(100, 16, dtype=dtype, seed=1).to(device)
    before = model(unseen)
    with torch.autocast(device.type, torch.bfloat16):
        before_autocast = model(unseen)
    convert_(model)
    assert type(model[0]) is Int8Linear and model[0].mode == mode
    assert torch.equal(model(unseen), before)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(model(unseen), before_autocast)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_qat_gradients_are_those_of_fake_quantization(mode, device):
    original = nn.Linear(16, 9).to(device)
    layer = prepare_qat_(original, mode)
    assert layer.weight is original.weight and layer.bias is original.bias
    x = randn(4, 8, 16).to(device)
    layer(x)  # a static range that the next inputs exceed
    layer.eval()
    x = (2 * randn(4, 8, 16, seed=1)).to(device).requires_grad_()
    grad = randn(4, 8, 9, seed=2).to(device)
    layer(x).backward(grad)
    ours = [x.grad, original.weight.grad, original.bias.grad]
    options = {"dim": -1, "symmetric": False}
    if mode == "static":
        options = dict(zip(("scale", "zero_point"), _affine(layer.observer.low, layer.observer.high), strict=True))
    inputs = [
        x.detach().clone().requires_grad_(),
        *(p.detach().clone().requires_grad_() for p in original.parameters()),
    ]
    fake = amp_kernels.fake_quantize_int8
    y = F.linear(fake(inputs[0], **options), fake(inputs[1], dim=-1), inputs[2])
    for mine, expected in zip(ours, torch.autograd.grad(y, inputs, grad), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert bool((x.grad == 0).any()) == (mode == "static")


def test_qat_ranges_rest_outside_of_training():
    model = prepare_qat_(nn.Linear(4, 4), "static")
    assert model(torch.ones(2, 4)).isfinite().all()
    model.eval()
    model(torch.full((2, 4), 100.0))
    assert model.observer.high.item() == 1
    assert prepare_qat_(nn.Linear(4, 4), "static").eval()(torch.ones(2, 4)).isnan().all()  # it has no range: NaN, not 0


def test_compiled_qat_is_eager():
    model = prepare_qat_(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)), "static")
    x = randn(8, 16)
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for run in (compiled, model):
        y = run(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))))
    assert torch.equal(results[0][0], results[1][0])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- errors
def test_a_model_that_is_one_layer_cannot_be_replaced_in_place(caplog):
    x = randn(2, 3, 16)
    prepared = prepare_(nn.Linear(16, 16))
    prepared(x)
    attention = nn.MultiheadAttention(16, 4)
    for op, call in {
        "quantize_": lambda: quantize_(nn.Linear(16, 16)),
        "prepare_": lambda: prepare_(nn.Conv1d(3, 16, 1)),
        "prepare_qat_": lambda: prepare_qat_(nn.Embedding(16, 16)),
        "convert_": lambda: convert_(prepared),
        "quantize_ of attention": lambda: quantize_(attention, "dynamic"),
    }.items():
        caplog.clear()
        with caplog.at_level("WARNING", "amp_kernels"):
            call()
        assert f"by itself cannot be replaced in place; use the layer that {op.split()[0]} returns" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "amp_kernels"):
        quantize_(nn.Sequential(nn.Linear(16, 16)))
    assert not caplog.records


def test_errors_are_sentences_and_change_nothing():
    with pytest.raises(ValueError, match="mode must be 'weight_only' or 'dynamic', got 'static'; for static layers"):
        quantize_(mlp(), "static")
    with pytest.raises(ValueError, match="mode must be 'dynamic' or 'static', got 'weight_only'"):
        prepare_qat_(mlp(), "weight_only")
    with pytest.raises(
        ValueError,
        match=r"model must have an nn\.Linear, .* to replace, got Conv2d without any; a convolution must have groups=1",
    ):
        quantize_(nn.Conv2d(3, 3, 3, groups=3), "dynamic")
    with pytest.raises(ValueError, match=r"without any; a transposed convolution must have kernels that do not over"):
        quantize_(nn.Sequential(nn.ConvTranspose2d(3, 3, 3)))
    with pytest.raises(ValueError, match="model must have layers that were prepared"):
        convert_(mlp())
    for prepare, when in ((prepare_, ""), (lambda model: prepare_qat_(model, "static"), " in training mode")):
        model = prepare(mlp())
        for training in (True, False):  # a QAT layer records ranges in training mode alone, the others always
            message = f"layer '0' must have seen a batch, got none; run some batches through the prepared model{when}, "
            with pytest.raises(ValueError, match=message):
                convert_(model.train(training))
        assert not any(isinstance(layer, Int8Linear) for layer in model)
    model = prepare_(mlp())
    model(torch.full((1, 16), torch.nan))
    with pytest.raises(ValueError, match="inputs of layer '0' must be finite, got a range from nan to nan"):
        convert_(model)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with pytest.raises(TypeError, match=r"the weight of '1' must be float32, float16 or bfloat16, got torch\.float64"):
        quantize_(model)
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"'1' must have no hooks, .* since the new layer would lose them"):
        quantize_(model)
    for convert in (quantize_, prepare_, prepare_qat_):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].forward = functools.partial(nn.Linear.forward, model[1])  # as accelerate's add_hook_to_module does
        with pytest.raises(ValueError, match=r"'1' must have no hooks, and no forward that was assigned"):
            convert(model)
        assert type(model[0]) is nn.Linear
        with pytest.raises(TypeError, match=rf"{convert.__name__}: model must be an nn\.Module, got NoneType"):
            convert(None)
    with pytest.raises(TypeError, match=r"convert_: model must be an nn\.Module, got NoneType"):
        convert_(None)
    model = prepare_qat_(nn.Sequential(nn.Linear(4, 4)))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="convert_: '0' must have no hooks"):
        convert_(model)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(131072, 1, device="meta"))
    with pytest.raises(ValueError, match="'1' must have at most 131071 inputs, got 131072"):
        quantize_(model, "dynamic")


def test_a_model_that_was_converted_is_named_as_such():
    """Nothing is left to replace: the message says why, and a model with float layers is converted further."""
    for convert in (quantize_, prepare_, prepare_qat_, convert_):
        with pytest.raises(
            ValueError, match=rf"{convert.__name__}: model must .*; the model is int8 already: for another mode"
        ):
            convert(quantize_(nn.Sequential(nn.Embedding(4, 4))))
    for convert in (quantize_, prepare_, prepare_qat_):
        for prepare in (prepare_, prepare_qat_):
            for model in (mlp(), nn.Sequential(nn.Embedding(4, 4))):
                prepare(model)
                before = list(model)
                with pytest.raises(
                    ValueError, match=rf"{convert.__name__}: .*; the model is prepared already: call convert_"
                ):
                    convert(model)
                assert list(model) == before
    mixed = quantize_(mlp(), filter_fn=lambda _, name: name == "0")
    first = mixed[0]
    assert quantize_(mixed, "dynamic")[0] is first and mixed[2].mode == "dynamic"


def test_our_linear_is_quantized_as_torchs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
    expected = quantize_(copy.deepcopy(model))
    ours = quantize_(amp_kernels.nn.convert_linear_(model))
    x = torch.randn(3, 16)
    assert torch.equal(ours(x), expected(x))
    activated = torch.nn.Sequential(amp_kernels.nn.Linear(16, 8, activation="relu"))
    with pytest.raises(ValueError, match=r"must have an nn\.Linear"):
        quantize_(activated, "dynamic")


@pytest.mark.parametrize("attribute", ["stride", "padding"])
def test_a_transposed_convolution_whose_attributes_are_lists(attribute):
    conv = nn.ConvTranspose2d(3, 4, 2, 2)
    setattr(conv, attribute, list(getattr(conv, attribute)))
    model = quantize_(nn.Sequential(conv), "weight_only")
    assert type(model[0]).__name__ == "Int8ConvTranspose2d"


@pytest.mark.parametrize("prepare", [prepare_, prepare_qat_])
@pytest.mark.parametrize(
    ("layer", "x", "named"),
    [
        (lambda: nn.Conv2d(3, 4, 2), lambda: torch.ones(1, 3, 5, 5), {"output_size": (8, 8)}),
        (lambda: nn.Conv1d(3, 4, 2), lambda: torch.ones(1, 3, 5), {"bogus": 1}),
        (lambda: nn.Embedding(5, 4), lambda: torch.ones(2, dtype=torch.int64), {"bogus": 1}),
        (lambda: nn.ConvTranspose2d(3, 4, 2, 2), lambda: torch.ones(1, 3, 5, 5), {"bogus": 1}),
        (lambda: nn.Linear(3, 4), lambda: torch.ones(2, 3), {"bogus": 1}),
    ],
    ids=["conv2d", "conv1d", "embedding", "transposed", "linear"],
)
def test_prepared_layers_refuse_arguments_that_they_do_not_have(prepare, layer, x, named):
    prepared = prepare(nn.Sequential(layer()))[0]
    assert type(prepared).__name__.startswith(("Observed", "QAT"))
    prepared(x())
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        prepared(x(), **named)


def test_a_prepared_embedding_takes_its_argument_by_name():
    for prepare in (prepare_, prepare_qat_):
        embedding = prepare(nn.Sequential(nn.Embedding(5, 4)))[0]
        index = torch.tensor([1, 3])
        assert torch.equal(embedding(index=index), embedding(index))


def test_an_embedding_has_no_scale_of_a_result():
    """Older state dicts of other layers have one, which is left out."""
    saved = {**Int8Embedding(5, 4).state_dict(), "output_scale": torch.ones(())}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*output_scale"):
        Int8Embedding(5, 4).load_state_dict(saved)
    saved = {**Int8Linear(5, 4).state_dict(), "output_scale": torch.ones(())}
    Int8Linear(5, 4).load_state_dict(saved)
