"""All that the author of an engine plugin imports.

The map of this room:

- ``hookspecs.py``  the hooks: what a plugin may answer, each with its promise
- ``types.py``      the facts that pass either way, re-exported here
- ``registry.py``   finds the installed plugins and wraps each as an ``Engine`` that never raises on odd text
- ``testing.py``    ``EngineContract``: the tests that every plugin can run over itself

A plugin is a module (or an object) under the entry-point group ``llmgw.engines``, whose functions carry ``@hookimpl``;
the entry point's name is the engine's name. docs/engine-plugins.md shows each hook with an example.
"""

from __future__ import annotations

import pluggy

from llmgw.core.model import Model, ModelName, Profile
from llmgw.engines.types import (
    BROKEN,
    LOADING,
    READY,
    Command,
    Embedded,
    EngineInfo,
    Health,
    HealthState,
    Launch,
    Load,
    LogFact,
    ProbeOutput,
    Problem,
    RequestRules,
    SourceKind,
    Version,
)

__all__ = [
    "BROKEN",
    "LOADING",
    "READY",
    "Command",
    "Embedded",
    "EngineInfo",
    "Health",
    "HealthState",
    "Launch",
    "Load",
    "LogFact",
    "Model",
    "ModelName",
    "ProbeOutput",
    "Problem",
    "Profile",
    "RequestRules",
    "SourceKind",
    "Version",
    "hookimpl",
]

hookimpl = pluggy.HookimplMarker("llmgw")
