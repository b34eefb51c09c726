"""``optimizer.state`` that counts its changes, so that a step need not look through it.

To compare the identity of every value of a thousand parameters took 0.15 ms of a step of 0.8 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


class Changes:
    """How often something was set or removed."""

    count = 0


class ParameterState(dict[str, Any]):
    """The state of a parameter; copies and pickles of it are plain dicts."""

    def __init__(self, changes: Changes, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(items)
        self.changes = changes

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


class States(defaultdict[Tensor, Any]):
    """The states of all parameters. A dict that is put into it is copied."""

    def __init__(self, items: Mapping[Tensor, Any]) -> None:
        super().__init__(dict)
        self.changes = Changes()
        self.update(items)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __missing__(self, param: Tensor) -> ParameterState:
        self[param] = {}
        return self[param]

    def __setitem__(self, param: Tensor, state: Any) -> None:
        self.changes.count += 1
        super().__setitem__(param, ParameterState(self.changes, state) if isinstance(state, dict) else state)

    def setdefault(self, param: Tensor, default: Any = None) -> Any:
        if param not in self:
            self[param] = default
        return self[param]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for param, state in dict(*args, **kwargs).items():
            self[param] = state

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self


def _count_calls(kind: type[Any], name: str) -> None:
    method = getattr(kind, name)

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.count += 1
        return method(self, *args, **kwargs)

    setattr(kind, name, counting)


for _name in ("__delitem__", "clear", "pop", "popitem"):
    _count_calls(States, _name)
for _name in ("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "setdefault", "update"):
    _count_calls(ParameterState, _name)
