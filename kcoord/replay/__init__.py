"""Compiles what a profile lists, ahead of the ranks or with them: one queue for each job, in the agent (`kcoord.agent.pools`).

The pool's process (`process`, started by `kcoord.rank.pool_start`) imports the compilers once and forks workers; each `worker`
takes one recipe after another. A process that calls `kcoord.warmup` takes part until the queue has nothing left for it, and
alone compiles for the current GPU, which the pool does not see. `recipes` replays one recipe, for both.
"""
