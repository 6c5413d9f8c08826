"""Keeps credentials out of records: arguments are masked, the environment is filtered by an allow-list.

Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SECRET_WORDS = _set_of(
    """
    password passwd pwd passphrase passcode secret secrets credential credentials apikey apitoken
    authtoken accesskey secretkey privatekey authorization bearer signature sig pat
    """
)
# Ambiguous alone ("--pad-token", "--sort-key"): a secret only after a word of _OWNERS, or if the value looks random.
_AMBIGUOUS_WORDS = frozenset({"token", "key", "auth"})
_OWNERS = _set_of(
    """
    api access private secret auth hf hub huggingface wandb github gh gitlab git bot bearer session
    refresh id account storage license encryption ssh service openai anthropic aws azure gcp comet
    neptune mlflow clearml kaggle slack datadog dd sas client deploy admin user registry docker npm pypi
    """
)
_HARMLESS_VALUES = frozenset({"true", "false", "none", "null", "yes", "no", "", MASK})

_KNOWN_SECRETS = re.compile(
    r"\b(?:"
    r"hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}"
    r"|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abeoprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}"
    r"|ya29\.[\w-]{8,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|wandb_v1_\w{8,}"
    r"|eyJ[\w-]{4,}\.[\w-]{4,}\.[\w-]*"
    r")"
)
_URL_LOGIN = re.compile(r"(?<=://)(?:[^\s/@:]*:[^\s/@]*|[^\s/@:]{16,})(?=@)")
_SCHEME_LOGIN = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
# `name=value`, `"name": "value"` and `--name value` inside a longer text such as a `bash -c` line or JSON.
_VALUE = r"""("[^"]*"|'[^']*'|[^\s"',;&}\])]+)"""
_NAMED_VALUE = re.compile(r"""([A-Za-z_][\w.-]*)(["']?\s*=\s*|["']?\s*:\s+|["']:)""" + _VALUE)
_OPTION_VALUE = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)" + _VALUE)

_ALLOWED_NAMES = _set_of(
    """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
    ROLE_NAME NODE_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
    TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS MKL_NUM_THREADS OMP_PROC_BIND
    KMP_AFFINITY CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS
    CUBLAS_WORKSPACE_CONFIG HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE PYTHONHASHSEED
    PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL
    TORCH_SHOW_CPP_STACKTRACES TORCH_ALLOW_TF32_CUBLAS_OVERRIDE SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID
    SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES SLURM_JOB_NUM_NODES OMPI_COMM_WORLD_RANK
    OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMI_SIZE ACCELERATE_USE_CPU
    ACCELERATE_MIXED_PRECISION PYTHONSAFEPATH PYTHONOPTIMIZE PYTORCH_NO_CUDA_MEMORY_CACHING
    """
)
_ALLOWED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "RCCL_")


def mask_arguments(argv: Iterable[str]) -> list[str]:
    """The command line with everything that looks like a credential replaced by `***`."""
    masked = []
    option = ""
    for argument in argv:
        if option and not argument.startswith("-") and _is_secret(option, argument):
            masked.append(MASK)
        else:
            masked.append(mask_text(argument))
        option = argument if argument.startswith("-") and "=" not in argument else ""
    return masked


def mask_text(text: str) -> str:
    """`text` with credentials replaced by `***`."""
    text = _URL_LOGIN.sub(MASK, text)
    text = _SCHEME_LOGIN.sub(rf"\1 {MASK}", text)
    text = _KNOWN_SECRETS.sub(MASK, text)
    text = _NAMED_VALUE.sub(_mask_match, text)
    return _OPTION_VALUE.sub(_mask_match, text)


def allowed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Only the variables that describe a distributed job, with masked values."""
    return {
        name: MASK if _is_secret_variable(name, value) else mask_text(value)
        for name, value in sorted(environ.items())
        if name in _ALLOWED_NAMES or name.startswith(_ALLOWED_PREFIXES)
    }


def _is_secret_variable(name: str, value: str) -> bool:
    # Unlike options such as "--pad-token", variables with these words usually hold credentials.
    return _words(name)[-1] in _AMBIGUOUS_WORDS or _is_secret(name, value)


def _mask_match(match: re.Match[str]) -> str:
    name, separator, value = match.groups()
    quote = value[0] if value[:1] in {'"', "'"} else ""
    if not _is_secret(name, value.strip(quote) if quote else value):
        return match.group(0)
    return f"{name}{separator}{quote}{MASK}{quote}"


def _is_secret(name: str, value: str) -> bool:
    if value.lower() in _HARMLESS_VALUES or value.endswith(".py"):
        return False
    words = _words(name)
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    if not words or words[-1] not in _AMBIGUOUS_WORDS:
        return False
    return words == ["token"] or not _OWNERS.isdisjoint(words[:-1]) or _looks_random(value)


def _words(name: str) -> list[str]:
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]


def _looks_random(value: str) -> bool:
    """Whether a value is long, has no separators of paths or sentences, and mixes letters and digits."""
    if len(value) < 16 or not re.fullmatch(r"[\w.~+=-]+", value):
        return False
    return bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value)) and len(set(value)) >= 8
