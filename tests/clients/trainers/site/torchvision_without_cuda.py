"""Lets `import torchvision` work with a CPU build of torch. PyPI's torchvision links CUDA: its operators do not load.

torchvision registers shapes of its operators when it is imported, which fails if there are no such operators. Nothing
here calls them, so names are enough. The Makefile has Python import this file at every start of the trainers' venv,
also in the processes that tests start.
"""

import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


class Finder:
    """Looks on before torchvision is found, and finds nothing itself."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            spec = PathFinder.find_spec(name)
            if spec is not None and spec.origin is not None:
                define_operators(Path(spec.origin).parent)
        return None


def define_operators(folder: Path) -> None:
    import torch

    try:
        torch.ops.load_library(folder / "_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in set(re.findall(r'"torchvision::(\w+)"', (folder / "_meta_registrations.py").read_text())):
            library.define(f"{name}(Tensor x) -> Tensor")
        define_operators.library = library  # its operators go with it


sys.meta_path.insert(0, Finder)
