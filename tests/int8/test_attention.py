"""MultiheadAttention with float projections against torch's module, and with int8 projections."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from amp_kernels.nn import Int8Linear, MultiheadAttention
from amp_kernels.quantization import convert_, prepare_, prepare_qat_, quantize_
from amp_kernels.testing.common import randn

LENGTH, SOURCES, BATCH, SIZE, HEADS = 5, 7, 3, 24, 4
MODES = ("weight_only", "dynamic", "static")


def attention(**options):
    torch.manual_seed(0)
    made = nn.MultiheadAttention(SIZE, HEADS, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_().div_(SIZE**0.5)
    return made.eval()


def inputs(kind, options):
    """query, key and value; of them, the same tensors for self-attention, and of other sizes if there are such."""
    sizes = SIZE, options.get("kdim") or SIZE, options.get("vdim") or SIZE
    lengths = LENGTH, SOURCES, SOURCES
    q, k, v = (randn(length, BATCH, size, seed=i) for i, (length, size) in enumerate(zip(lengths, sizes, strict=True)))
    if kind == "self":
        k = v = q
    elif kind == "cross":
        v = k
    if kind == "alone":
        return q[:, 0], k[:, 0], v[:, 0]
    return tuple(x.transpose(0, 1) for x in (q, k, v)) if options.get("batch_first") else (q, k, v)


def converted(model, mode, run):
    if mode != "static":
        return quantize_(model, mode)
    model = prepare_(model)
    run(model)
    return convert_(model)


OPTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
}


@pytest.mark.parametrize("kind", ["self", "cross", "three", "alone"])
@pytest.mark.parametrize("name", OPTIONS)
def test_float_projections_compute_what_torch_does(name, kind):
    options = OPTIONS[name]
    theirs = attention(**options)
    ours = MultiheadAttention.from_attention(theirs)
    query, key, value = inputs(kind, options)
    length, sources = LENGTH, LENGTH if kind == "self" else SOURCES
    batch = () if kind == "alone" else (BATCH,)
    # The first key stays, so that no row of scores is empty.
    padding = randn(*batch, sources, seed=5) > 0.5
    padding[..., 0] = False
    pairs = torch.ones(length, sources, dtype=torch.bool).triu(1)
    masks = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding in floats": {"key_padding_mask": randn(*batch, sources, seed=6)},
        "pairs": {"attn_mask": pairs},
        "pairs in floats": {"attn_mask": randn(length, sources, seed=7)},
        "of each head": {"attn_mask": randn((batch or (1,))[0] * HEADS, length, sources, seed=8)},
        "both": {"attn_mask": pairs, "key_padding_mask": padding},
    }
    if kind == "self" and "kv" not in name and "zero" not in name:
        masks["causal"] = {"attn_mask": pairs, "is_causal": True}
        masks["causal and padding"] = {"attn_mask": pairs, "is_causal": True, "key_padding_mask": padding}
    ways = {"need_weights": (True, False), "average_attn_weights": (True, False)}
    for mask, way in itertools.product(masks, itertools.product(*ways.values())):
        arguments = {**masks[mask], **dict(zip(ways, way, strict=True))}
        expected, found = theirs(query, key, value, **arguments), ours(query, key, value, **arguments)
        torch.testing.assert_close(
            found[0], expected[0], rtol=1e-4, atol=1e-5, msg=lambda text, mask=mask: f"{mask}: {text}"
        )
        assert (found[1] is None) == (expected[1] is None)
        if expected[1] is not None:
            torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


def test_sizes_of_keys_and_values_of_their_own():
    options = {"kdim": 10, "vdim": 15, "batch_first": True}
    theirs = attention(**options)
    ours = MultiheadAttention.from_attention(theirs)
    arguments = inputs("three", options)
    torch.testing.assert_close(ours(*arguments)[0], theirs(*arguments)[0], rtol=1e-4, atol=1e-5)
    assert {id(p) for p in ours.parameters()} == {id(p) for p in theirs.parameters()}


def test_dropout_of_weights():
    theirs = attention(dropout=0.5).train()
    ours = MultiheadAttention.from_attention(theirs)
    x = randn(LENGTH, BATCH, SIZE)
    assert ours.training
    for module in (theirs, ours):
        torch.manual_seed(1)
        _, weights = module(x, x, x, average_attn_weights=False)
        assert 0.2 < (weights == 0).float().mean() < 0.8
    assert (ours.eval()(x, x, x)[1] == 0).sum() == 0


@pytest.mark.parametrize("kind", ["self", "cross", "three", "alone"])
@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 15}, {"add_bias_kv": True, "bias": False}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_int8_projections(mode, options, kind, device):
    if "kdim" in options and kind in ("self", "cross"):
        pytest.skip("these have other sizes")
    model, arguments = attention(**options).to(device), [x.to(device) for x in inputs(kind, options)]
    expected = model(*arguments)
    int8 = converted(copy.deepcopy(model), mode, lambda prepared: prepared(*arguments))
    assert type(int8) is MultiheadAttention
    found = int8(*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert 0 < (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()
    assert all(parameter.dim() != 2 for parameter in int8.parameters())
    without = int8(*arguments, need_weights=False)
    torch.testing.assert_close(without[0], found[0], rtol=1e-3, atol=5e-3)


def encoder_and_decoder(layers):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, HEADS, **layers), 2)
    return nn.ModuleList([encoder, nn.TransformerDecoder(nn.TransformerDecoderLayer(SIZE, HEADS, **layers), 1)]).eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_and_a_decoder_are_int8_throughout(batch_first, mode, caplog):
    torch.manual_seed(0)
    layers = {"activation": "gelu", "batch_first": batch_first, "dim_feedforward": 48}
    model = encoder_and_decoder(layers)
    x, y = randn(BATCH, LENGTH, SIZE), randn(BATCH, LENGTH, SIZE, seed=1)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[:, -1] = True

    @torch.no_grad()  # where torch would use its fused kernels
    def run(model):
        if not batch_first:
            return model[1](y, model[0](x))
        return model[1](y, model[0](x, src_key_padding_mask=mask), memory_key_padding_mask=mask)

    with caplog.at_level("INFO", "amp_kernels"):
        expected = run(model)
        int8 = converted(model, mode, run)
        found = run(int8)
    assert all(record.levelname == "INFO" for record in caplog.records)
    assert not any(type(module) in (nn.Linear, nn.MultiheadAttention) for module in int8.modules())
    assert sum(type(module) is Int8Linear for module in int8.modules()) == 2 * 4 + 6
    assert 0 < (found - expected).abs().max() <= 0.1
    saved = io.BytesIO()
    torch.save(int8.state_dict(), saved)
    saved.seek(0)
    torch.manual_seed(1)
    other = converted(encoder_and_decoder(layers), mode, run)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(run(other.eval()), found)


@pytest.mark.parametrize("kind", ["self", "cross", "three"])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_training_for_int8_keeps_parameters_and_bits(mode, kind):
    model, arguments = attention(dropout=0.0), inputs(kind, {})
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = prepare_qat_(model, mode).train()
    assert {id(p) for p in prepared.parameters()} == {id(p) for p in parameters.values()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for _ in range(2):
        prepared(*arguments)[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in parameters.items():
        assert not torch.equal(parameter, before[name]), name
    expected = prepared.eval()(*arguments)[0]
    assert torch.equal(convert_(prepared)(*arguments)[0], expected)


def test_what_is_left_out_stays_torch_s():
    model = nn.ModuleDict({"kept": attention(), "taken": attention(), "partly": attention(), "hooked": attention()})
    model["hooked"].out_proj.register_forward_hook(lambda *_: None)
    kept = model["kept"], model["hooked"]
    quantize_(model, filter_fn=lambda _, name: name.startswith("taken") or name == "partly.out_proj")
    assert (model["kept"], model["hooked"]) == kept
    assert type(model["taken"].in_proj) is type(model["partly"].out_proj) is Int8Linear
    assert type(model["partly"].in_proj) is nn.Linear
    x, y = randn(LENGTH, BATCH, SIZE), randn(SOURCES, BATCH, SIZE, seed=1)
    torch.testing.assert_close(model["partly"](x, y, y)[0], attention()(x, y, y)[0], rtol=0.05, atol=0.02)


def test_a_refused_call_changes_nothing():
    model = nn.ModuleList([attention(), nn.Linear(4, 4).double()])
    before = list(model)
    for convert in (quantize_, prepare_, prepare_qat_):
        with pytest.raises(TypeError, match="the weight of '1' must be float32"):
            convert(model)
        assert list(model) == before and type(model[0]) is nn.MultiheadAttention
    alone = attention()
    with pytest.raises(ValueError, match="model must have an"):
        quantize_(alone, filter_fn=lambda *_: False)

    class Refuses(nn.Module):
        def __setattr__(self, name, value):
            if isinstance(value, MultiheadAttention):
                raise TypeError("no")
            super().__setattr__(name, value)

    refuses = Refuses()
    refuses.attention = attention()
    model = nn.Sequential(attention(), refuses)
    before = list(model.modules())
    with pytest.raises(TypeError, match="no"):
        quantize_(model)
    assert list(model.modules()) == before


def test_a_module_in_two_places_stays_one():
    shared = attention()
    model = quantize_(nn.ModuleList([shared, nn.Sequential(shared)]))
    assert model[0] is model[1][0] and type(model[0]) is MultiheadAttention


@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode):
    model, arguments = attention(), inputs("cross", {})
    int8 = converted(model, mode, lambda prepared: prepared(*arguments))
    found = torch.compile(int8, fullgraph=True)(*arguments, need_weights=False)[0]
    torch.testing.assert_close(found, int8(*arguments, need_weights=False)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 15, "add_bias_kv": True}], ids=str)
def test_16_bits_and_autocast(options, dtype):
    theirs, arguments = attention(**options), inputs("three", options)
    ours = MultiheadAttention.from_attention(theirs)
    with torch.autocast("cpu", dtype):
        found, expected = ours(*arguments), theirs(*arguments)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.03)
    half = copy.deepcopy(theirs).to(dtype)
    arguments = [x.to(dtype) for x in arguments]
    found, expected = MultiheadAttention.from_attention(half)(*arguments), half(*arguments)
    assert all(a.dtype == b.dtype == dtype for a, b in zip(found, expected, strict=True))
    int8 = quantize_(half, "dynamic")(*arguments)
    assert all(a.dtype == dtype for a in int8)


@pytest.mark.parametrize("name", OPTIONS)
def test_results_can_be_viewed(name):
    ours, arguments = MultiheadAttention.from_attention(attention(**OPTIONS[name])), inputs("self", OPTIONS[name])
    assert all(ours(*arguments, need_weights=need)[0].is_contiguous() for need in (True, False))


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"kdim": 10, "vdim": 15, "add_bias_kv": True}], ids=str)
def test_parameters_keep_their_order(options):
    theirs = attention(**options)
    ours = MultiheadAttention.from_attention(theirs)
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_module_with_additions_stays_torch_s():
    named, gated, buffered, spectral, gained = (attention() for _ in range(5))
    named.layer_id = 3
    gated.gate = nn.Parameter(torch.zeros(3))
    buffered.register_buffer("seen", torch.zeros(3))
    torch.nn.utils.parametrizations.spectral_norm(spectral.out_proj)
    gained.out_proj.register_parameter("gain", nn.Parameter(torch.ones(SIZE)))
    model = nn.ModuleList([named, gated, buffered, spectral, gained, nn.Linear(4, 4)])
    before = list(model)[:5]
    assert list(quantize_(model))[:5] == before


def test_the_mark_of_transformers_is_no_addition():
    theirs = attention()
    theirs._is_hf_initialized = True
    assert type(quantize_(theirs)) is MultiheadAttention
    assert MultiheadAttention.from_attention(theirs)._is_hf_initialized


def test_a_float_checkpoint_is_refused():
    checkpoint = attention().state_dict()
    for model in (prepare_qat_(attention()), quantize_(attention())):
        with pytest.raises(RuntimeError, match="in_proj_weight must not be given, since the projections are layers"):
            model.load_state_dict(checkpoint, strict=False)


def test_other_shapes_are_refused():
    ours = MultiheadAttention.from_attention(attention())
    x, y = randn(LENGTH, BATCH, SIZE), randn(LENGTH, 1, SIZE)
    for arguments in ((x, y, y), (y, x, x), (x, x, y), (x, x[:3], x), (x, x[0], x[0])):
        with pytest.raises(ValueError, match="query, key and value must have 2 or 3 dimensions"):
            ours(*arguments)


def test_masks_of_other_shapes_are_refused():
    ours, x = MultiheadAttention.from_attention(attention()), randn(LENGTH, BATCH, SIZE)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(5, 5\) or \(12, 5, 5\), got \(5, 4\)"):
        ours(x, x, x, attn_mask=torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(3, 5\), got \(5, 3\)"):
        ours(x, x, x, key_padding_mask=torch.zeros(5, 3))
    with pytest.raises(TypeError, match=r"attn_mask must be bool or floating point, got torch\.uint8"):
        ours(x, x, x, attn_mask=torch.ones(5, 5).triu(1).to(torch.uint8))
    with pytest.raises(RuntimeError, match="attn_mask must be given with is_causal"):
        ours(x, x, x, is_causal=True)
