"""int8_saved_activations: what it stores, what it leaves alone, what comes back, and what that saves."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import amp_kernels
from amp_kernels.quantization import int8_saved_activations, prepare_qat_
from amp_kernels.testing.common import DTYPES, randn

N = 4096  # elements of most activations here
BYTES = N + 8 * N // 128  # codes, and for each block a scale and a zero point


def activation(*shape, dtype=torch.float32, seed=0, device="cpu"):
    """What an operator made of something with a gradient."""
    return randn(*shape, dtype=dtype, seed=seed).to(device).requires_grad_() * 1


def expected(x, block_size=128):
    """x as the backward pass sees it."""
    flat = x.detach().reshape(-1)
    return amp_kernels.quantize_int8(flat, block_size=block_size, symmetric=False).dequantize(x.dtype).view_as(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (4096,), (3, 37, 41)])
def test_the_backward_pass_reads_blockwise_codes(shape, dtype, device):
    x = activation(*shape, dtype=DTYPES[dtype], device=device)
    with int8_saved_activations() as saved:
        y = x.square()
    groups = -(-x.numel() // 128)
    assert saved.nbytes == x.numel() + 8 * groups and saved.original_nbytes == x.nbytes
    assert torch.equal(y.grad_fn._saved_self, expected(x)) and not torch.equal(y.grad_fn._saved_self, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, 2 * expected(x)) and grad.dtype == x.dtype
    del y, grad
    assert saved.nbytes == 0


@pytest.mark.parametrize("block_size", [1, 32, 5000])
def test_block_size(block_size):
    x = activation(N)
    with int8_saved_activations(block_size) as saved:
        y = x.square()
    assert torch.equal(y.grad_fn._saved_self, expected(x, block_size))
    assert saved.nbytes == N + 8 * -(-N // block_size)


def test_what_is_left_alone(device):
    layer = nn.Linear(64, 64).to(device)
    frozen = nn.Linear(64, 64).to(device).requires_grad_(False)
    x = activation(64, 64, device=device)
    data = randn(64, 64).to(device)
    leaf = data.clone().requires_grad_()
    with int8_saved_activations() as saved:
        kept = [
            layer(data),  # an input without a gradient, and the weight
            frozen(x),  # a weight
            layer.weight.t().square(),  # a view of a parameter
            leaf.view(32, 128).square(),  # a view of a leaf
            leaf.bfloat16().square(),  # a cast of a leaf
            activation(N // 8, device=device).square(),  # few elements
            activation(64, 64, dtype=torch.float64, device=device).square(),
            x.index_select(0, torch.arange(64, device=device).repeat(64)),  # indices
            x.where(data > 0, 0.0),
            x * data,
            leaf * x.detach(),
            activation(1, N // 8, device=device).expand(100, -1).square(),
        ]
    assert saved.nbytes == 0
    exact = kept[0].square().sum(), (layer(data).square()).sum()
    grads = [torch.autograd.grad(y, layer.weight)[0] for y in exact]
    assert torch.equal(*grads)


def test_autocast_keeps_the_weights(device):
    layer = nn.Linear(64, 64).to(device)
    x = activation(64, 64, device=device)
    with torch.autocast(device.type, torch.bfloat16), int8_saved_activations() as saved:
        y = layer(x)
        assert saved.nbytes == BYTES and saved.original_nbytes == 2 * N  # the bf16 input, not the bf16 weight
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    with torch.autocast(device.type, torch.bfloat16):
        plain = layer(x)
    assert torch.equal(grad, torch.autograd.grad(plain.float().sum(), x)[0])


def test_statistics_of_norms_and_attention_stay_exact():
    x = activation(64, 32, 64)
    q = activation(2, 4, 1024, 16)
    taken = []
    with int8_saved_activations() as saved:
        inner = saved._pack

        def pack(tensor):
            packed = inner(tensor)
            taken.append((tuple(tensor.shape), packed.func.__name__))
            return packed

        with saved_tensors_hooks(pack, lambda packed: packed):
            F.layer_norm(x, (64,))
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert ((64, 32, 64), "_dequantized") in taken and ((64, 32, 1), "_kept") in taken
    assert ((2, 4, 1024, 16), "_dequantized") in taken and ((2, 4, 1024), "_kept") in taken


# ------------------------------------------------------------------------------------------------ sharing, and views
def test_a_tensor_saved_often_is_stored_once(device):
    x = activation(64, 64, device=device)
    linears = [nn.Linear(64, 64).to(device) for _ in range(3)]
    with int8_saved_activations() as saved:
        outputs = [layer(x) for layer in linears]  # q, k and v
        outputs += [x.square(), x.view(4, 16, 64).square(), x.t().square(), x.flatten().square()]
        assert saved.nbytes == BYTES
        outputs.append(x[:, ::2].square())  # other elements in another order: codes of their own
        assert saved.nbytes == BYTES + BYTES // 2
        outputs += [x[:32, ::2].square(), x[::2, :32].square()]
        assert saved.nbytes == 2 * BYTES
    assert torch.equal(outputs[5].grad_fn._saved_self, expected(x).t())
    assert torch.equal(outputs[-1].grad_fn._saved_self, expected(x[::2, :32]))
    del outputs[:4]
    assert saved.nbytes == 2 * BYTES  # three views still need it
    del outputs
    assert saved.nbytes == 0


def test_views_come_back_with_their_strides(device):
    x = activation(32, 16, 8, 4, device=device)
    dense = (x.transpose(1, 3), x.to(memory_format=torch.channels_last), x.permute(3, 2, 1, 0).flatten(1).t())
    gaps = (x[:, 1:], x[..., ::2], x[:, :, :, 1].repeat(1, 2, 1)[:, ::2])
    with int8_saved_activations():
        for view in (*dense, *gaps, x.as_strided((1, 4096, 1), (7, 1, 9))):
            back = view.square().grad_fn._saved_self
            assert back.shape == view.shape
            torch.testing.assert_close(back, view, rtol=0, atol=view.abs().max().item() / 127)
            assert back.stride() == (view.contiguous() if any(view is g for g in gaps) else view).stride()


def test_an_expanded_tensor_is_stored_unexpanded(device):
    x = activation(1, 4096, device=device)
    with int8_saved_activations() as saved:
        y = x.expand(100, 4096).square()
    assert saved.nbytes == BYTES
    back = y.grad_fn._saved_self
    assert back.stride() == (0, 1) and torch.equal(back, expected(x).expand(100, 4096))


def test_a_change_in_place_makes_another_tensor():
    x = activation(N)
    with int8_saved_activations() as saved:
        first = x.square()
        before = expected(x)
        x.mul_(3)
        second = x.square()
    assert saved.nbytes == 2 * BYTES
    assert torch.equal(first.grad_fn._saved_self, before)
    assert torch.equal(second.grad_fn._saved_self, expected(x))


def test_an_address_used_again_is_another_tensor():
    source, memory = activation(N), bytearray(4 * N)

    class Multiply(torch.autograd.Function):  # into the same memory every time
        @staticmethod
        def forward(ctx, x, factor):
            return torch.frombuffer(memory, dtype=torch.float32).copy_(x * factor)

    with int8_saved_activations() as saved:
        outputs = []
        for factor in range(1, 40):
            x = Multiply.apply(source, factor)
            outputs.append(x.square())  # keeps only the codes
            assert torch.equal(outputs[-1].grad_fn._saved_self, expected(x))
            del x
    assert saved.nbytes == BYTES * len(outputs)
    for factor, y in enumerate(outputs, 1):
        assert torch.equal(y.grad_fn._saved_self, expected(source * factor))


def test_what_is_left_alone_must_not_change():
    layer = nn.Linear(64, 64)
    with int8_saved_activations():
        y = layer(activation(64, 64))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version \d+, expected"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------------------ values
def test_nan_and_inf_show_in_the_gradient(device):
    for value in (math.nan, math.inf, -math.inf):
        x = randn(N).to(device)
        x[1000] = value
        leaf = x.requires_grad_()
        with int8_saved_activations():
            y = (leaf * 1).square()
        y.sum().backward()
        assert (
            leaf.grad[896:1024].isnan().all() and leaf.grad[:896].isfinite().all() and leaf.grad[1024:].isfinite().all()
        )


def test_stochastic_rounding_is_unbiased_and_seeded():
    x = activation(N)
    reads = []
    for seed in range(200):
        with int8_saved_activations(rounding="stochastic", seed=seed):
            reads.append(x.square().grad_fn._saved_self)
    step = amp_kernels.quantize_int8(x.detach(), block_size=128, symmetric=False).scale.max()
    assert not torch.equal(reads[0], reads[1])
    blocks = x.detach().view(-1, 128)
    bias = (torch.stack(reads).mean(0) - x.detach()).abs().view(-1, 128)
    ends = (blocks == blocks.amin(-1, keepdim=True)) | (blocks == blocks.amax(-1, keepdim=True))
    assert bias[~ends].max() < 5 * step * 0.5 / 200**0.5  # the deviation of one is at most half a step
    assert bias.max() < 0.51 * step
    with int8_saved_activations(rounding="stochastic", seed=0):
        assert torch.equal(x.square().grad_fn._saved_self, reads[0])
        assert not torch.equal((x * 1).square().grad_fn._saved_self, reads[0])  # each tensor has its own numbers
    state = torch.get_rng_state()
    with int8_saved_activations(rounding="stochastic", seed=0):
        x.square()
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------------------ models
class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gradient(model, x, context=None, checkpointed=False):
    """(output, gradient, what the hooks held)."""
    model.zero_grad()
    with context or int8_saved_activations(min_numel=2**60) as saved:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
    held = saved.nbytes, saved.original_nbytes
    y.square().mean().backward()
    return y.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]), held


def difference(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


def test_gradient_of_a_transformer(device):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    x = activation(8, 32, 64, device=device)
    y, exact, _ = gradient(model, x.detach())
    assert torch.equal(gradient(model, x.detach())[1], exact)
    ours, close, (held, original) = gradient(model, x, int8_saved_activations())
    assert torch.equal(ours, y)  # the forward pass is untouched
    assert held < 0.27 * original and original > 3 * 15 * x.nbytes
    assert 0 < difference(close, exact) < 0.01

    # recomputing, and both: the inputs of the blocks are all that is kept
    assert torch.equal(gradient(model, x.detach(), checkpointed=True)[1], exact)
    x = activation(8, 32, 64, device=device)
    _, both, (held, original) = gradient(model, x, int8_saved_activations(), checkpointed=True)
    assert original == 3 * x.nbytes and held < 0.27 * original
    assert 0 < difference(both, exact) < 0.01


def test_memory_is_really_freed():
    """What is alive between the passes, of tensors that only the hooks could have kept."""
    alive = []
    x = activation(256, 256)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())))

    def forward():
        y = x
        for layer in model:
            y = layer(y)
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        return y.sum()

    loss = forward()
    assert sum(not ref.expired() for ref in alive) == 7  # all but the last output, which nobody saves
    alive.clear()
    with int8_saved_activations() as saved:
        loss = forward()
    assert all(ref.expired() for ref in alive)
    assert saved.original_nbytes == 8 * x.nbytes and saved.nbytes == pytest.approx(
        saved.original_nbytes * 0.2656, rel=1e-3
    )
    loss.backward()
    assert saved.nbytes == 0


def test_training_lowers_the_loss(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 64)).to(device)
    x = randn(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        with int8_saved_activations():
            y = model(x)
        loss = F.mse_loss(y, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_gradients_of_gradients():
    x = randn(N).requires_grad_()
    with int8_saved_activations():
        y = (x * 1).pow(3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach(), rtol=0, atol=0.2)


def test_nested_and_as_decorator():
    x = activation(N)
    with int8_saved_activations() as outer:
        with int8_saved_activations(block_size=4096) as inner, outer, inner:
            first = x.square()
        second = x.square()
    assert inner.nbytes == N + 8 and outer.nbytes == BYTES
    assert torch.equal(first.grad_fn._saved_self, expected(x, 4096))
    assert torch.equal(second.grad_fn._saved_self, expected(x))

    @int8_saved_activations()
    def square(x):
        return x.square()

    assert torch.equal(square(x).grad_fn._saved_self, expected(x))
    assert torch.equal(x.square().grad_fn._saved_self, x)


def test_compiled_models_are_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = randn(64, 64)

    def gradients(run, context):
        with context as saved:
            y = run(x)
        held = saved.nbytes
        return held, torch.autograd.grad(y.square().sum(), list(model.parameters()))

    _, exact = gradients(model, int8_saved_activations(min_numel=2**60))
    held, ours = gradients(torch.compile(model, backend="aot_eager"), int8_saved_activations())
    assert held == 0
    for grad, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)

    @torch.compile(backend="aot_eager")
    def inside(x):
        with int8_saved_activations():
            return model(x)

    held, quantized = gradients(model, int8_saved_activations())
    _, ours = gradients(inside, int8_saved_activations(min_numel=2**60))
    assert held == 2 * BYTES
    for grad, expected in zip(ours, quantized, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_errors_are_sentences():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        int8_saved_activations(0)
    with pytest.raises(ValueError, match="min_numel must be at least 1, got -1"):
        int8_saved_activations(min_numel=-1)
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', got 'up'"):
        int8_saved_activations(rounding="up")


# ------------------------------------------------------------------------------------------------------------- with QAT
QUANTIZED = {
    "linear": (lambda: nn.Linear(8, 8), (512, 8)),
    "conv": (lambda: nn.Conv2d(2, 8, 1), (256, 2, 2, 2)),
    "up": (lambda: nn.ConvTranspose2d(8, 4, 2, 2), (64, 8, 2, 2)),
}


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_training_for_int8_cuts_no_gradient(name, mode, device):
    """Rounding moves the ends of ranges. The codes then computed again must not set gradients to 0."""
    make, shape = QUANTIZED[name]
    torch.manual_seed(0)
    layer = prepare_qat_(make().to(device), mode)
    for seed in range(6):
        x = activation(*shape, seed=seed, device=device)
        (exact,) = torch.autograd.grad(layer(x).sum(), x, retain_graph=True)
        with int8_saved_activations() as saved:
            y = layer(x)
        assert saved.nbytes > 0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], exact)


@pytest.mark.parametrize("symmetric", [False, True])
def test_fake_quantization_by_its_own_range_cuts_no_gradient(symmetric, device):
    x = activation(512, 8, device=device)
    with int8_saved_activations() as saved:
        y = amp_kernels.fake_quantize_int8(x, dim=-1, symmetric=symmetric)
    assert saved.nbytes == 0  # the gradient needs nothing of x
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))
