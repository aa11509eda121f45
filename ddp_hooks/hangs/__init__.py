"""Names the ranks that others wait for, and says where they stand instead, and since when.

A thread of each process sleeps beside training (:mod:`ddp_hooks.hangs.watcher`). If its rank has waited for others for
too long, the thread asks all ranks where they are, through the store of the default process group, and their threads
answer. A thread reads what its rank does from the stack, and only then, so a step costs nothing.
"""
