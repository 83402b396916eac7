"""Task synthesis: seeded generators of prompts with checkable answers, and the files that they fill.

| module            | what it is                                                                             |
|-------------------|----------------------------------------------------------------------------------------|
| `task.py`         | `Task`, `Generator`: what a generator draws, at a difficulty that the caller chooses   |
| `difficulty.py`   | how many tasks of each difficulty: by weights, or where a policy learns most           |
| `graph.py`        | a knowledge graph, and walks through it whose end is the one answer to a question      |
| `graph_tasks.py`  | multi-hop questions over such walks                                                    |
| `contamination.py`| exact and n-gram overlap with held-out tasks                                           |
| `splits.py`       | prompt files for training, tuning and evaluation that have no task in common           |
"""
