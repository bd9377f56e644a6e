"""Make an environment with another torch, for the runs under two interpreters: `make_second_venv.py FOLDER`.

A second build of torch for the CPU alone is rarely at hand, and a build for CUDA drags some 4 GB of NVIDIA
libraries along that a CPU rank never calls. So torch is installed without them, and each library that it
would load gets a stand-in: its functions say "no CUDA-capable device" and do nothing. Linux; needs gcc and
binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TORCH = "torch==2.14.1"
NEEDED_BY_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
NEEDED_BY_RANKS = (
    "hydra-core>=1.3.8,<1.4",
    "numpy>=1.26",
    "omegaconf>=2.3,<2.4",
    "pydantic>=2.7,<3",
    "rich>=13",
    "safetensors>=0.5",
)
NO_DEVICE = 100
"""cudaErrorNoDevice."""
NVIDIA = re.compile(r"lib(cu|nccl|nv)")
SYMBOL = re.compile(r"_*(cu|nccl|nv)\w+")


def main(folder: Path, torch: str = TORCH) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *NEEDED_BY_TORCH, *NEEDED_BY_RANKS], check=True)
    subprocess.run([*pip, "--no-deps", torch], check=True)
    stand_in(next(folder.glob("lib/python*/site-packages/torch/lib")))
    told = "import torch; print(torch.__version__, 'CUDA' if torch.cuda.is_available() else 'CPU')"
    subprocess.run([python, "-c", told], check=True)


def stand_in(libraries: Path) -> None:
    """Put a stand-in beside torch for every NVIDIA library that torch needs and does not bring."""
    needed: set[str] = set()
    symbols: defaultdict[str | None, set[str]] = defaultdict(set)
    for library in libraries.glob("*.so*"):
        text = _output("readelf", "--dynamic", library)
        needed |= {name for name in re.findall(r"NEEDED.*\[(.+)\]", text) if NVIDIA.match(name)}
        for line in _output("nm", "--dynamic", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if SYMBOL.fullmatch(name):
                symbols[version or None].add(name)
    for name in sorted(needed):
        if not (libraries / name).exists():
            _build(libraries / name, symbols, needed)


def _build(path: Path, symbols: dict[str | None, set[str]], needed: set[str]) -> None:
    """A symbol with a version belongs to the library of that name; who owns any other does not matter."""
    versions = {v: s for v, s in symbols.items() if v == path.name or (v and v not in needed)}
    names = set().union(symbols.get(None, set()), *versions.values())
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(names))
    script = "".join(f"{v} {{ global: {'; '.join(sorted(s))}; }};\n" for v, s in versions.items())
    code, exports = path.with_suffix(".c"), path.with_suffix(".map")
    code.write_text(source)
    exports.write_text(script)
    options = [f"-Wl,-soname,{path.name}", *([f"-Wl,--version-script={exports}"] if script else [])]
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", path, code, *options], check=True)
    code.unlink()
    exports.unlink()


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
