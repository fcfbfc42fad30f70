"""Environment of jobs: which variables of the daemon, or of the user's shell, a job and its notifications get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

# What programs need to run at all: where things are, the language, and the settings of numerical libraries.
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("TMPDIR", "TMP", "TEMP", "XDG_*", "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("VIRTUAL_ENV", "CONDA_*", "PYTHON*", "COVERAGE_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NCCL_*", "GLOO_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "MALLOC_*", "GLIBC_TUNABLES"),
    *("TORCH_*", "PYTORCH_*", "TRITON_*", "CARPOOL_*"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|_KEY$|^KEY$|API_?KEY|AUTH")
_OWN_SECRETS = ("CARPOOL_TOKEN", "CARPOOL_TLS_KEY")


def daemon_environment(environment: Mapping[str, str], pass_env: Sequence[str] = ()) -> dict[str, str]:
    """The part of a daemon's environment that jobs of its users get: `ALLOWED`, and patterns the operator names.

    A name that looks like a secret passes only if it is named; carpool's own secrets never do.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _OWN_SECRETS and (_is_like(name, pass_env) or _is_allowed(name))
    }


def shell_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of jobs that a user runs from a shell: all of it but carpool's own secrets."""
    return {name: value for name, value in environment.items() if name not in _OWN_SECRETS}


def _is_allowed(name: str) -> bool:
    return _is_like(name, ALLOWED) and _SECRET.search(name) is None


def _is_like(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
