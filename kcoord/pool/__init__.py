"""The node's pool: processes on idle cores that compile keys before a rank asks for them.

A rank or a launcher starts it (`kcoord.rank.pool_start`), so that it has a job's interpreter, modules and container; the agent
(`kcoord.agent.pools`) decides what it compiles, and on how many cores. `process` imports the compilers once and forks the
workers; `worker` compiles one recipe after another.
"""
