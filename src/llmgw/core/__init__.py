"""The decisions of llmgw as pure functions and one pure machine: no await, no clock, no log, nothing from outside.

Facts          model (what an operator writes), node (what a machine reports), replica (what runs, and what may follow
               what), rejection (the closed list of reasons against a node), identity (who asks), hosts (a node with all
               that is booked and said of it), trace (what was decided of late), picture (the whole at one moment),
               weights (where a model's files come from, what is kept of them, and what is told of those on their way)
In and out     events (everything that can happen), effects (everything that can be asked for)
Look-ups       catalog (a name or an alias to its model), topology (nodes and GPUs that sit close together)
Decisions      placement (where: filters say why not here, costs how dear it is, unlock what would change a no), scaling
               (how many, and when to try again), demand (how much a model is asked for), learned (what launches have
               shown of memory and time), rolling (which definition is launched), routing (which ready replica serves),
               breaker (which one is passed over for a moment), brake (whether so many lost nodes can be believed),
               sharing (which nodes take weights from one another), pieces (which piece is taken from whom next)
Files          gguf, safetensors and headers (what the first bytes of weights tell), attention and sizing (how much
               memory a model takes)
The machine    fleet: ``Fleet.handle(event, now) -> effects``, the only writer of what is desired. Its rooms all work on
               one state: arrivals (nodes that come, report and go) and adoption (what they run already), orders (what
               people want), lives (what becomes of an epoch) and leaving (how one goes), planning (what a model lacks),
               with crews (who serves it, who is one too many), starting and evicting, and timers (what is due by now);
               roster: its books
Apart          sse: where events of an event stream begin and end

README.md beside this file draws the loop.
"""
