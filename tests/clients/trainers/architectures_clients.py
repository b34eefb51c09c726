"""Small random models of transformers' architectures in int8: accuracy, checkpoints, and what was converted.

An int8 model may be off by twice as much as the float model whose converted weights are rounded to int8 and back. "Off"
is the norm of the difference from the float model's output over all elements: a single element may be right by chance.

- In weight-only mode the int8 model and the rounded one are the same function, and are compared element by element too.
- With int8 inputs the int8 model has a second rounding for each product. Inputs have 255 steps for their range, weights
  127 for the larger half of theirs, so that the two errors are alike. They are independent and add as squares, which
  makes a factor of 1.4. Measured: 1.1 to 1.4 with ranges of rows and images, and 1.0 to 1.7 with the range of the
  calibration batch, which is also the batch that is compared.

Some models read `layer.weight` without calling the layer (Mamba, DETR): there it has to be the dequantized weight. CLIP
and SigLIP read the dtype of a convolution's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from amp_kernels import quantize_int8
from amp_kernels.nn import Int8Conv1d, Int8Conv2d, Int8Embedding, Int8Linear
from amp_kernels.quantization import convert_, prepare_, quantize_

TEXT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = TEXT | {"num_key_value_heads": 1}
IMAGE = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
DEPTH = {"encoder_layers": 2, "decoder_layers": 2}
WORDS = {"input_ids": torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(0))}
PIXELS = {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
LARGER = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
SOUND = {"input_features": torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(0))}
FIRST = {"decoder_input_ids": WORDS["input_ids"][:, :5]}


class Architecture(NamedTuple):
    model: str
    config: Callable[[], Any]
    inputs: dict[str, Tensor]
    output: str
    share: float  # of the parameters' bytes, in percent
    layers: str  # the last names of converted layers
    read_only: str = ""  # the last name of layers that are not called, so that prepare_ sees no input of theirs


def config(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


def clip() -> Any:
    texts, images = TEXT | {"projection_dim": 16}, IMAGE | {"projection_dim": 16}
    return transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=16)


def siglip() -> Any:
    return transformers.SiglipConfig(text_config=TEXT | {"projection_size": 32}, vision_config=IMAGE)


def detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    return transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, num_queries=5, d_model=32, num_labels=7, **HEADS, **DEPTH
    )


ARCHITECTURES = {
    "bert": Architecture("BertForMaskedLM", config("BertConfig", **TEXT), WORDS, "logits", 95.7,
        "decoder dense key position_embeddings query token_type_embeddings value word_embeddings"),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        config("GPT2Config", vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=32),
        WORDS, "logits", 97.0,
        "c_attn c_fc c_proj lm_head wpe wte",
    ),
    "llama": Architecture("LlamaForCausalLM", config("LlamaConfig", **LLAMA), WORDS, "logits", 99.4,
        "down_proj embed_tokens gate_proj k_proj lm_head o_proj q_proj up_proj v_proj"),
    "qwen3": Architecture("Qwen3ForCausalLM", config("Qwen3Config", head_dim=16, **LLAMA), WORDS, "logits", 99.1,
        "down_proj embed_tokens gate_proj k_proj lm_head o_proj q_proj up_proj v_proj"),
    # Its experts are two parameters of three dimensions, no layers.
    "mixtral": Architecture(
        "MixtralForCausalLM", config("MixtralConfig", num_local_experts=4, **LLAMA), WORDS, "logits", 20.1,
        "embed_tokens k_proj lm_head o_proj q_proj v_proj"
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        config("T5Config", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=99),
        WORDS | FIRST, "logits", 99.1,
        "embed_tokens k lm_head o q relative_attention_bias shared v wi wo",
    ),
    "vit": Architecture("ViTForImageClassification", config("ViTConfig", **IMAGE), PIXELS, "logits", 92.9,
        "classifier fc1 fc2 k_proj o_proj projection q_proj v_proj"),
    "clip": Architecture("CLIPModel", clip, WORDS | PIXELS, "logits_per_image", 96.1,
        "fc1 fc2 k_proj out_proj patch_embedding position_embedding q_proj text_projection token_embedding v_proj "
        "visual_projection"),
    # Its pooling layer has an nn.MultiheadAttention.
    "siglip": Architecture("SiglipModel", siglip, WORDS | PIXELS, "logits_per_image", 96.2,
        "fc1 fc2 head in_proj k_proj out_proj patch_embedding position_embedding q_proj token_embedding v_proj"),
    # With the default init_std, 0.02, rounding its convolutions would change the logits by 1e-5 of the largest, which
    # is the tolerance.
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        config(
            "WhisperConfig", vocab_size=99, d_model=32, num_mel_bins=8, max_source_positions=20,
            max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, init_std=0.1, **HEADS, **DEPTH,
        ),
        SOUND | FIRST, "logits", 95.2,
        "conv1 conv2 embed_positions embed_tokens fc1 fc2 k_proj out_proj proj_out q_proj v_proj",
    ),
    "rwkv": Architecture(
        "RwkvForCausalLM",
        config("RwkvConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2, context_length=32, bos_token_id=1,
               eos_token_id=2),
        WORDS, "logits", 97.5,
        "embeddings head key output receptance value",
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        config("MambaConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0,
               bos_token_id=1, eos_token_id=2),
        WORDS, "logits", 89.9,
        "dt_proj embeddings in_proj lm_head out_proj x_proj", "dt_proj",
    ),
    # Its table of words multiplies rows by a buffer.
    "gemma3": Architecture(
        "Gemma3ForCausalLM", config("Gemma3TextConfig", head_dim=16, **LLAMA), WORDS, "logits", 98.4,
        "down_proj embed_tokens gate_proj k_proj lm_head o_proj q_proj up_proj v_proj",
    ),
    # Its linear layers multiply by `weight.T`.
    "falcon": Architecture("FalconForCausalLM", config("FalconConfig", **TEXT), WORDS, "logits", 99.3,
        "dense dense_4h_to_h dense_h_to_4h lm_head query_key_value word_embeddings"),
    # Their tables of words multiply rows by a number. Positions of BART are another class, and stay.
    "bart": Architecture(
        "BartForConditionalGeneration",
        config("BartConfig", vocab_size=99, d_model=32, scale_embedding=True, max_position_embeddings=32,
               decoder_start_token_id=2, **HEADS, **DEPTH),
        WORDS | FIRST, "logits", 91.5,
        "embed_tokens fc1 fc2 k_proj lm_head out_proj q_proj shared v_proj",
    ),
    "nllb": Architecture(
        "M2M100ForConditionalGeneration",
        config("M2M100Config", vocab_size=99, d_model=32, scale_embedding=True, max_position_embeddings=32,
               decoder_start_token_id=2, **HEADS, **DEPTH),
        WORDS | FIRST, "logits", 95.8,
        "embed_tokens fc1 fc2 k_proj lm_head out_proj q_proj shared v_proj",
    ),
    "detr": Architecture(
        "DetrForObjectDetection", detr, LARGER, "logits", 96.2,
        "0 1 2 class_labels_classifier convolution fc1 fc2 input_projection k_proj o_proj q_proj "
        "query_position_embeddings v_proj",
    ),
}  # fmt: skip
MODES = ("weight_only", "dynamic", "static")


def made(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    architecture = ARCHITECTURES[name]
    return getattr(transformers, architecture.model)(architecture.config()).eval()


def in_int8(name: str, mode: str, seed: int = 0) -> PreTrainedModel:
    model = made(name, seed)
    if mode != "static":
        return quantize_(model, mode)
    prepare_(model, lambda _, layer: layer.rpartition(".")[2] != ARCHITECTURES[name].read_only)
    output(name, model)
    return convert_(model)


@torch.no_grad()
def output(name: str, model: PreTrainedModel) -> Tensor:
    architecture = ARCHITECTURES[name]
    return model(**architecture.inputs)[architecture.output]


def converted(model: nn.Module) -> list[str]:
    kinds = Int8Conv1d, Int8Conv2d, Int8Embedding, Int8Linear
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds)]


def by_outputs(model: nn.Module, name: str) -> Tensor:
    """The weight of a float layer as [outputs, inputs], a view. An `nn.MultiheadAttention` has no layer `in_proj`."""
    parent, _, last = name.rpartition(".")
    attention = model.get_submodule(parent)
    if isinstance(attention, nn.MultiheadAttention) and last == "in_proj":
        return attention.in_proj_weight
    layer: Any = model.get_submodule(name)
    return layer.weight.t() if type(layer).__name__ == "Conv1D" else layer.weight.flatten(1)


@torch.no_grad()
def with_rounded_weights(model: PreTrainedModel, names: list[str]) -> PreTrainedModel:
    """`model` itself, whose layers of these names have dequantized int8 weights."""
    for name in names:
        weight = by_outputs(model, name)
        weight.copy_(quantize_int8(weight.contiguous(), dim=-1).dequantize())  # twice does no more than once
    return model


architectures = pytest.mark.parametrize("name", ARCHITECTURES)
modes = pytest.mark.parametrize("mode", MODES)


@modes
@architectures
def test_error(name: str, mode: str) -> None:
    expected = output(name, made(name))
    model = in_int8(name, mode)
    rounded = output(name, with_rounded_weights(made(name), converted(model)))
    found = output(name, model)
    assert 0 < (found - expected).norm() <= 2 * (rounded - expected).norm()
    if mode == "weight_only":
        torch.testing.assert_close(found, rounded, rtol=0, atol=1e-5 * rounded.abs().max().item())


@modes
@architectures
def test_a_checkpoint_is_bit_equal(name: str, mode: str, tmp_path: Path) -> None:
    model, new = in_int8(name, mode), in_int8(name, mode, seed=1)
    expected = output(name, model)
    assert not torch.equal(output(name, new), expected)
    save_model(model, str(tmp_path / "int8.safetensors"))
    assert load_model(new, tmp_path / "int8.safetensors") == (set(), [])
    assert torch.equal(output(name, new), expected)


@architectures
def test_what_was_converted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    architecture = ARCHITECTURES[name]
    with caplog.at_level("INFO", "amp_kernels"):
        model = in_int8(name, "weight_only")
    (line,) = (record.message for record in caplog.records if record.name == "amp_kernels")
    assert {layer.rpartition(".")[2] for layer in converted(model)} == set(architecture.layers.split())
    assert line.startswith(f"quantize_: converted {architecture.share}% (")


# accelerate moves parameters and buffers to the CPU or to a disk, and brings them back for each call of a layer.
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk", "dispatch"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "gemma3"])
def test_accelerate_offloads(name: str, where: str, offload_buffers: bool, tmp_path: Path) -> None:
    model = in_int8(name, "dynamic")
    expected = output(name, model)
    options: Any = {"offload_buffers": offload_buffers}
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu", **options)
    elif where == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device="cpu", **options)
    else:
        devices = {part: "disk" for part, _ in model.named_children()}
        accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=tmp_path, **options)
    for _ in range(2):
        assert torch.equal(output(name, model), expected)
    layer = next(layer for layer in model.modules() if isinstance(layer, Int8Linear))
    assert layer.weight_codes.is_meta == offload_buffers and layer.dtype == torch.float32


class Mixed(nn.Module):
    """Classes of timm: a linear layer that is computed in int8, and a batch norm that is not folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3), timm.layers.BatchNormAct2d(64)
        self.head = timm.layers.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
def test_layers_of_timm(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    expected = model(LARGER["pixel_values"])
    with caplog.at_level("INFO", "amp_kernels"):
        quantize_(model, mode)
    assert caplog.messages[0] == "folded 0 of 1 batch norms into convolutions"
    assert "bias of timm.layers.norm_act.BatchNormAct2d" in caplog.messages[1]
    assert type(model.head) is Int8Linear and type(model.conv) is Int8Conv2d
    assert (model(LARGER["pixel_values"]) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_layer_of_timm_that_is_left_is_named_with_its_module(share: float, caplog: pytest.LogCaptureFixture) -> None:
    left = timm.layers.StdConv2d(8, 8, 1)
    model = nn.Sequential(left, nn.Conv2d(8, int(8 / share), 1))
    with caplog.at_level("INFO", "amp_kernels"):
        quantize_(model)
    (record,) = caplog.records
    assert model[0] is left and "0.weight of timm.layers.std_conv.StdConv2d" in record.message.replace("*.", "0.")
    assert (record.levelname == "WARNING") == (share > 0.1)
