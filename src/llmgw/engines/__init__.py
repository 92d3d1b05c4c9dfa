"""All that the author of an engine plugin imports.

The map of this room:

- ``hookspecs.py``  the hooks: what a plugin may answer, each with its promise
- ``types.py``      the facts that pass either way, re-exported here
- ``answers.py``    what several engines answer in the same form
- ``causes.py``     why an engine ended: rules over its last lines
- ``flags.py``      a command line as flags and values, and the flags that a help text lists
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
from llmgw.engines.flags import Given, find_owned, read_argparse_help, split_args, value_of
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
    "diagnose",
    "find_owned",
    "hookimpl",
    "read_argparse_help",
    "read_max_model_len",
    "rule",
    "split_args",
    "value_of",
]

hookimpl = pluggy.HookimplMarker("llmgw")
