"""Who is missing: which ranks others wait for, where these stand instead, and since when.

A thread of each process sleeps beside training (:mod:`ddp_hooks.hangs.watcher`). When its rank has waited for others
for too long, it asks all ranks where they are, through the store of the default process group, and their threads
answer. What a rank does is read from its stack then, so that a step costs nothing.
"""
