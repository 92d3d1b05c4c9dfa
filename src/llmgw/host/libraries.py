"""The shared libraries that a program lacks, all of them by name, and what brings them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from llmgw.engines.types import Command, ProbeOutput
from llmgw.host.process import run_probe

# What the loader says of the first one (glibc, musl), and Python of one that an extension needs.
_FIRST = re.compile(
    r"([^\s:'\"/]+\.so[\w.]*): cannot open shared object file|Error loading shared library ([^\s:'\"/]+\.so[\w.]*):"
)
# What it says of each when it only lists them, as ldd has it do.
_LISTED = re.compile(r"^\s*([^\s/]+) => not found", re.MULTILINE)

_DRIVER = "the NVIDIA driver"
_PACKAGES = {
    "libGL.so.1": "libgl1",
    "libOpenCL.so.1": "ocl-icd-libopencl1",
    "libatomic.so.1": "libatomic1",
    "libcrypto.so.3": "libssl3",
    "libcurl-gnutls.so.4": "libcurl3-gnutls",
    "libcurl.so.4": "libcurl4",
    "libgcc_s.so.1": "libgcc-s1",
    "libgfortran.so.5": "libgfortran5",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgomp.so.1": "libgomp1",
    "libhwloc.so.15": "libhwloc15",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libopenblas.so.0": "libopenblas0",
    "librdmacm.so.1": "librdmacm1",
    "libsndfile.so.1": "libsndfile1",
    "libssl.so.3": "libssl3",
    "libstdc++.so.6": "libstdc++6",
    "libtbb.so.12": "libtbb12",
    "libtcmalloc_minimal.so.4": "libtcmalloc-minimal4",
    "libvulkan.so.1": "libvulkan1",
    "libz.so.1": "zlib1g",
    "libzstd.so.1": "libzstd1",
}
_BROUGHT = (
    (re.compile(r"libcuda\.so|libnvidia-"), _DRIVER),
    (re.compile(r"lib(?:cudart|cublas|cublasLt|cufft|curand|cusolver|cusparse|nvrtc|nvJitLink)\.so\.(\d+)"), "CUDA {}"),
    (re.compile(r"libcudnn\w*\.so\.(\d+)"), "cuDNN {}"),
    (re.compile(r"libnccl\.so"), "NCCL"),
    (re.compile(r"lib(?:amdhip64|hsa-runtime64|rocblas|hipblas|hipblaslt|rccl)\.so"), "ROCm"),
)


def read_missing(text: str) -> tuple[str, ...]:
    """The libraries that a program's last words name as not found."""
    return tuple(dict.fromkeys(first or second for first, second in _FIRST.findall(text)))


async def find_missing(command: Command, output: ProbeOutput, limit_seconds: float, *, marker: str) -> tuple[str, ...]:
    """All that ``command`` lacks, which failed with this output; () when that was not for a library.

    The loader ends at the first one that it does not find. Asked as ldd asks it, it lists all and does not start the
    program; one whose loader does not know that is run once more as it was, and fails again.
    """
    named = read_missing(f"{output.stderr}\n{output.stdout}")
    if not named:
        return ()
    asked = replace(command, env={**command.env, "LD_TRACE_LOADED_OBJECTS": "1"})
    listed = await run_probe(asked, limit_seconds, marker=marker)
    more = _LISTED.findall(listed.stdout) if isinstance(listed, ProbeOutput) else []
    return tuple(dict.fromkeys((*more, *named)))


def name_packages(libraries: Iterable[str]) -> str | None:
    """What to install for these libraries, in one line; None for none of them."""
    packages, others, unknown = [], [], []
    for library in libraries:
        brought = next(
            (what.format(*found.groups()) for known, what in _BROUGHT if (found := known.match(library))), None
        )
        if library in _PACKAGES:
            packages.append(_PACKAGES[library])
        elif brought is not None:
            others.append(f"{brought} ({library} comes with it)")
        else:
            unknown.append(library)
    steps = []
    if packages:
        steps.append(f"on Debian and Ubuntu: apt install {' '.join(sorted(set(packages)))}")
    if others:
        steps.append(f"install {', '.join(dict.fromkeys(others))}")
    if unknown:
        steps.append(f"install what brings {', '.join(unknown)}, or put back what lay beside the program")
    return "; ".join(steps) or None
