"""`mopd pipeline`: commands as a graph, each run once, on this machine or under Slurm.

    graph     the YAML file, and what is refused of it
    stamps    what has been made, from what: one record per stage
    stage     one stage: lock, command, log, record; what Slurm runs too
    local     independent stages side by side on this machine
    slurm     the same graph as jobs that depend on one another
    table     what is done and what is not
    command   the words of `mopd pipeline`

Torch-free: a stage is a process of its own, and this package knows of it no more than its exit code.
"""
