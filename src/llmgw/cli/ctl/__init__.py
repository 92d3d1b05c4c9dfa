"""``llmgw ctl``: the table of the commands that look into a running server, and the one that works on certificates."""

from __future__ import annotations

import click

from llmgw.cli.commands import CommandTable

COMMANDS = {
    "cert": "Make and look at the certificates of server and nodes; works on files alone.",
    "cordon": "Keep new replicas off a node.",
    "drain": "Have what runs on a node run elsewhere, so that it can be taken away.",
    "engine-check": "Check the flags that an engine would get against those its binary knows.",
    "engines": "The engine plugins, and the binary that each node has for them.",
    "events": "What has happened of late and why, and what happens.",
    "explain-placement": "Why a model is where it is, or is nowhere, and what would change that.",
    "label": "Give a node labels, or take some away.",
    "load": "Load a model: one that was stopped, or that loads on demand.",
    "model": "Add, remove and show models while the server runs, and return to earlier definitions.",
    "models": "The models, whether they serve, and what their replicas do.",
    "node": "Remove nodes that will not come back.",
    "nodes": "The nodes, what they have, and when they were last heard of.",
    "reload": "Read server.yaml again.",
    "replicas": "The replicas, how far they have come, and why one failed.",
    "status": "The whole in a few lines, and what needs you.",
    "stop": "Hold a model at zero, or replace a replica.",
    "tool-check": "Check whether tool calls work at a model, and if not, why.",
    "uncordon": "Let a node take new replicas again.",
    "weights": "The weights that nodes have fetched and fetch, and what of them could be freed.",
}


@click.command("ctl", cls=CommandTable, prefix="llmgw.cli.ctl.", table=COMMANDS)
def command() -> None:
    """Look into a running server, and change its models and nodes.

    The server is asked on its operator port: --server URL, else LLMGW_ADMIN, else admin_listen of server.yaml.
    """
