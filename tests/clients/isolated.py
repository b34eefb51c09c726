"""Runs tests that may crash in forks of one child process: a crash fails its own test only.

The child imports torch and the test modules and computes nothing, so a fork of it costs milliseconds and inherits no
threads. A test with `@isolated` runs there; its arguments must be picklable, and a `backend` among them is forced.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

import amp_kernels
from amp_kernels.backends import backend_reasons

BACKENDS = [name for name in ("cpu", "reference") if backend_reasons("cpu").get(name) is None]
backends = pytest.mark.parametrize("backend", BACKENDS)
HERE = Path(__file__).resolve().parent
TIME_LIMIT = 120  # seconds of one test, on a machine that is busy with others


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """Says in which case of a loop a test failed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        __tracebackhide__ = True
        request = (test.__module__, test.__name__, arguments)
        child = _child()
        pickle.dump(request, child.stdin)
        child.stdin.flush()
        if failure := pickle.load(child.stdout):
            pytest.fail(failure, pytrace=False)

    return run


@functools.cache
def _child() -> Any:
    # Not all of sys.path: other tests put folders there whose modules are called as Python's are.
    shared = (HERE, HERE / "trainers", HERE.parent / "harness", HERE.parent)
    places = [*map(str, shared), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(child.stdin.close)  # the child then leaves its loop
    return child


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            module, name, arguments = pickle.load(requests)
        except EOFError:
            return
        test = getattr(importlib.import_module(module), name).__wrapped__
        pickle.dump(_in_a_fork(test, arguments), answers)
        answers.flush()


def _in_a_fork(test: Callable[..., None], arguments: dict[str, Any]) -> str:
    """What went wrong, or nothing."""
    read_end, write_end = os.pipe()
    if (fork := os.fork()) == 0:
        signal.alarm(TIME_LIMIT)
        with os.fdopen(write_end, "w") as told:
            told.write(_outcome(test, arguments))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as told:
        failure = told.read()
    _, status = os.waitpid(fork, 0)
    if os.WIFSIGNALED(status):
        return f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return failure or (f"the process left with {os.WEXITSTATUS(status)}" if status else "")


def ranks(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body` returns on each rank of a gloo group. Only inside an isolated test: each rank is a fork of it."""
    store = tempfile.mktemp()
    all_done, say_all_done = os.pipe()
    started = []
    for rank in range(world_size):
        read_end, write_end = os.pipe()
        if (fork := os.fork()) == 0:
            signal.alarm(TIME_LIMIT)
            os.close(say_all_done)
            failure, result = _on_a_rank(body, rank, world_size, store)
            with os.fdopen(write_end, "wb") as told:
                pickle.dump((failure, result), told)
            # A rank that fails leaves at once: its connections close, which ends the others' waiting. A rank that is
            # done stays until all are, because the others may still be connecting a new group to it.
            if not failure:
                os.read(all_done, 1)
            os._exit(0)
        os.close(write_end)
        started.append((fork, read_end))
    os.close(all_done)
    answers = []
    for _, read_end in started:
        with os.fdopen(read_end, "rb") as told:
            answers.append(told.read())
    os.close(say_all_done)
    results, failures = [], []
    for rank, ((fork, _), answer) in enumerate(zip(started, answers, strict=True)):
        _, status = os.waitpid(fork, 0)
        failure, result = pickle.loads(answer) if answer else (f"the process left with status {status}", None)
        results.append(result)
        failures += [f"rank {rank}: {failure}"] if failure else []
    if os.path.exists(store):
        os.unlink(store)
    assert not failures, "\n".join(failures)
    return results


def _on_a_rank(body: Callable[[int], Any], rank: int, world_size: int, store: str) -> tuple[str, Any]:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=TIME_LIMIT // 2),
        )
        return "", body(rank)
    except BaseException:
        return traceback.format_exc(), None


def _outcome(test: Callable[..., None], arguments: dict[str, Any]) -> str:
    forced = amp_kernels.use_backend(arguments["backend"]) if "backend" in arguments else contextlib.nullcontext()
    try:
        with forced:
            test(**arguments)
    except BaseException:
        return traceback.format_exc() or "it failed"
    return ""


if __name__ == "__main__":
    # Every fork would start threads of its own: 50 ms for the first sum, 3 ms for each that waits for a busy core.
    torch.set_num_threads(1)
    # Tests that print must not disturb the answers.
    answers_end = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers_end)
