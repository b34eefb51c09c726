"""Runs Python command lines in forks of one process that has already imported torch.

Each fork saves up to 4 s of CPU time. A fork imports packages from `PYTHONPATH` only: it does not see what a .pth file
adds, such as an editable install. Variables that Python or torch reads at its start, such as OMP_NUM_THREADS, keep the
values of the first process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def python(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a fork.

    Args:
        *arguments: A script, `-c` or `-m` first.
        cwd: The folder in which it runs.
        **environment: Variables that differ from this process.
    """
    words = [str(argument) for argument in arguments]
    server = _server()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        places = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)]
        pickle.dump((words, str(cwd), os.environ | environment, places), server.stdin)
        server.stdin.flush()
        code = pickle.load(server.stdout)
        told = []
        for file in (output, errors):
            file.seek(0)
            told.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *told)


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with the amp_kernels that this process imports."""
    spec = importlib.util.find_spec("amp_kernels")
    assert spec is not None and spec.origin is not None
    root = str(Path(spec.origin).parents[1])
    return python(*arguments, cwd=Path(__file__).parent, **{"PYTHONPATH": root} | environment)


@functools.cache
def _server() -> Any:
    # Without its site nothing is installed by a .pth file; the folders of packages are named instead.
    path = os.pathsep.join(folder for folder in sys.path if folder.endswith("-packages"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-S", __file__], env=os.environ | {"PYTHONPATH": path}, **pipes)
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # it then leaves its loop
    return server


def _serve() -> None:
    for module in ("setuptools", "torch.utils.cpp_extension", "torch._dynamo", "torch.distributed.tensor"):
        importlib.import_module(module)

    del sys.path[0]  # the folder of this file
    answers = os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(EOFError):
        while True:
            request = pickle.load(sys.stdin.buffer)
            if (fork := os.fork()) == 0:
                os._exit(_run(*request))
            _, status = os.waitpid(fork, 0)
            pickle.dump(os.waitstatus_to_exitcode(status), answers)
            answers.flush()


def _run(words: list[str], cwd: str, environment: dict[str, str], places: list[str]) -> int:
    """The exit code."""
    import runpy
    import traceback
    import warnings

    for number, place in enumerate(places, 1):
        os.dup2(os.open(place, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    warnings._processoptions(filter(None, environment.get("PYTHONWARNINGS", "").split(",")))  # type: ignore[attr-defined]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    first, *rest = words
    code = 0
    try:
        if first == "-c":
            sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv, sys.path[:0] = rest, [cwd]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = words, [str(Path(first).resolve().parent)]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
