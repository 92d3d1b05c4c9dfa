"""A whole fleet in one process, with no clock and no chance but its own: the real core over machines that are objects.

faults      what goes wrong and when, what operators do and what clients ask: data
chance      draws such a schedule from one seed
site        the nodes that there are, and the models
loop        the time of the simulation, and what happens next
machine     a node's GPUs and memory, and the engines on it: what really runs
agent       a node's agent: level-triggered, as agent/tree.py is
link        a message link that is slow, stalls, or breaks
control     the server half: the fleet, the leases, what outlives a restart
client      requests: an answer, or an honest refusal
books       what the fleet says that is so
invariants  what has to hold after every step
oracle      what has to be so once the faults have stopped
world       joins all of these, and plays a scenario to its end
figures     how fast that goes
"""
