"""The build backend of this package. It checks the version of setuptools, then hands the build to setuptools.

`pip install --no-build-isolation` does not check the requirements in pyproject.toml. Without the check here, pip prints
a traceback of 75 lines if setuptools is missing. From Python 3.12 on, a new venv has no setuptools. With most releases
of Python 3.10 and 3.11, a new venv has setuptools 65.5.
"""

import sys

# setuptools 77 is the first version that accepts `license = "MIT"` in pyproject.toml. From version 70.1 on, setuptools
# needs no package `wheel`.
OLDEST = 77

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
