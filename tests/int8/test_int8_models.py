"""Whole networks in int8: what is converted, what stays, how far results move, and that a checkpoint has the bits."""

import copy
import importlib
import io

import pytest
import torch
import torch.nn.functional as F
from int8_networks import MODES, codes_passed, converted, mobilenet, resnet, unet
from torch import nn

from amp_kernels.quantization import convert_, prepare_qat_
from amp_kernels.testing.common import randn

pytest.importorskip("sklearn")  # the networks of the experiments import it
pytest.importorskip("amp_kernels.benchmarks.experiments", reason="a wheel has no experiments")
from amp_kernels.benchmarks.experiments.images import cnn


def nbytes(model):
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def left(model):
    """The names of the weights in floating point with more than one dimension."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]


NETWORKS = {  # the network, the size of its images, and the weights that stay in floating point
    "ResNet": (resnet, 64, []),
    "MobileNet": (mobilenet, 32, [f"{i}.layers.3.weight" for i in (3, 4, 5)]),
    "U-Net": (unet, 32, []),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network(name, mode, channels_last, caplog):
    make, size, stay = NETWORKS[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model, x = make().to(memory_format=layout), randn(4, 3, size, size).to(memory_format=layout)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad(), caplog.at_level("INFO", "amp_kernels"):
        expected = model(x)
        int8 = converted(copy.deepcopy(model), mode, x)
        found = int8(x)
    assert left(int8) == stay
    # The norms of depthwise convolutions stay with them.
    kept = sum(isinstance(module, nn.BatchNorm2d) for module in int8.modules())
    assert kept == (3 if name == "MobileNet" else 0)
    assert f"folded {count - kept} of {count} batch norms into convolutions" in caplog.messages
    assert (found - expected).norm() <= (0.02 if name == "U-Net" else 0.03) * expected.norm()
    if name == "U-Net":  # int8 throughout, its transposed convolutions too
        assert "converted 99.9%" in caplog.text and "up.*.weight 8.7%" in caplog.text
        assert nbytes(int8) <= 0.26 * nbytes(model)
    saved = io.BytesIO()
    torch.save(int8.state_dict(), saved)
    saved.seek(0)
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        other = converted(other, mode, x)
        other.load_state_dict(torch.load(saved, weights_only=True))
        assert torch.equal(other(x), found)


def test_a_cnn_that_reads_digits(caplog):
    """int8 throughout, within half a point of fp32, after training for int8 too."""
    digits = importlib.import_module("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:900], order[900:]

    def epoch(model, optimizer):
        for batch in train[torch.randperm(len(train))].split(64):
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def accuracy(model):
        return 100 * (model.eval()(x[test]).argmax(1) == y[test]).float().mean().item()

    torch.manual_seed(0)
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(8):
        epoch(model, optimizer)
    in_fp32 = accuracy(model)
    assert in_fp32 > 95
    for mode in MODES:
        caplog.clear()
        with caplog.at_level("INFO", "amp_kernels"), torch.no_grad():
            int8 = converted(copy.deepcopy(model), mode, x[train])
        assert left(int8) == []
        assert "converted 99.9% (*.weight 99.9%) of the parameters' bytes" in caplog.text
        assert accuracy(int8) >= in_fp32 - 0.5, mode
        assert mode != "static" or codes_passed(int8, x[test]) == 2
    trained = prepare_qat_(model, "static").train()
    epoch(trained, torch.optim.AdamW(trained.parameters(), 3e-4))
    before = accuracy(trained)
    predictions = trained(x[test])
    assert torch.equal(convert_(trained)(x[test]), predictions) and before >= in_fp32 - 0.5
