"""The build backend of this package. It checks the version of setuptools, then hands the build to setuptools.

Without the check, pip prints a traceback of 75 lines if setuptools is missing. `pip install --no-build-isolation` does
not check the requirements in pyproject.toml. A new venv has no setuptools from Python 3.12 on, and version 65.5 before.
"""

import sys

OLDEST = 77  # reads `license` in pyproject.toml; from version 70 on, setuptools needs no package `wheel`

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
