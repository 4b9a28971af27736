"""What a figure needs beside it to be a result: machine, versions, commit and the command that made it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from focus_attn.version import __version__


def describe_run(command: str | None = None) -> dict[str, Any]:
    """Hardware, software and command of this process, as plain JSON values."""
    return {
        "command": command or " ".join([_program(), *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "focus_attn": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": _version("triton"),
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: str | Path, results: dict[str, Any]) -> None:
    """Results beside the run that made them; replaced whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps({"run": describe_run(), **results}, indent=2) + "\n")
    os.replace(draft, path)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _program() -> str:
    name, spec = Path(sys.argv[0]), getattr(sys.modules["__main__"], "__spec__", None)
    if name.name == "focus":
        return "focus"
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {Path(*name.parts[-2:])}"


def _commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
