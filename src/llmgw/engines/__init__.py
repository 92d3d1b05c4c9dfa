"""All that the author of an engine plugin imports.

The map of this room:

- ``hookspecs.py``  the hooks: what a plugin may answer, each with its promise
- ``types.py``      the facts that pass either way, re-exported here
- ``answers.py``    what several engines answer in the same form
- ``causes.py``     why an engine ended: rules over its last lines
- ``progress.py``   how far one is that starts, by a table of patterns
- ``flags.py``      a command line as flags and values, and the flags that a help text lists
- ``parsers.py``    parsers of tool calls and reasoning: those that a binary has, the one that fits a model
- ``releases.py``   which of two is older, and what each knows
- ``environment.py``  cards, fabric and caches, as CUDA, NCCL and the hub's library read them
- ``check.py``      the flags that would be passed, against those that a binary knows
- ``sources.py``    where plugins lie: installed, or in the folder of LLMGW_PLUGINS
- ``registry.py``   opens each plugin as an ``Engine`` that never raises on odd text, or says why it can't
- ``testing.py``    ``EngineContract``: the tests that every plugin can run over itself
- ``samples.py``    the launches that it tries, one for each thing that a plugin says it can do

A plugin is a module (or an object) under the entry-point group ``llmgw.engines``, whose functions carry ``@hookimpl``;
the entry point's name is the engine's name. docs/engine-plugins.md shows each hook with an example.
"""

from __future__ import annotations

import pluggy

from llmgw.core.model import Lora, Model, ModelName, Profile, Task
from llmgw.core.replica import Load
from llmgw.engines.answers import read_max_model_len
from llmgw.engines.causes import Rule, diagnose, rule
from llmgw.engines.environment import pin_cards, pin_fabric, place_caches, stay_offline
from llmgw.engines.flags import (
    Given,
    find_given,
    find_less_context,
    find_owned,
    find_owned_env,
    find_stray,
    is_given,
    read_argparse_help,
    split_args,
    value_of,
)
from llmgw.engines.parsers import check_parsers, name_tool_parser
from llmgw.engines.progress import read_progress
from llmgw.engines.releases import knows, list_changes, order_release
from llmgw.engines.types import (
    BROKEN,
    LOADING,
    READY,
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    Fabric,
    Flag,
    FlagChange,
    FlagStyle,
    Health,
    HealthState,
    Launch,
    LogFact,
    ParserFlag,
    ProbeOutput,
    Problem,
    RequestRules,
    SourceKind,
    Takes,
    Version,
)

__all__ = [
    "BROKEN",
    "LOADING",
    "READY",
    "Cause",
    "CauseKind",
    "Command",
    "Embedded",
    "EngineInfo",
    "Fabric",
    "Flag",
    "FlagChange",
    "FlagStyle",
    "Given",
    "Health",
    "HealthState",
    "Launch",
    "Load",
    "LogFact",
    "Lora",
    "Model",
    "ModelName",
    "ParserFlag",
    "ProbeOutput",
    "Problem",
    "Profile",
    "RequestRules",
    "Rule",
    "SourceKind",
    "Takes",
    "Task",
    "Version",
    "check_parsers",
    "diagnose",
    "find_given",
    "find_less_context",
    "find_owned",
    "find_owned_env",
    "find_stray",
    "hookimpl",
    "is_given",
    "knows",
    "list_changes",
    "name_tool_parser",
    "order_release",
    "pin_cards",
    "pin_fabric",
    "place_caches",
    "read_argparse_help",
    "read_max_model_len",
    "read_progress",
    "rule",
    "split_args",
    "stay_offline",
    "value_of",
]

hookimpl = pluggy.HookimplMarker("llmgw")
