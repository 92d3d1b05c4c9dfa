"""Why an engine ended: rules over its last lines, from the first to the last, and what its exit tells without them.

The rules here name no engine: they know what CUDA, NCCL, the dynamic linker, Python's libraries and the kernel print,
whoever runs them. A plugin adds those of its own engine, and says which lines are printed whatever went wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmgw.engines.types import Cause, CauseKind

__all__ = ["RULES", "Rule", "diagnose", "rule"]

MAX_LINE_CHARS = 600

# What keeps an engine from coming up. Once it serves the same words are of a request: an image whose address answers
# 401, a schema or an adapter that is refused.
OF_A_START = frozenset(
    {
        *(CauseKind.FLAG, CauseKind.PORT, CauseKind.PARSER, CauseKind.PARALLEL, CauseKind.CONTEXT),
        *(CauseKind.WEIGHTS_MISSING, CauseKind.WEIGHTS_CORRUPT, CauseKind.ARCHITECTURE, CauseKind.QUANTIZATION),
        *(CauseKind.TOKENIZER, CauseKind.UNAUTHORISED, CauseKind.OFFLINE),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A line that names a cause. ``remedy`` may use the pattern's groups as ``{0}``, ``{1}``.

    ``line``: what is shown in the place of the whole line; groups too. ``weak``: it may stand in the log of an engine
    that ends for another reason, so it counts only where nothing else does. ValueError where a text asks for a group
    that the pattern does not have.
    """

    kind: CauseKind
    pattern: re.Pattern[str]
    remedy: str | None = None
    line: str | None = None
    weak: bool = False

    def __post_init__(self) -> None:
        # Found when the plugin is loaded, and not by the one engine in a thousand that ends this way.
        try:
            _fill(self.remedy, ("",) * self.pattern.groups)
            _fill(self.line, ("",) * self.pattern.groups)
        except (LookupError, AttributeError, ValueError) as failed:
            text = f"the rule {self.pattern.pattern!r} can't fill its remedy or line: {failed!r}"
            raise ValueError(text) from failed


def rule(
    kind: CauseKind, pattern: str, remedy: str | None = None, *, line: str | None = None, weak: bool = False
) -> Rule:
    """A rule over a pattern that is looked for anywhere in a line, in any case."""
    return Rule(kind=kind, pattern=re.compile(pattern, re.IGNORECASE), remedy=remedy, line=line, weak=weak)


def diagnose(
    lines: Sequence[str],
    code: int | None,
    signal: int | None,
    rules: Sequence[Rule] = (),
    *,
    strip: re.Pattern[str] | None = None,
    generic: re.Pattern[str] | None = None,
    served: bool = False,
) -> Cause | None:
    """The cause that the first line names for which there is a rule: an engine's own ``rules`` come before the common.

    ``strip`` is the prefix of its log lines. A line that ``generic`` matches says only that something went wrong, and
    is never the cause. ``served``: the lines are of an engine that was up, so no rule counts whose kind is a start's.
    None: neither the lines nor the exit tell.
    """
    known = [each for each in (*rules, *RULES) if not (served and each.kind in OF_A_START)]
    weak: Cause | None = None
    for line in (_clean(line, strip) for line in lines):
        if not line or (generic is not None and generic.search(line)):
            continue
        for each in known:
            # The first weak one stands, so there is no need to look for another.
            if (each.weak and weak is not None) or (found := each.pattern.search(line)) is None:
                continue
            if not each.weak:
                return _cause(each, found, line)
            weak = _cause(each, found, line)
    return weak or _read_exit(code, signal)


def _clean(line: str, strip: re.Pattern[str] | None) -> str:
    # Cut before anything looks at it: a line may be a whole model's configuration.
    line = line[: MAX_LINE_CHARS * 2]
    found = strip.match(line) if strip is not None else None
    return " ".join(line[found.end() if found else 0 :].split())


def _cause(each: Rule, found: re.Match[str], line: str) -> Cause:
    groups = tuple(group or "" for group in found.groups())
    said = _fill(each.line, groups) or line
    said = said if len(said) <= MAX_LINE_CHARS else f"{said[:MAX_LINE_CHARS]}…"
    return Cause(kind=each.kind, line=said, remedy=_fill(each.remedy, groups))


def _fill(text: str | None, groups: Sequence[str]) -> str | None:
    return text.format(*groups) if text is not None else None


# What the exit tells when no line does.

_SIGNALS = {
    4: (CauseKind.CPU_UNSUPPORTED, "killed by SIGILL: the binary uses instructions that this CPU does not have",
        "install a build for this CPU: one without AVX2 or AVX-512, say"),
    7: (CauseKind.HOST_MEMORY, "killed by SIGBUS: a mapped file or /dev/shm had no room",
        "give /dev/shm more room, and look whether the file of the weights is whole"),
    9: (CauseKind.HOST_MEMORY, "killed by SIGKILL and nothing in its log: most likely the kernel was out of memory",
        "look for 'Out of memory' in the kernel's log: if it is there give it less context, or a node with more "
        "memory; if not, somebody or another program killed it"),
}  # fmt: skip

_CODES = {
    126: (CauseKind.LIBRARY, "ended with exit code 126: the program can't be executed",
          "see that it is executable, and built for this machine"),
    127: (CauseKind.LIBRARY, "ended with exit code 127: the program, or a library that it needs, is missing",
          "run it with --version on the node: it names what is missing"),
}  # fmt: skip


def _read_exit(code: int | None, signal: int | None) -> Cause | None:
    # A shell, or a program that started it, tells of a signal as 128 and its number.
    number = signal if signal is not None else code - 128 if code is not None and code > 128 else None
    found = _SIGNALS.get(number) if number is not None else _CODES.get(code) if code is not None else None
    if found is None:
        return None
    kind, line, remedy = found
    return Cause(kind=kind, line=line, remedy=remedy)


# What is printed by whatever an engine stands on: CUDA 12 and 13, NCCL 2, PyTorch 2, huggingface_hub, safetensors and
# glibc, as they were seen in the output of engines in 2026 or read in their sources.

RULES: tuple[Rule, ...] = (
    # the dynamic linker and the kernel's loader
    rule(
        CauseKind.DRIVER,
        r"(?:error while loading shared libraries|ImportError|OSError): (libcuda\.so\S*|libnvidia-ml\.so\S*):? "
        r"cannot open shared object",
        "install the NVIDIA driver on the node: it brings {0}",
        line="the shared library {0} is missing",
    ),
    rule(
        CauseKind.LIBRARY,
        r"error while loading shared libraries: (\S+): cannot open shared object",
        "install the library {0} on the node",
        line="the shared library {0} is missing",
    ),
    rule(
        CauseKind.LIBRARY,
        r"(?:ImportError|OSError): (lib\S+\.so\S*): cannot open shared object",
        "install the library {0}, in the engine's environment or on the node",
        line="the shared library {0} is missing",
    ),
    rule(
        CauseKind.LIBRARY,
        r"version .(GLIBC(?:XX)?_[\d.]+). not found",
        "this build wants a newer system library ({0}): install a build for this distribution",
    ),
    rule(
        CauseKind.CPU_UNSUPPORTED, r"Exec format error", "the binary is for another CPU: install one for this machine"
    ),
    rule(CauseKind.CPU_UNSUPPORTED, r"\bIllegal instruction\b", "install a build for this CPU"),
    # the card and its driver
    rule(
        CauseKind.GPU_MEMORY,
        r"(?:CUDA|HIP) out of memory\. Tried to allocate|torch\.(?:cuda\.)?OutOfMemoryError"
        r"|cudaMalloc failed: out of memory|CUDA error: out of memory",
        "it needs more GPU memory than is free: less context, fewer requests at once, a higher tp, or smaller weights",
    ),
    rule(
        CauseKind.GPU_IN_USE,
        r"Free memory on device .{1,200} is less than desired GPU memory utilization|memory capacity is unbalanced",
        "something else holds memory of this card: end it (`nvidia-smi` names it), or ask for a smaller share",
    ),
    rule(
        CauseKind.GPU_UNSUPPORTED,
        r"no kernel image is available for execution on the device|invalid device function"
        r"|is only supported on GPUs with compute capability",
        "this build does not support this card: install one that does, or choose another dtype or gpu_class",
    ),
    rule(
        CauseKind.DRIVER,
        r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old"
        r"|No CUDA GPUs are available|Error 803: system has unsupported display driver",
        "look at `nvidia-smi` on the node: the driver is absent, broken, or older than this build of the engine wants",
    ),
    rule(
        CauseKind.GPU_FAULT,
        r"CUDA error: (?:uncorrectable ECC|unspecified launch failure|an illegal memory access|device-side assert)"
        r"|NVRM: Xid",
        "look for 'Xid' in the kernel's log; a card that falls off the bus needs a reset or a technician",
    ),
    # several cards, several machines
    rule(
        CauseKind.COLLECTIVE,
        r"Watchdog caught collective operation timeout|ncclSystemError|ncclRemoteError|ncclInternalError"
        r"|ncclInvalidUsage|Bootstrap : no socket interface found|ibv_\w+.{0,200} failed",
        "the cards can't speak with each other: check the fabric's interface and adapters, and its cables",
    ),
    rule(
        CauseKind.RENDEZVOUS,
        r"DistNetworkError|DistStoreError|Timed out after \d+ seconds waiting for clients"
        r"|The client socket has failed to connect",
        "the nodes of the replica did not find each other: check that the fabric's addresses reach one another",
    ),
    # memory and disk of the machine
    rule(
        CauseKind.DISK,
        r"No space left on device|Disk quota exceeded",
        "make room on the disk that it names; for /dev/shm give the machine more shared memory",
    ),
    rule(
        CauseKind.HOST_MEMORY,
        r"Cannot allocate memory|std::bad_alloc|\bMemoryError\b|DefaultCPUAllocator: can't allocate memory"
        r"|\bBus error\b",
        "the node has too little memory for it: less context, fewer slots, smaller weights, or another node",
    ),
    # weights and what comes with them
    rule(
        CauseKind.UNAUTHORISED,
        r"GatedRepoError|401 Client Error|403 Client Error|Access to model .{1,200} is restricted"
        r"|Repository Not Found for url",
        "the hub does not give this repository: check its name, accept its licence there, and set a token (HF_TOKEN)",
    ),
    rule(
        CauseKind.OFFLINE,
        r"LocalEntryNotFoundError|outgoing traffic has been disabled",
        "the weights are not on this node and the hub can't be reached: fetch them, or give the path of a folder",
    ),
    rule(
        CauseKind.WEIGHTS_CORRUPT,
        r"SafetensorError|incomplete metadata, file not fully covered|HeaderTooLarge|MetadataIncompleteBuffer",
        "a file of the weights is cut off or no weights at all (a git-lfs pointer, a page of HTML): fetch it again; "
        "`llmgw ctl weights pull SOURCE` mends what llmgw has fetched; of your own, put the whole file there",
    ),
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"HFValidationError: Repo id must be|Cannot find any model weights|does not appear to have a file named"
        r"|is not a local folder and is not a valid model identifier|Unrecognized model in ",
        "there is no model at the source: see that the path, or the repository, is there and is the whole model's",
    ),
    rule(
        CauseKind.ARCHITECTURE,
        r"Model architectures? .{1,400}(?:are|is) not supported"
        r"|model type .{1,200}but Transformers does not recognize",
        "this release of the engine does not know this architecture: upgrade it, or choose another engine",
    ),
    rule(
        CauseKind.TOKENIZER,
        r"Tokenizer class \w+ does not exist|(?:argument|option|set|setting|pass) .?trust_remote_code=True"
        r"|requires .{0,200}sentencepiece"
        r"|No module named .(?:sentencepiece|tiktoken).",
        "the tokenizer needs something more: a newer engine, a package in its environment, or --trust-remote-code",
    ),
    rule(
        CauseKind.QUANTIZATION,
        r"torch\.(?:float16|bfloat16) is not supported for quantization|Unknown quantization method"
        r"|quantization method .{1,200} not supported for the current GPU",
        "the weights' quantization does not go with this card or dtype: choose other weights, or another gpu_class",
    ),
    # the command line
    rule(
        CauseKind.FLAG,
        r"error: unrecognized arguments: (.+)",
        "this release does not know {0}: take it out of args; `llmgw ctl engine-check` tells what it is called now",
    ),
    rule(
        CauseKind.FLAG,
        r"error: argument (\S+): (?:invalid|expected)|error: ambiguous option: (\S+)",
        "`llmgw ctl engine-check` tells what this release takes there",
    ),
    rule(
        CauseKind.PORT,
        r"Address already in use|EADDRINUSE",
        "another program has the port",
    ),
    # what may be said on the way by one that goes on
    rule(
        CauseKind.DRIVER,
        r"(?:libcuda\.so\S*|libnvidia-ml\.so\S*): cannot open shared object|Failed to initialize NVML",
        "look at `nvidia-smi` on the node: the NVIDIA driver is absent or broken",
        weak=True,
    ),
    rule(
        CauseKind.COLLECTIVE,
        r"NCCL WARN ",
        "the cards can't speak with each other: check the fabric's interface and adapters, and its cables",
        weak=True,
    ),
    rule(
        CauseKind.OFFLINE,
        r"Temporary failure in name resolution|Max retries exceeded with url",
        "a name on the network can't be reached from this node: if it is the hub's, fetch the weights beforehand",
        weak=True,
    ),
    rule(
        CauseKind.RENDEZVOUS,
        r"Connection refused.{0,200}tcp://|tcp://.{0,200}Connection refused|connect\(\) timed out",
        "the nodes of the replica did not find each other: check that the fabric's addresses reach one another",
        weak=True,
    ),
    rule(
        CauseKind.COLLECTIVE,
        r"Connection closed by remote peer",
        "another shard of the replica has ended: its own log has the cause",
        weak=True,
    ),
)
