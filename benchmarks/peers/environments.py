"""Virtual environments for peers that must not share one with the project."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

INSTALL_TIMEOUT_S = 1800.0
SHOWN_LINES = 4  # of what failed
BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
VERSION = "import importlib.metadata as m; print(m.version('{}'))"


class MissingPeerError(RuntimeError):
    """A peer that does not install here, and why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, what is set for it, and the peer's version."""

    python: Path
    version: str
    variables: dict[str, str] = field(default_factory=dict)


def deepspeed_environment(cache: Path) -> Environment:
    """DeepSpeed beside this torch and transformers, installed into `cache` where it is not there.

    Its extension is built before ranks start: two that build at once wait for each other's lock,
    and one that is killed leaves it behind. Raises `MissingPeerError` where a step fails.
    """
    return _environment(cache, "deepspeed", ("deepspeed", "ninja"), BUILD)


def accelerate_environment(cache: Path) -> Environment | None:
    """Accelerate, which Trainer needs, too, likewise; None where it is in this environment."""
    if importlib.util.find_spec("accelerate") is not None:
        return None
    return _environment(cache, "accelerate", ("accelerate",))


def _environment(
    cache: Path, name: str, packages: Sequence[str], build: str | None = None
) -> Environment:
    own = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in own.items()]
    folder = cache.absolute() / "-".join([name, *pins]).replace("==", "-")
    python, ready = folder / "bin" / "python", folder / "ready"
    variables = {
        "TORCH_EXTENSIONS_DIR": str(folder / "built"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # ninja
    }
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        for listed in ([pins[0]], [*pins, *packages]):  # DeepSpeed's setup imports torch
            _run(str(python), "-m", "pip", "install", "--quiet", *listed)
        if build is not None:
            _run(str(python), "-c", build, variables=variables)
        ready.write_text(_run(str(python), "-c", VERSION.format(name)).strip())
    return Environment(python, ready.read_text(), variables)


def _run(*command: str, variables: Mapping[str, str] | None = None) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            env=os.environ | (variables or {}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingPeerError(str(error)) from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-SHOWN_LINES:]
        raise MissingPeerError(f"{' '.join(command[:6])} ...: {' / '.join(last)}")
    return done.stdout
