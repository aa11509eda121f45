"""Which plain DDP says what is right.

Where plain DDP can do what a program does, with the program's own options, it is the oracle as it stands. It cannot
freeze after wrapping or leave something out without a search of the graph, nor reduce what was frozen when it was
built. There the oracle is another plain DDP: `find_unused_parameters=True`, everything trainable while it is built, and
frozen right after. It gives what the program's own DDP ought to give, because

- what a parameter's gradient is averaged to depends on what each rank accumulated for it, on which ranks did, and on
  the divisor. It does not depend on the buckets, so not on what else is in them. (The order of the sum may depend on
  the place in a bucket; a sum of two does not.)
- a search finds unused exactly what was left out or frozen, which is what a program without a search declares or
  freezes; and a search leaves `.grad` alone of what no rank used, as DDP does with parameters that it does not know,
  and as the hook promises for what is frozen or declared.
- what was frozen when DDP was built and is unfrozen later has to be averaged as if DDP had known it throughout.
- where nothing is left out, a search changes nothing but the buckets.

The same run counts bytes. What is not zero on some rank when it goes into a pass has to be sent, whatever the policy.
Where the policy knows for certain what was used, no more than that is: the bytes of the parameters that some rank used,
and with units (`skip_zero_rows="on"`) of those parts of them that are not zero on some rank.
"""

from __future__ import annotations

from typing import Any

from .program import Operation, Program


def passes(program: Program) -> list[Operation]:
    return [operation for operation in program.operations if operation["do"] == "pass"]


def own_options_will_do(program: Program) -> bool:
    """Say whether plain DDP can run the program with the program's own options."""
    options = program.options
    if any(operation["do"] in ("freeze", "unfreeze") for operation in program.operations):
        return False
    if options.find_unused_parameters or options.static_graph:
        return True
    return idleness_will_do(program) or all(_uses_all(program, operation) for operation in passes(program))


def _uses_all(program: Program, operation: Operation) -> bool:
    everything = {layer["id"] for layer in program.layers}
    return all(everything <= set(used) for used in operation["used"])


def idleness_will_do(program: Program) -> bool:
    """Say whether losses may have 0 * every parameter in them: with a search, DDP takes that for a second gradient."""
    if program.options.find_unused_parameters or program.options.static_graph:
        return False
    changes = any(
        operation["do"] in ("freeze", "unfreeze") or (operation["do"] == "rebuild" and operation.get("search"))
        for operation in program.operations
    )
    return not changes and all(
        bool(operation.get("idle")) or _uses_all(program, operation) for operation in passes(program)
    )


def options_of_the_oracle(program: Program) -> dict[str, Any]:
    """Return the options for the plain DDP that the hook is compared with."""
    options = program.options
    same = own_options_will_do(program)
    return {
        "find_unused_parameters": options.find_unused_parameters if same else True,
        "static_graph": options.static_graph and same,
    }
