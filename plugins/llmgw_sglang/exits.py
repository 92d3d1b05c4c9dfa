"""Why SGLang ended, from its last lines.

Its processes are a tree: a scheduler for each card prints a traceback and tells the one that serves, which says only
that a child failed, and kills them all, itself last. So its own end by SIGKILL tells nothing. Once it serves there are
tracebacks of requests too, of which nothing ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llmgw.engines import Cause, CauseKind, diagnose, rule
from llmgw_sglang.logs import PREFIX

_MOST_CHARS = 600

_LESS_MEMORY = "less for the cache (--mem-fraction-static 0.8), smaller graphs (--cuda-graph-max-bs-decode 16), "
_LESS_MEMORY += "less context, or a higher tp"

# The texts are those of 0.5.23; those before the first --cuda-graph-max-bs-decode and the like have the same heads.
_RULES = (
    rule(
        CauseKind.KV_CACHE,
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the weights leave no room for the cache: raise --mem-fraction-static, or take a higher tp or smaller weights",
    ),
    rule(CauseKind.GPU_MEMORY, r"OutOfMemoryError: |Capture .*graph failed: .*out of memory", _LESS_MEMORY),
    rule(
        CauseKind.OTHER,
        r"Capture .*graph failed: ",
        "turn the graphs off to see whether it is them (--disable-cuda-graph), or take another --attention-backend",
    ),
    rule(
        CauseKind.CONTEXT,
        r"Error: Warning: .*context_length \((\d+)\) is greater than the derived context_length \((\d+)\)",
        "set context_length to {1}, which the model was made for, or less",
        line="context_length {0} is more than the {1} of the model",
    ),
    rule(
        CauseKind.PARSER,
        r"error: argument (--(?:tool-call|reasoning)-parser): invalid choice: '([^']*)'",
        "`llmgw ctl engine-check` lists the parsers that this release has",
        line="this release has no parser '{1}' for {0}",
    ),
    rule(
        CauseKind.FLAG,
        r"chunked_prefill_size must be divisible by page_size",
        "give --chunked-prefill-size a multiple of --page-size",
    ),
    rule(
        CauseKind.PARALLEL,
        r"Error: .*\b(?:must be|is not) divisible by\b",
        "choose another tp or pp: the model's heads and layers, and the nodes, have to go into it evenly",
    ),
    rule(
        CauseKind.PORT,
        r"Port is already in use\. |bootstrap_port \d+ is already in use|_port at \d+ is not available",
        "another program has a port that is used between its processes",
    ),
    rule(
        CauseKind.HUNG,
        r"\w+ watchdog timeout \(.*soft=False",
        "a step took longer than --watchdog-timeout: look for what its cards wait for, above all between nodes",
    ),
    rule(
        CauseKind.OTHER,
        r"Max retries exceeded with url: \S{0,200}/(?:get_)?model_info",
        "its warm-up request to itself went by way of a proxy: set NO_PROXY=127.0.0.1,localhost in env",
    ),
    rule(
        CauseKind.WEIGHTS_MISSING,
        r"Failed to load LoRA adapter ([^\s:]+)",
        "see that the adapter {0} was made for this model, and that its source is there",
    ),
    rule(
        CauseKind.GPU_UNSUPPORTED,
        r"No accelerator \(CUDA",
        "it sees no card: look at `nvidia-smi` on the node, and that its PyTorch is a build for that kind of card",
    ),
    rule(
        CauseKind.LIBRARY,
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "install the package {0} in SGLang's environment",
        line="the Python package {0} is missing",
    ),
    rule(
        CauseKind.HOST_MEMORY,
        r"Subprocess (\S+) \(pid=\d+\) crashed with exit code -9\b|exit code: -9\)",
        "look for 'Out of memory' in the kernel's log; give it less context, or a node with more memory",
        weak=True,
    ),
)

# What is said whatever went wrong, of packages that are not needed, of what is only watched, and the settings in full,
# which have the names of many a trouble in them.
_GENERIC = re.compile(
    r"Received sigquit from a child process|Ignore import error|hit an exception: Traceback|^Traceback \(most recent"
    r"|^server_args=|Initialization failed\. warmup error|^The memory capacity is unbalanced|(?<!Error: )Warning: "
    r"|kill_process_tree|resource_tracker|leaked (?:semaphore|shared_memory)"
)
# What stands before is what it has survived.
_UP = re.compile(r"The server is fired up and ready to roll")
# Printed by one that is up, for a log that has lost its beginning.
_SERVES = re.compile(r"Decode batch|Error in request: ")
# What begins the traceback that a process ends with; one of a request has an end of its own.
_ENDS = "hit an exception"
_CHAINED = "the above exception"
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(
    r"(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}?(?:Error|Exception|Timeout|Expired|Failure)(?:: .*)?", re.DOTALL
)
# What the one that serves says of a child's end, in a traceback of its own too.
_CHILD_FAILED = re.compile(r"Received sigquit from a child process|scheduler died during initialization")


def read(lines: Sequence[str], code: int | None, signal: int | None) -> Cause | None:
    """What the first line names for which there is a rule; else what the first traceback ends with; else the exit."""
    up = next((at for at, line in enumerate(lines) if _UP.search(line[: _MOST_CHARS * 2])), None)
    served = up is not None or any(_SERVES.search(line[: _MOST_CHARS * 2]) for line in lines)
    if served:
        lines = list(_leave_out_requests(lines[up or 0 :]))
    cause = diagnose(lines, None, None, _RULES, strip=PREFIX, generic=_GENERIC, served=served)
    if cause is not None:
        return cause
    texts = [_strip(line) for line in lines]
    raised = _find_raised(texts)
    if raised is not None:
        return Cause(kind=CauseKind.OTHER, line=raised)
    if any(map(_CHILD_FAILED.search, texts)):
        text = "one of its processes ended without saying why"
        remedy = "look for 'Out of memory' or 'Xid' in the kernel's log of the node"
        return Cause(kind=CauseKind.OTHER, line=text, remedy=remedy)
    return diagnose((), code, signal)


def _leave_out_requests(lines: Sequence[str]) -> Iterator[str]:
    """The lines without the tracebacks that no process ended with."""
    inside = of_a_request = chained = False
    for line in lines:
        text = _strip(line)
        if text.endswith(_TRACEBACK):
            # One that came of another's handling is of the same.
            of_a_request = of_a_request if chained else _ENDS not in text
            inside = of_a_request
        elif inside and PREFIX.match(line):
            # Another line of the log: a traceback has them only before its first.
            inside = False
        elif inside and text and not text[0].isspace():
            inside = False
            continue
        chained = _CHAINED in text.lower() if text else chained
        if not inside:
            yield line


def _strip(line: str) -> str:
    line = line[: _MOST_CHARS * 2]
    found = PREFIX.match(line)
    return line[found.end() if found else 0 :].rstrip()


def _find_raised(texts: Sequence[str]) -> str | None:
    """The last line of the first traceback, of those that a process ended with where there are any."""
    begins = [at for at, text in enumerate(texts) if text.endswith(_TRACEBACK)]
    begins.sort(key=lambda at: _ENDS not in texts[at])
    ends = (next(_raised_after(texts, at), None) for at in begins)
    return next((end[:_MOST_CHARS] for end in ends if end is not None), None)


def _raised_after(texts: Sequence[str], at: int) -> Iterator[str]:
    """Lines of the traceback are set in, all but the last; those of other processes may come between."""
    for text in texts[at + 1 :]:
        if text.endswith(_TRACEBACK):
            return
        if _RAISED.fullmatch(text) and not _CHILD_FAILED.search(text):
            yield text
