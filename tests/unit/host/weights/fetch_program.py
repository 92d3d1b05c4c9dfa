"""Fetches one source into a folder, to be killed while it does: ``fetch_program.py ENDPOINT FOLDER SOURCE``. It
writes how many bytes have come since it began, and each phase, each on a line of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from llmgw.core.node import NodeId
from llmgw.core.weights import parse_source
from llmgw.host.weights.disk.cache import Cache
from llmgw.host.weights.fetch import fetch
from llmgw.host.weights.peers import open_peers
from llmgw.host.weights.sources.origin import OriginSettings, open_origin
from llmgw.reactor.rate import Rate


class Counting(Rate):
    """Writes down what comes, as it comes."""

    come = 0

    async def take(self, count: int) -> None:
        self.come += count
        sys.stdout.write(f"{self.come}\n")
        sys.stdout.flush()


async def main(endpoint: str, folder: str, source: str) -> None:
    async with open_origin(OriginSettings(endpoint=endpoint)) as origin, open_peers(NodeId("n1"), None) as peers:
        await fetch(
            parse_source(source),
            cache=Cache(Path(folder)),
            origin=origin,
            peers=peers,
            swarm=lambda: None,
            tell=lambda told: print(told.phase, flush=True),
            newest=False,
            limits=Counting(None),
        )


trio.run(main, *sys.argv[1:])
