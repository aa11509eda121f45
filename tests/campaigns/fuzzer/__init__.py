"""A differential fuzzer: random training programs, run with plain DDP and with the hook, and compared bit by bit.

program     what a program is: plain data, to and from JSON and readable text
generate    a random program from a seed
model       the module that a program describes
odd         gradients of odd numbers
execute     runs a program on one rank, once with plain DDP and once with the hook
units       where a parameter's units lie, and which of them a gradient uses
oracle      which plain DDP says what is right, and why
compare     what "the same" means
campaign    runs many programs in rank processes that are kept, and judges what comes back
shrink      makes a failing program small
"""
