"""The build backend: that of setuptools, once its version is known to do.

pip answers a backend that cannot be imported with a traceback of 75 lines, and `pip install --no-build-isolation` does
not look at what pyproject.toml requires. A venv has no setuptools from Python 3.12 on, and 65.5 before.
"""

import sys

OLDEST = 77  # reads the licence in pyproject.toml; from 70 on it makes wheels without the package `wheel`

try:
    from setuptools import __version__ as found
except ImportError:
    found = "none"
if found == "none" or int(found.split(".")[0]) < OLDEST:
    sys.exit(
        f"amp_kernels: setuptools >= {OLDEST} must be installed before the build, got {found}; "
        f"run `pip install torch 'setuptools>={OLDEST}' ninja`, then repeat this command"
    )

from setuptools.build_meta import *  # noqa: E402, F403
