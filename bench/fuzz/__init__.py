"""Odd input of every kind, made at random: whether it is accepted or refused in our words, and does nothing else.

`python -m bench.fuzz [--examples N] [--only KIND] [--seed N] [--jobs N] [--out FILE]`

There are five kinds, each in a module of its own: recipes, command lines, run directories, checkpoints, data sets. An example
has at most 2 s of processor time (a command 10 s, as it may compose hundreds of configs) and 200 MB beyond what the process
has, and ends as

- accepted: it is read, or a run would begin;
- refused: a UserError says why, in few printable words;
- defect: any other exception, an effect (a file written or read elsewhere, a process, a socket), too slow, or too large.

There must be no defect. The same seed makes the same examples.
"""
