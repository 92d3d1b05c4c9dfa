"""The decisions of llmgw as pure functions and one pure machine: no await, no clock, no log, nothing from outside.

Facts          model (what an operator writes), node (what a machine reports), replica (what runs, and what may follow
               what), rejection (the closed list of reasons against a node), identity (who asks), hosts (a node with all
               that is booked and said of it), trace (what was decided of late), picture (the whole at one moment)
In and out     events (everything that can happen), effects (everything that can be asked for)
Look-ups       catalog (a name or an alias to its model), topology (nodes and GPUs that sit close together)
Decisions      scaling (how many, and when to try again), placement (where: filters say why not here, costs how dear it
               is, unlock what would change a no), routing (which ready replica serves), breaker (which one is passed
               over for a moment), brake (whether so many lost nodes can be believed)
The machine    fleet: ``Fleet.handle(event, now) -> effects``, the only writer of what is desired; roster: its books
Apart          sse: where events of an event stream begin and end

README.md beside this file draws the loop.
"""
