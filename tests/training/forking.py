"""Real processes at little cost: one server imports torch and the library, each process is forked from it.

All tests share the server, so what any of them needs is imported here.
"""

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["pytest", "tiny_task", "polyformer.recipes", "polyformer.cli", "accelerate", "datasets", "torch._dynamo"]
)
