"""The decisions of llmgw as pure functions and one pure machine: no await, no clock, no log, nothing from outside.

Facts          model (what an operator writes), node (what a machine reports), replica (what runs, and what may follow
               what), rejection (the closed list of reasons against a node), identity (who asks)
In and out     events (everything that can happen), effects (everything that can be asked for)
Look-ups       catalog (a name or an alias to its model), topology (nodes that one replica may use together)
Decisions      scaling (how many, and when to try again), placement (where), routing (which ready replica serves)
The machine    fleet: ``Fleet.handle(event, now) -> effects``, the only writer of what is desired
Apart          sse: where events of an event stream begin and end

README.md beside this file draws the loop.
"""
